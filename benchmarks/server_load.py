"""Many streaming clients for minutes, a part of them hanging up at random: is anything lost or left behind?

Every client streams completions with token ids from a running server and checks that each stream is whole: as
many tokens as asked for, one end, nothing after it. Meanwhile /health is asked ten times a second, and the
memory of the server's processes is read. At the end the pages must all be back.

    tiny-vllm serve --port 8000 --max-queue-len 1000 &
    python benchmarks/server_load.py --url http://127.0.0.1:8000 --clients 200 --seconds 180 --json load.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import sys
import time
import urllib.parse
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


@dataclass
class Tally:
    """What all clients have seen."""

    finished: int = 0
    hung_up: int = 0
    refused: int = 0
    tokens: int = 0
    faults: list[str] = field(default_factory=list)
    health_seconds: list[float] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)


class Client:
    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80

    async def open(
        self, method: str, path: str, body: Any = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: {self.host}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(head.encode() + data)
        return reader, writer

    async def get(self, path: str) -> tuple[int, bytes]:
        reader, writer = await self.open("GET", path)
        data = await reader.read()
        writer.close()
        return int(data.split(b" ", 2)[1]), data.partition(b"\r\n\r\n")[2]


async def stream(client: Client, tally: Tally, rng: random.Random, max_tokens: int, share: float) -> None:
    """One request: read it to its end, or hang up somewhere in the middle."""
    num_tokens = rng.randint(1, max_tokens)
    body = {
        "prompt": [rng.randint(300, 400) for _ in range(rng.randint(1, 60))],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    leaves_after = rng.randint(0, num_tokens) if rng.random() < share else None
    reader, writer = await client.open("POST", "/v1/completions", body)
    try:
        status = await reader.readline()
        if b" 429 " in status:
            tally.refused += 1
            await asyncio.sleep(0.2)
            return
        if b" 200 " not in status:
            tally.faults.append(f"status {status!r}")
            return
        seen, ends, is_done = 0, 0, False
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            if is_done:
                tally.faults.append("data after [DONE]")
            if line.startswith(b"data: [DONE]"):
                is_done = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                tally.faults.append(str(event))
                return
            choice = event["choices"][0]
            seen += len(choice["token_ids"])
            ends += choice["finish_reason"] is not None
            if leaves_after is not None and seen >= leaves_after:
                tally.hung_up += 1
                return
        tally.tokens += seen
        tally.finished += 1
        if (seen, ends, is_done) != (num_tokens, 1, True):
            tally.faults.append(f"{seen} of {num_tokens} tokens, {ends} ends, done: {is_done}")
    finally:
        writer.close()


async def watch_health(client: Client, tally: Tally) -> None:
    while True:
        start = time.perf_counter()
        status, _ = await client.get("/health")
        tally.health_seconds.append(time.perf_counter() - start)
        if status != 200:
            tally.faults.append(f"/health: {status}")
        await asyncio.sleep(0.1)


async def live(client: Client) -> dict[str, Any]:
    """One snapshot of /live with a page map."""
    reader, writer = await client.open("GET", "/live")
    try:
        while line := await reader.readline():
            if line.startswith(b"data: ") and (snapshot := json.loads(line[6:]))["pages"]:
                return snapshot
    finally:
        writer.close()
    raise ConnectionError("the live stream has ended")


async def watch_memory(client: Client, tally: Tally) -> None:
    while True:
        snapshot = await live(client)
        tally.memory.append((snapshot["api_memory"] / 2**20, snapshot["engine_memory"] / 2**20))
        await asyncio.sleep(5)


async def run(args: argparse.Namespace) -> dict[str, Any]:
    client, tally = Client(args.url), Tally()
    end = time.monotonic() + args.seconds

    async def keep_asking(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < end:
            try:
                await stream(client, tally, rng, args.max_tokens, args.hang_up)
            except OSError as error:
                tally.faults.append(repr(error))

    watchers = [
        asyncio.create_task(watch_health(client, tally)),
        asyncio.create_task(watch_memory(client, tally)),
    ]
    start = time.monotonic()
    askers = [asyncio.create_task(keep_asking(number)) for number in range(args.clients)]
    _, unfinished = await asyncio.wait(askers, timeout=args.seconds + args.grace)
    seconds = time.monotonic() - start
    for task in (*askers, *watchers):
        task.cancel()
    for ended in await asyncio.gather(*askers, *watchers, return_exceptions=True):
        if isinstance(ended, Exception):
            tally.faults.append(repr(ended))
    for _ in range(100):
        stats = (await live(client))["stats"]
        if stats["num_running"] == stats["num_waiting"] == 0:
            break
        await asyncio.sleep(0.1)
    health = sorted(tally.health_seconds)
    return {
        "clients": args.clients,
        "seconds": round(seconds, 1),
        "finished": tally.finished,
        "hung_up": tally.hung_up,
        "refused": tally.refused,
        "unfinished": len(unfinished),
        "tokens_per_second": round(tally.tokens / seconds),
        "faults": len(tally.faults),
        "first_faults": tally.faults[:5],
        "health_p50_ms": round(1000 * health[len(health) // 2], 1),
        "health_p99_ms": round(1000 * health[int(len(health) * 0.99)], 1),
        "api_memory_mib": [round(api) for api, _ in tally.memory],
        "engine_memory_mib": [round(engine) for _, engine in tally.memory],
        "pages_missing": stats["num_pages"] - stats["num_free_pages"] - stats["num_cached_pages"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--grace", type=float, default=120, help="seconds to finish what was begun")
    parser.add_argument("--max-tokens", type=int, default=60)
    parser.add_argument("--hang-up", type=float, default=0.1, help="share of the requests that hang up")
    parser.add_argument("--json", type=Path, help="where the results go, beside stdout")
    args = parser.parse_args()
    machine = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "processors": os.cpu_count(),
        # Of what else runs here, before the load begins.
        "load_average_before": os.getloadavg()[0],
    }
    text = json.dumps(machine | asyncio.run(run(args)), indent=1)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
