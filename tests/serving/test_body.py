from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from starlette.requests import Request

from tiny_vllm.serving import body as body_module
from tiny_vllm.serving.body import LONG_BODY, BodyReader
from tiny_vllm.serving.config import ServerConfig
from tiny_vllm.serving.openai_requests import LONG_TEXT, is_long
from tiny_vllm.serving.schemas import Body


def request_with(data: bytes) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": data, "more_body": False}

    headers = [(b"content-type", b"application/json")]
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


def test_between_two_long_bodies_others_have_many_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, turns_at_parse, sizes = 0, [], []

    def parse(body_class: type[Body], data: bytes) -> Body:
        turns_at_parse.append(turns)
        sizes.append(len(data))
        return body_class()

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def test() -> None:
        reader = BodyReader(ServerConfig())
        others = asyncio.create_task(take_turns())
        async with asyncio.timeout(120):
            lengths = (LONG_BODY, LONG_BODY + 1, LONG_BODY + 2, LONG_BODY - 1)
            await asyncio.gather(*(reader.read(request_with(b" " * n), Body) for n in lengths))
        others.cancel()

    monkeypatch.setattr(body_module, "parse_body", parse)
    monkeypatch.setattr(body_module, "PAUSE_SECONDS", 0.2)  # a busy machine has few turns in the real pause
    asyncio.run(test())
    # The short one does not wait for the long ones.
    assert sizes == [LONG_BODY - 1, LONG_BODY, LONG_BODY + 1, LONG_BODY + 2]
    long_ones = turns_at_parse[1:]
    assert all(later - earlier >= 5 for earlier, later in pairwise(long_ones))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (None, False),
        ("x" * LONG_TEXT, False),
        ("x" * (LONG_TEXT + 1), True),
        ([5] * LONG_TEXT, False),
        ([5] * (LONG_TEXT + 1), True),
        (["x" * (LONG_TEXT // 2)] * 3, True),
        ([{"role": "user", "content": [{"type": "text", "text": "x" * LONG_TEXT}]}], True),
        ([{"role": "user", "content": "x"}], False),
    ],
)
def test_all_texts_and_ids_count(prompt: Any, expected: bool) -> None:
    assert is_long(prompt) is expected
    assert is_long(None, prompt) is expected


def test_depth_does_not_matter() -> None:
    nested: Any = "x" * LONG_TEXT
    for _ in range(5000):
        nested = [nested]
    assert is_long(nested)
