"""What streaming a token over HTTP costs the API process, without a model: processor seconds per token.

The engine is the tests' stub, which emits a token for every slot each step. With a pause between the steps
every token becomes an event of its own; without one the API process is the bottleneck and sends several
tokens at once. Processor time is read from /proc, so other load on the machine disturbs little.

The last row is a thousand requests of some 3,500 characters at once, for 256 slots, with clients in a process
of their own (http_burst.py): the median of --rounds by processor time. Its times need cores that are free.

    python -m benchmarks.http_cost --clients 64 --tokens 400 [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

SERVER = """
import os, sys
from tests.serving.support import STUB_COMMAND
from tiny_vllm.config import EngineConfig
from tiny_vllm.serving.config import ServerConfig
from tiny_vllm.serving.server import serve
command = ("env", f"STUB_STEP_SECONDS={sys.argv[1]}", *STUB_COMMAND)
engine = EngineConfig(max_num_seqs=int(sys.argv[2]), num_pages=100_000, max_model_len=8192)
serve(ServerConfig(port=0), engine, engine_command=command)
"""
PROMPT = list(range(300, 340))
BURST_STEP_SECONDS = 0.003
BURST_SLOTS = 256
BURST_TOKENS = 128
BURST_WORDS = 350


async def stream(port: int, num_tokens: int, path: str) -> int:
    """One streaming client. Returns the number of events."""
    body: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    body |= (
        {"prompt": PROMPT} if "chat" not in path else {"messages": [{"role": "user", "content": "Hi there"}]}
    )
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    received = bytearray()
    while part := await reader.read(1 << 16):
        received += part
    writer.close()
    assert received.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in received, received[:300]
    return received.count(b"data: {")


def cpu_seconds(process_id: int) -> float:
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def running(step_seconds: float, slots: int) -> Iterator[tuple[int, int]]:
    """A server whose engine is the stub; yields its process id and port once it has served something."""
    command = [sys.executable, "-c", SERVER, str(step_seconds), str(slots)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            port = int(server.stderr.readline().rpartition(":")[2])
            for _ in range(200):
                try:
                    asyncio.run(streams(port, slots, 16, "/v1/completions"))
                    break
                except (AssertionError, OSError):
                    time.sleep(0.1)
            yield server.pid, port
        finally:
            server.terminate()


async def streams(port: int, clients: int, num_tokens: int, path: str) -> list[int]:
    return await asyncio.gather(*(stream(port, num_tokens, path) for _ in range(clients)))


def measure(step_seconds: float, clients: int, tokens: int, path: str) -> dict[str, Any]:
    with running(step_seconds, clients) as (process_id, port):
        asyncio.run(streams(port, clients, 16, path))
        before, start = cpu_seconds(process_id), time.perf_counter()
        events = asyncio.run(streams(port, clients, tokens, path))
        seconds, cpu = time.perf_counter() - start, cpu_seconds(process_id) - before
    total = clients * tokens
    return {
        "tokens": total,
        "events": sum(events),
        "seconds": round(seconds, 3),
        "api_cpu_seconds": round(cpu, 3),
        "tokens_per_api_core_second": round(total / cpu),
    }


def measure_burst(requests: int, rounds: int) -> dict[str, Any]:
    arguments = (requests, BURST_TOKENS, BURST_WORDS)
    rows = []
    with running(BURST_STEP_SECONDS, BURST_SLOTS) as (process_id, port):
        for _ in range(rounds):
            command = [sys.executable, "-m", "benchmarks.http_burst", *map(str, (port, *arguments))]
            before = cpu_seconds(process_id)
            row = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
            cpu = cpu_seconds(process_id) - before
            per_core = round(row["tokens"] / cpu)
            rows.append(row | {"api_cpu_seconds": round(cpu, 3), "tokens_per_api_core_second": per_core})
    return sorted(rows, key=lambda row: float(row["api_cpu_seconds"]))[rounds // 2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--requests", type=int, default=1000, help="at once, in the last row")
    parser.add_argument("--rounds", type=int, default=3, help="of the last row")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for path in ("/v1/completions", "/v1/chat/completions"):
        for step_seconds in (0.01, 0.0):
            result = measure(step_seconds, args.clients, args.tokens, path)
            rows.append({"path": path, "step_seconds": step_seconds, **result})
            print(json.dumps(rows[-1]), flush=True)
    burst = measure_burst(args.requests, args.rounds)
    place = {"path": "/v1/completions", "step_seconds": BURST_STEP_SECONDS, "requests_at_once": args.requests}
    rows.append({**place, **burst})
    print(json.dumps(rows[-1]), flush=True)
    if args.json is not None:
        versions = {name: version(name) for name in ("fastapi", "httptools", "uvicorn", "uvloop")}
        command = shlex.join(["python", "-m", "benchmarks.http_cost", *sys.argv[1:]])
        content = {"command": command, "clients": args.clients, "python": platform.python_version()}
        content |= {**versions, "rows": rows}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
