"""Streams get fewer and larger events when there are many of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from tiny_vllm.serving import event_pace
from tiny_vllm.serving.event_pace import EventPace
from tiny_vllm.types import TokenEvent


class Streams:
    """Notes what it gets, and when. num_streams: that are said to have moved each time."""

    def __init__(self, num_streams: int) -> None:
        self.num_streams = num_streams
        self.rounds: list[list[int | None]] = []
        self.times: list[float] = []

    def deliver(self, events: Sequence[TokenEvent]) -> int:
        self.rounds.append([event.token_id for event in events])
        self.times.append(time.monotonic())
        return self.num_streams


def token(token_id: int) -> TokenEvent:
    return TokenEvent("a", 0, token_id)


def test_what_comes_early_waits_for_its_round_and_keeps_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock that decides what is early stands still, however long the test is interrupted."""
    monkeypatch.setattr(event_pace, "EVENT_SECONDS", 1e-3)
    now = time.monotonic()
    monkeypatch.setattr(event_pace, "time", SimpleNamespace(monotonic=lambda: now))
    streams = Streams(100)

    async def run() -> None:
        pace = EventPace(streams.deliver)
        for token_id in (1, 2, 3):
            pace.take([token(token_id)])
        assert streams.rounds == [[1]]
        await asyncio.sleep(0.15)
        assert streams.rounds == [[1], [2, 3]]
        nonlocal now
        now += 0.15
        pace.take([token(4)])
        assert streams.rounds[2:] == [[4]]

    asyncio.run(run())
    assert streams.times[1] - streams.times[0] >= 0.099


def test_few_streams_do_not_wait() -> None:
    streams = Streams(1)

    async def run() -> None:
        pace = EventPace(streams.deliver)
        for token_id in range(5):
            pace.take([token(token_id)])
            time.sleep(0.5e-3)  # a step

    asyncio.run(run())
    assert streams.rounds == [[0], [1], [2], [3], [4]]


def test_the_end_of_the_engine_flushes_what_is_held() -> None:
    streams = Streams(100_000)

    async def run() -> None:
        pace = EventPace(streams.deliver)
        pace.take([token(1)])
        pace.take([token(2)])
        pace.flush()
        pace.flush()
        await asyncio.sleep(0)

    asyncio.run(run())
    assert streams.rounds == [[1], [2]]
