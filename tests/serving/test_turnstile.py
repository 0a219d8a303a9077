"""Calls that arrive together are let in a few in each turn of the event loop, in order."""

from __future__ import annotations

import asyncio
from typing import Any

from tiny_vllm.serving.turnstile import MAX_PER_TURN, Turnstile


class Turns:
    """Counts turns of the loop."""

    def __init__(self) -> None:
        self.number = 0
        self._count()

    def _count(self) -> None:
        self.number += 1
        self._handle = asyncio.get_running_loop().call_soon(self._count)

    def stop(self) -> None:
        self._handle.cancel()


def calls(turnstile: Turnstile, methods: list[str]) -> list[asyncio.Task[None]]:
    async def call(number: int, method: str) -> None:
        scope = {"type": "http", "method": method, "number": number}
        await turnstile(scope, None, None)  # type: ignore[arg-type]

    return [asyncio.create_task(call(number, method)) for number, method in enumerate(methods)]


def run_through(methods: list[str], cancelled: range = range(0)) -> list[tuple[int, int]]:
    """(turn, number) of each call, in the order in which the application saw them."""
    seen: list[tuple[int, int]] = []

    async def test() -> None:
        turns = Turns()

        async def application(scope: Any, receive: Any, send: Any) -> None:
            seen.append((turns.number, scope["number"]))

        turnstile = Turnstile(application)
        tasks = calls(turnstile, methods)
        await asyncio.sleep(0)
        for number in cancelled:
            tasks[number].cancel()
        async with asyncio.timeout(120):
            await asyncio.gather(*tasks, return_exceptions=True)
            # And again, after nothing was to be done for some turns.
            await asyncio.sleep(0.01)
            await asyncio.gather(*calls(turnstile, methods[:1]))
        turns.stop()

    asyncio.run(test())
    return seen


def test_a_few_calls_come_in_in_each_turn() -> None:
    seen = run_through(["POST"] * 5 * MAX_PER_TURN)
    assert [number for _, number in seen] == [*range(5 * MAX_PER_TURN), 0]
    turns = [turn for turn, _ in seen[:-1]]
    assert max(turns.count(turn) for turn in turns) == MAX_PER_TURN
    assert turns[-1] - turns[0] < 10


def test_who_only_asks_how_it_is_does_not_wait() -> None:
    seen = run_through(["POST"] * 20 + ["GET"])
    places = {number: place for place, (_, number) in enumerate(seen[:-1])}
    assert places[20] == MAX_PER_TURN


def test_calls_that_are_given_up_keep_nobody_out() -> None:
    gone = range(MAX_PER_TURN, 9)
    seen = run_through(["POST"] * 12, gone)
    assert [number for _, number in seen] == [*range(MAX_PER_TURN), *range(9, 12), 0]
