"""The API process's side of the engine: starts its process, watches it, and passes requests and events.

States: LOADING -> READY -> (the process dies) -> LOADING again, or DEAD; CLOSED at the end. A process gets a
socket of its own, so nothing of a dead one can reach its successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tiny_vllm.config import EngineConfig
from tiny_vllm.engine.engine import EngineStats
from tiny_vllm.errors import EngineDead, TinyVLLMError
from tiny_vllm.outputs import RequestOutput, RequestUpdate
from tiny_vllm.serving.generation import Generation
from tiny_vllm.serving.messages import (
    Abort,
    Accepted,
    Add,
    Events,
    Failed,
    FromEngine,
    Loading,
    Quit,
    Ready,
    Refused,
    Report,
    Start,
    Stop,
    ToEngine,
    Watch,
    encode,
)
from tiny_vllm.text.output_processor import OutputProcessor
from tiny_vllm.text.request_builder import PreparedRequest
from tiny_vllm.text.tokenizer import Tokenizer
from tiny_vllm.types import Request

logger = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-m", "tiny_vllm.serving.engine_process")
QUIT_SECONDS = 5.0
LAST_WORDS_SECONDS = 0.5
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
        self.last_heard = time.monotonic()
        self.num_restarts = 0
        self._config = config
        self._tokenizer = tokenizer
        self._command = command
        self._restart = restart
        self._log_level = log_level
        self._on_ready = on_ready
        self._observe = observe
        self._on_lost = on_lost
        self._processor = OutputProcessor(tokenizer)
        self._numbers = itertools.count()
        self._offered: dict[int, Generation] = {}
        self._generations: dict[str, Generation] = {}
        self._socket: zmq.asyncio.Socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._num_watchers = 0
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode

    @property
    def process_id(self) -> int | None:
        return None if self._process is None else self._process.pid

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
        self._send(Add(number, requests))
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
        if self._socket is not None:
            self._send(Abort(known))

    def watch(self) -> Callable[[], None]:
        """Have reports carry page maps, until the returned function is called."""
        self._num_watchers += 1
        if self._num_watchers == 1 and self._socket is not None:
            self._send(Watch(True))

        def end() -> None:
            self._num_watchers -= 1
            if self._num_watchers == 0 and self._socket is not None:
                self._send(Watch(False))

        return end

    async def run(self) -> None:
        """Keep an engine process running until `close`. Returns early when the engine is DEAD.

        A process that fails before any has been ready is not tried again: the reason will not go away.
        """
        delay = MIN_RESTART_DELAY
        while True:
            start = time.monotonic()
            try:
                await self._run_process()
            except OSError as error:
                self.failure = EngineDead(f"the engine process cannot be started: {error}")
            if self.state is EngineState.CLOSED:
                return
            was_ready, self.ready = self.ready is not None, None
            has_ever_been_ready = was_ready or self.num_restarts > 0
            logger.error("the engine process has ended: %s", self.failure)
            if not (self._restart and has_ever_been_ready):
                self.state = EngineState.DEAD
                self._fail_everything()
                return
            self.state = EngineState.LOADING
            self._fail_everything()
            self.num_restarts += 1
            if time.monotonic() - start > HEALTHY_SECONDS:
                delay = MIN_RESTART_DELAY
            logger.warning("starting a new engine process in %.1f s", delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_RESTART_DELAY)

    async def close(self) -> None:
        """End the engine process; unfinished requests fail."""
        self.state = EngineState.CLOSED
        self._fail_everything()
        process = self._process
        if process is None:
            return
        if self._socket is not None:
            self._send(Quit())
        try:
            async with asyncio.timeout(QUIT_SECONDS if self.ready is not None else 0.0):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _run_process(self) -> None:
        """Start a process and follow it to its end; `failure` then says why."""
        self.failure = None
        self.report = self.load_progress = None
        self.last_heard = time.monotonic()
        directory = Path(tempfile.mkdtemp(prefix="tiny-vllm-"))
        context = zmq.asyncio.Context()
        receiver: asyncio.Task[None] | None = None
        try:
            address = f"ipc://{directory}/engine"
            self._socket = context.socket(zmq.DEALER)
            self._socket.set_hwm(0)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.bind(address)
            start = msgspec.json.encode(Start(self._config, self._log_level)).decode()
            self._process = await asyncio.create_subprocess_exec(
                *self._command, address, start, stdin=asyncio.subprocess.DEVNULL
            )
            receiver = asyncio.create_task(self._receive(self._socket))
            code = await self._process.wait()
            await self._hear_last_words(receiver)
            if self.failure is None:
                self.failure = EngineDead(f"its process ended {_describe_exit(code)}")
        finally:
            if receiver is not None:
                receiver.cancel()
                await asyncio.gather(receiver, return_exceptions=True)
            if self._process is not None and self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
            self._process = None
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            context.term()
            shutil.rmtree(directory, ignore_errors=True)

    async def _hear_last_words(self, receiver: asyncio.Task[None]) -> None:
        """Messages sent before a process ended may arrive after its end."""
        heard = -1.0
        while heard != self.last_heard and not receiver.done():
            heard = self.last_heard
            await asyncio.sleep(LAST_WORDS_SECONDS / 5)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            data = await socket.recv()
            self.last_heard = time.monotonic()
            try:
                self._take(self._decode(data))
            except Exception:
                # One message must not end the hearing of all others.
                logger.exception("a message of the engine cannot be handled")

    def _take(self, message: FromEngine) -> None:
        match message:
            case Events(events):
                now = time.monotonic()
                progress = self._processor.process(events, now)
                if progress.stops:
                    self._send(Stop(progress.stops))
                for update in progress.updates:
                    self._deliver(update)
                self._observe(progress.updates, now)
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
                    self._send(Watch(True))
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

    def _send(self, message: ToEngine) -> None:
        assert self._socket is not None
        # Without a high-water mark this never waits, so there is nothing to await.
        self._socket.send(encode(message))


def _describe_exit(code: int) -> str:
    return f"by signal {-code}" if code < 0 else f"with exit code {code}"


def _first_line(error: Any) -> str:
    return str(error).partition("\n")[0][:300]
