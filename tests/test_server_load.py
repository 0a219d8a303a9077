"""The benchmark of many clients that come and go: it finds a server whole, and notices one that is not."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path

import pytest

from benchmarks import server_load
from tests.serving.support import running_server


def test_clients_that_come_and_go_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "load.json"
    with running_server(engine={"max_num_seqs": 8, "max_queue_len": 100}) as server:
        options = [
            "--clients",
            "30",
            "--seconds",
            "3",
            "--grace",
            "60",
            "--hang-up",
            "0.3",
            "--json",
            str(report),
        ]
        monkeypatch.setattr(sys, "argv", ["server_load.py", "--url", server.url, *options])
        server_load.main()
        server.assert_alive()
    result = json.loads(report.read_text(encoding="utf-8"))
    assert json.loads(capsys.readouterr().out) == result
    assert (
        result["first_faults"] == []
        and result["faults"] == result["unfinished"] == result["pages_missing"] == 0
    )
    assert result["finished"] > 30 and result["hung_up"] > 5 and result["tokens_per_second"] > 0
    assert result["api_memory_mib"] and result["engine_memory_mib"] and result["health_p99_ms"] > 0


def event(*token_ids: int, reason: str | None = None) -> str:
    choice = {"index": 0, "text": "", "token_ids": token_ids, "finish_reason": reason}
    return "data: " + json.dumps({"choices": [choice]})


DONE = "data: [DONE]"
BROKEN = {
    "a token too few": ([event(1, 2), event(reason="length"), DONE], "2 of 3 tokens"),
    "a token twice": ([event(1, 2), event(2, 3, reason="length"), DONE], "4 of 3 tokens"),
    "no end": ([event(1, 2, 3), DONE], "0 ends"),
    "two ends": ([event(1, 2, 3, reason="length"), event(reason="length"), DONE], "2 ends"),
    "cut off": ([event(1, 2, 3, reason="length")], "done: False"),
    "more after the end": ([event(1, 2, 3, reason="length"), DONE, event()], "data after [DONE]"),
    "an error": ([event(1), 'data: {"error": {"message": "dead"}}', DONE], "dead"),
}


async def faults_of(lines: list[str]) -> list[str]:
    """What a client of a server that answers with these lines notes, of a request for three tokens."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + "\n\n".join([*lines, ""]).encode())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    tally = server_load.Tally()
    async with server:
        port = server.sockets[0].getsockname()[1]
        client = server_load.Client(f"http://127.0.0.1:{port}")
        rng = random.Random(0)
        rng.randint = lambda low, high: min(3, high)  # type: ignore[method-assign]
        await server_load.stream(client, tally, rng, max_tokens=60, share=0.0)
    return tally.faults


@pytest.mark.parametrize("name", BROKEN)
def test_a_stream_that_is_not_whole_is_a_fault(name: str) -> None:
    lines, said = BROKEN[name]
    faults = asyncio.run(faults_of(lines))
    assert faults and said in faults[0]


def test_a_whole_stream_is_none() -> None:
    lines = [event(1), event(2, 3, reason="length"), DONE]
    assert asyncio.run(faults_of(lines)) == []
