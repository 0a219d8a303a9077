"""One engine process, from its start to its end, and the socket between it and the API process.

A process gets a socket of its own, so nothing of a dead one can reach its successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from tiny_vllm.errors import EngineDead
from tiny_vllm.serving.messages import FromEngine, Quit, Start, ToEngine, encode

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 0.5
# With 256 streams some 30 ms, which is how long others wait when the engine is faster than this process.
MAX_TAKEN_TOGETHER = 8


class EngineChild:
    """command: starts the process; see engine_process.main for what is appended. take: gets each message.

    process_id: None while there is no process. last_heard: time of the last message, on the monotonic clock.
    """

    def __init__(self, command: Sequence[str], start: Start, take: Callable[[FromEngine], None]) -> None:
        self.last_heard = time.monotonic()
        self._command = command
        self._start = start
        self._take = take
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode
        self._process: asyncio.subprocess.Process | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._must_end = False

    @property
    def process_id(self) -> int | None:
        return None if self._process is None else self._process.pid

    def send(self, message: ToEngine) -> None:
        """Never waits. What is sent when there is no process is lost with it."""
        if self._socket is not None:
            self._socket.send(encode(message))

    async def run(self) -> EngineDead:
        """Start the process, follow it to its end and return how it ended.

        Raises OSError or ZMQError if it cannot be started.
        """
        directory = Path(tempfile.mkdtemp(prefix="tiny-vllm-"))
        context = zmq.asyncio.Context()
        receiver: asyncio.Task[None] | None = None
        try:
            address = f"ipc://{directory}/engine"
            self._socket = context.socket(zmq.DEALER)
            self._socket.set_hwm(0)  # sending never waits
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.bind(address)
            start = msgspec.json.encode(self._start).decode()
            self._process = await asyncio.create_subprocess_exec(
                *self._command, address, start, stdin=asyncio.subprocess.DEVNULL
            )
            receiver = asyncio.create_task(self._receive(self._socket))
            if self._must_end:
                self._process.kill()
            code = await self._process.wait()
            if not self._must_end:
                await self._hear_last_words(receiver)
            return EngineDead(f"its process ended {_describe_exit(code)}")
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

    async def end(self, patience: float) -> None:
        """Have the process end by itself, and kill it after so many seconds."""
        self._must_end = True
        process = self._process
        if process is None:
            return
        self.send(Quit())
        try:
            async with asyncio.timeout(patience):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _hear_last_words(self, receiver: asyncio.Task[None]) -> None:
        """Messages sent before a process ended may arrive after its end."""
        heard = -1.0
        while heard != self.last_heard and not receiver.done():
            heard = self.last_heard
            await asyncio.sleep(LAST_WORDS_SECONDS / 5)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        """While messages are there, `recv` lets nobody else run. Some are taken together, so that under load
        a stream sends several tokens in an event, which costs little more than one; then it is the streams'
        turn."""
        while True:
            for _ in range(MAX_TAKEN_TOGETHER):
                self._hear(await socket.recv())
            await asyncio.sleep(0)

    def _hear(self, data: bytes) -> None:
        self.last_heard = time.monotonic()
        try:
            self._take(self._decode(data))
        except Exception:
            # One message must not end the hearing of all others.
            logger.exception("a message of the engine cannot be handled")


def _describe_exit(code: int) -> str:
    return f"by signal {-code}" if code < 0 else f"with exit code {code}"
