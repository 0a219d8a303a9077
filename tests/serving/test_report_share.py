"""What a watched page costs the engine, on a clock that only the engine's own work moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.engines import FakeEngine
from tiny_vllm.serving import engine_loop
from tiny_vllm.serving.messages import Quit, Report, Watch

STEP_SECONDS = 0.002


class TimedEngine:
    """Runs for so many steps; a page map takes a time of its own."""

    def __init__(self, num_steps: int, map_seconds: float) -> None:
        self.num_steps, self.map_seconds = num_steps, map_seconds
        self.now = self.seconds_of_maps = 0.0
        self.engine = FakeEngine().engine

    @property
    def has_work(self) -> bool:
        return self.num_steps > 0

    def step(self) -> list[Any]:
        self.num_steps -= 1
        self.now += STEP_SECONDS
        return []

    def page_map(self) -> str:
        self.now += self.map_seconds
        self.seconds_of_maps += self.map_seconds
        return "n"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class Channel:
    def __init__(self) -> None:
        self.messages: list[Any] = [Watch(True)]
        self.num_maps = 0

    def receive(self, timeout: float) -> list[Any]:
        messages, self.messages = self.messages, []
        return messages or ([Quit()] if timeout else [])

    def send(self, message: Any) -> None:
        self.num_maps += isinstance(message, Report) and message.page_map is not None


@pytest.mark.parametrize("map_seconds", [0.0001, 0.0005, 0.002, 0.01])
def test_page_maps_take_less_than_a_hundredth_of_the_engines_time(
    map_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, channel = TimedEngine(10_000, map_seconds), Channel()
    clock = SimpleNamespace(thread_time=lambda: engine.now, perf_counter=lambda: engine.now)
    monkeypatch.setattr(engine_loop, "time", clock)
    engine_loop.EngineLoop(engine, channel).run()
    assert 0 < engine.seconds_of_maps < 0.01 * engine.now
    # The page draws four times a second: quick maps are no rarer than that.
    assert channel.num_maps > (4 * engine.now if map_seconds <= 0.001 else 5)
