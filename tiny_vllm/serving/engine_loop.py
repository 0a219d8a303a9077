"""The loop of the engine process: take in what has arrived, compute a step, send what it brought."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from tiny_vllm.engine.engine import EngineStats, SequenceStatus
from tiny_vllm.errors import TinyVLLMError
from tiny_vllm.serving.messages import (
    Abort,
    Accepted,
    Add,
    Events,
    Fault,
    FromEngine,
    Quit,
    Refused,
    Report,
    Stop,
    ToEngine,
    Watch,
)
from tiny_vllm.types import Request, TokenEvent

REPORT_SECONDS = 0.1
IDLE_REPORT_SECONDS = 1.0
MAX_REPORT_SECONDS = 2.0
REPORT_SHARE = 0.005
"""Most of the engine's time that reports may take: a large pool's map is sent less often."""


class DrivenEngine(Protocol):
    """What the loop needs of an engine."""

    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def stop(self, request_id: str, index: int) -> None: ...
    def step(self) -> list[TokenEvent]: ...
    def stats(self) -> EngineStats: ...
    def slots(self) -> list[SequenceStatus]: ...
    def page_map(self) -> str: ...


class Channel(Protocol):
    """The way to the API process and back."""

    def receive(self, timeout: float) -> list[ToEngine]:
        """Everything that has arrived, in order; waits up to `timeout` seconds for a first message."""
        ...

    def send(self, message: FromEngine) -> None: ...


class EngineLoop:
    """Drives one engine until it is told to quit.

    is_orphan: whether the API process is gone; asked with every report.
    """

    def __init__(
        self, engine: DrivenEngine, channel: Channel, *, is_orphan: Callable[[], bool] = lambda: False
    ) -> None:
        self._engine = engine
        self._channel = channel
        self._is_orphan = is_orphan
        self._has_quit = False
        self._is_watched = False
        self._step_seconds = 0.0
        self._next_report = 0.0

    def run(self) -> None:
        """Raises what a step raises."""
        engine, channel = self._engine, self._channel
        self._report()
        while not self._has_quit:
            for message in channel.receive(0.0 if engine.has_work else IDLE_REPORT_SECONDS):
                self._obey(message)
            had_work = engine.has_work
            if had_work:
                start = time.perf_counter()
                events = engine.step()
                self._step_seconds += time.perf_counter() - start
                if events:
                    channel.send(Events(events))
            became_idle = had_work and not engine.has_work
            if became_idle or not had_work or time.perf_counter() >= self._next_report:
                self._report()

    def _obey(self, message: ToEngine) -> None:
        match message:
            case Add(number, requests):
                self._add(number, requests)
            case Abort(request_ids):
                for request_id in request_ids:
                    self._engine.abort(request_id)
            case Stop(choices):
                for request_id, index in choices:
                    self._engine.stop(request_id, index)
            case Watch(is_on):
                self._is_watched = is_on
            case Quit():
                self._has_quit = True

    def _add(self, number: int, requests: list[Request]) -> None:
        added: list[str] = []
        try:
            for request in requests:
                self._engine.add(request)
                added.append(request.request_id)
        except TinyVLLMError as error:
            for request_id in added:
                self._engine.abort(request_id)
            self._channel.send(Refused(number, Fault.of(error)))
        else:
            self._channel.send(Accepted(number))

    def _report(self) -> None:
        # Processor time: on a busy machine a report may be interrupted, which costs the engine nothing.
        start = time.thread_time()
        report = Report(self._engine.stats(), self._step_seconds)
        if self._is_watched:
            report.page_map = self._engine.page_map()
            report.slots = self._engine.slots()
        self._channel.send(report)
        pause = (time.thread_time() - start) / REPORT_SHARE
        self._next_report = time.perf_counter() + min(max(REPORT_SECONDS, pause), MAX_REPORT_SECONDS)
        if self._is_orphan():
            self._has_quit = True
