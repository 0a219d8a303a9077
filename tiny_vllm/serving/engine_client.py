"""The API process's side of the engine: keeps a process running, and passes requests and events.

States: LOADING -> READY -> (the process dies) -> LOADING again, or DEAD; CLOSED at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import zmq

from tiny_vllm.config import EngineConfig
from tiny_vllm.engine.engine import EngineStats
from tiny_vllm.errors import EngineDead, TinyVLLMError
from tiny_vllm.outputs import RequestOutput, RequestUpdate
from tiny_vllm.serving.engine_child import EngineChild
from tiny_vllm.serving.event_pace import EventPace
from tiny_vllm.serving.generation import Generation
from tiny_vllm.serving.messages import (
    Abort,
    Accepted,
    Add,
    Events,
    Failed,
    FromEngine,
    Loading,
    Ready,
    Refused,
    Report,
    Start,
    Stop,
    Watch,
)
from tiny_vllm.text.output_processor import OutputProcessor
from tiny_vllm.text.request_builder import PreparedRequest
from tiny_vllm.text.tokenizer import Tokenizer
from tiny_vllm.types import Request, TokenEvent

logger = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-m", "tiny_vllm.serving.engine_process")
QUIT_SECONDS = 5.0
HEALTHY_SECONDS = 60.0
MIN_RESTART_DELAY = 0.25
MAX_RESTART_DELAY = 30.0

Observe = Callable[[Sequence[RequestUpdate], float], None]


class EngineState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DEAD = "dead"
    CLOSED = "closed"


class EngineClient:
    """One engine, in a process that may be replaced.

    command: starts an engine process; see engine_process.main for what is appended. on_ready: called with the
    resolved options whenever a process has become ready. observe: called with each batch of updates and the
    time they came. on_lost: called with the outputs of requests that will have no last update. ready, report,
    load_progress: the last news of each kind; None while there is none. failure: why the last process ended.
    All methods belong to the event loop's thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        restart: bool = True,
        log_level: int = logging.WARNING,
        on_ready: Callable[[Ready], None] = lambda ready: None,
        observe: Observe = lambda updates, now: None,
        on_lost: Callable[[Sequence[RequestOutput]], None] = lambda outputs: None,
    ) -> None:
        self.state = EngineState.LOADING
        self.ready: Ready | None = None
        self.report: Report | None = None
        self.load_progress: Loading | None = None
        self.failure: TinyVLLMError | None = None
        self.num_restarts = 0
        self._tokenizer = tokenizer
        self._command = command
        self._start = Start(config, log_level, os.getpid())
        self._restart = restart
        self._on_ready = on_ready
        self._observe = observe
        self._on_lost = on_lost
        self._processor = OutputProcessor(tokenizer)
        self._pace = EventPace(self._pass_on)
        self._numbers = itertools.count()
        self._offered: dict[int, Generation] = {}
        self._generations: dict[str, Generation] = {}
        self._child = self._new_child()
        self._closing = asyncio.Event()
        self._num_watchers = 0

    @property
    def process_id(self) -> int | None:
        return self._child.process_id

    @property
    def last_heard(self) -> float:
        """When the process last said something, on the monotonic clock."""
        return self._child.last_heard

    @property
    def stats(self) -> EngineStats | None:
        return None if self.report is None else self.report.stats

    @property
    def num_requests(self) -> int:
        """Prompts that have not finished."""
        return len(self._generations)

    def unfinished(self) -> list[tuple[Request, RequestOutput]]:
        """The prompts that have not finished, oldest first."""
        return [
            (generation.request_of(request_id), generation.output_of(request_id))
            for request_id, generation in self._generations.items()
        ]

    def check_ready(self) -> None:
        """Raises EngineDead unless the engine takes requests."""
        match self.state:
            case EngineState.READY:
                return
            case EngineState.LOADING:
                raise EngineDead("the model is being loaded", hint="try again in a moment")
            case EngineState.CLOSED:
                raise EngineDead("the server is shutting down", hint="try again later")
        raise EngineDead(f"the engine is dead: {_first_line(self.failure)}", hint="restart the server")

    async def submit(self, prepared: Sequence[PreparedRequest], *, is_streamed: bool) -> Generation:
        """Hand requests to the engine: all or none. Returns when they are queued.

        Raises RequestError, CapacityError or EngineDead.
        """
        self.check_ready()
        requests = [item.request for item in prepared]
        outputs = [self._processor.add(item.request, item.prompt) for item in prepared]
        generation = Generation(self, requests, outputs, is_streamed=is_streamed)
        self._generations.update(dict.fromkeys((output.request_id for output in outputs), generation))
        number = next(self._numbers)
        self._offered[number] = generation
        self._child.send(Add(number, requests))
        try:
            await generation.accepted()
        except BaseException:
            generation.close()
            raise
        finally:
            self._offered.pop(number, None)
        return generation

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests, and have the engine end them. Unknown ones are ignored."""
        known = [request_id for request_id in request_ids if request_id in self._generations]
        if not known:
            return
        self._on_lost([self._generations.pop(request_id).output_of(request_id) for request_id in known])
        for request_id in known:
            self._processor.remove(request_id)
        self._child.send(Abort(known))

    def watch(self) -> Callable[[], None]:
        """Have reports carry page maps, until the returned function is called."""
        self._num_watchers += 1
        if self._num_watchers == 1:
            self._child.send(Watch(True))

        def end() -> None:
            self._num_watchers -= 1
            if self._num_watchers == 0:
                self._child.send(Watch(False))

        return end

    async def run(self) -> None:
        """Keep an engine process running until `close`. Returns early when the engine is DEAD.

        A process that fails before any has been ready is not tried again: the reason will not go away.
        """
        delay = MIN_RESTART_DELAY
        while not self._closing.is_set():
            start = time.monotonic()
            await self._run_child()
            if self._closing.is_set():
                return
            was_ready, self.ready = self.ready is not None, None
            has_ever_been_ready = was_ready or self.num_restarts > 0
            if has_ever_been_ready:  # else it is what the command ends with
                logger.error("the engine process has ended: %s", self.failure)
            may_restart = self._restart and has_ever_been_ready
            self.state = EngineState.LOADING if may_restart else EngineState.DEAD
            self._fail_everything()
            if not may_restart:
                return
            self.num_restarts += 1
            if time.monotonic() - start > HEALTHY_SECONDS:
                delay = MIN_RESTART_DELAY
            logger.warning("starting a new engine process in %.1f s", delay)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), delay)
            delay = min(2 * delay, MAX_RESTART_DELAY)

    async def close(self, *, at_once: bool = False) -> None:
        """End the engine process; unfinished requests fail. at_once: do not wait until it ends by itself."""
        self.state = EngineState.CLOSED
        self._fail_everything()
        self._closing.set()
        await self._child.end(QUIT_SECONDS if self.ready is not None and not at_once else 0.0)

    def _new_child(self) -> EngineChild:
        return EngineChild(self._command, self._start, self._take)

    async def _run_child(self) -> None:
        """One process from start to end; `failure` then says why it ended."""
        self.failure = None
        self.report = self.load_progress = None
        self._child = self._new_child()
        try:
            ending = await self._child.run()
        except (OSError, zmq.ZMQError) as error:
            ending = EngineDead(
                f"the engine process cannot be started: {error}",
                hint="check memory, disk, and the limits of processes and of open files",
            )
        self.failure = self.failure or ending

    def _take(self, messages: Sequence[FromEngine]) -> None:
        """Messages that have come together: a stream gets the tokens of all of them as one update."""
        events: list[TokenEvent] = []
        for message in messages:
            if isinstance(message, Events):
                events += message.events
            else:
                self._take_other(message)
        self._pace.take(events)

    def _pass_on(self, events: Sequence[TokenEvent]) -> int:
        """Returns how many requests have news."""
        now = time.monotonic()
        progress = self._processor.process(events, now)
        if progress.stops:
            self._child.send(Stop(progress.stops))
        for update in progress.updates:
            self._deliver(update)
        self._observe(progress.updates, now)
        return len(progress.updates)

    def _take_other(self, message: FromEngine) -> None:
        match message:
            case Report():
                self.report = message
            case Accepted(number):
                if (generation := self._offered.get(number)) is not None:
                    generation.accept()
            case Refused(number, fault):
                if (generation := self._offered.get(number)) is not None:
                    generation.fail(fault.exception())
            case Loading():
                self.load_progress = message
            case Ready():
                self.ready = message
                self.state = EngineState.READY
                self._on_ready(message)
                if self._num_watchers:
                    self._child.send(Watch(True))
            case Failed(fault):
                self.failure = fault.exception()

    def _deliver(self, update: RequestUpdate) -> None:
        request_id = update.output.request_id
        generation = self._generations[request_id]
        if update.finished:
            del self._generations[request_id]
        generation.take(update)

    def _fail_everything(self) -> None:
        """Every unfinished request gets its end. What was told to a dead process is forgotten."""
        self._pace.flush()
        if self.state is EngineState.CLOSED:
            error = EngineDead("the server is shutting down", hint="try again later")
        else:
            error = EngineDead(
                f"the engine has died: {_first_line(self.failure)}", hint="try again in a moment"
            )
        generations = {id(generation): generation for generation in self._generations.values()}
        self._on_lost([output for _, output in self.unfinished()])
        self._generations.clear()
        self._offered.clear()
        self._processor = OutputProcessor(self._tokenizer)
        for generation in generations.values():
            generation.fail(error)


def _first_line(error: Any) -> str:
    return str(error).partition("\n")[0][:300]
