"""One engine process, from its start to its end, and the socket between it and the API process.

A process gets a socket of its own, so nothing of a dead one can reach its successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq

from tiny_vllm.errors import EngineDead
from tiny_vllm.serving.messages import FromEngine, Quit, Start, ToEngine, encode

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 0.5
MAX_TAKEN_TOGETHER = 8
"""Messages of one turn. Under load a stream gets the tokens of several steps in an event, which costs little
more than one; with 256 streams that is some 10 ms, for which all others wait."""


class EngineChild:
    """command: starts the process; see engine_process.main for what is appended. take: gets messages, in
    order, those that have come since the last turn together.

    process_id: None while there is no process. last_heard: time of the last message, on the monotonic clock.
    """

    def __init__(
        self, command: Sequence[str], start: Start, take: Callable[[list[FromEngine]], None]
    ) -> None:
        self.last_heard = time.monotonic()
        self._command = command
        self._start = start
        self._take = take
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode
        self._process: asyncio.subprocess.Process | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._must_end = False
        self._is_turn_due = False

    @property
    def process_id(self) -> int | None:
        return None if self._process is None else self._process.pid

    def send(self, message: ToEngine) -> None:
        """Never waits. What is sent when there is no process is lost with it."""
        if self._socket is None:
            return
        with contextlib.suppress(zmq.Again):  # nobody is connected
            self._socket.send(encode(message), zmq.NOBLOCK)
        # Sending may take note of what has come, and then the descriptor does not tell.
        self._hear_soon()

    async def run(self) -> EngineDead:
        """Start the process, follow it to its end and return how it ended.

        Raises OSError or ZMQError if it cannot be started.
        """
        directory = Path(tempfile.mkdtemp(prefix="tiny-vllm-"))
        context = zmq.Context()
        try:
            address = f"ipc://{directory}/engine"
            socket = context.socket(zmq.DEALER)
            socket.set_hwm(0)  # sending never waits
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address)
            start = msgspec.json.encode(self._start).decode()
            self._process = await asyncio.create_subprocess_exec(
                *self._command, address, start, stdin=asyncio.subprocess.DEVNULL
            )
            self.listen(socket)
            if self._must_end:
                self._process.kill()
            code = await self._process.wait()
            if not self._must_end:
                await self._hear_last_words()
            hint = None
            if code == -signal.SIGKILL:
                hint = (
                    "so the system ends what takes too much memory: "
                    "lower num_pages, max_model_len or max_num_batched_tokens"
                )
            return EngineDead(f"its process ended {_describe_exit(code)}", hint=hint)
        finally:
            if self._process is not None and self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
            self._process = None
            if self._socket is not None:
                asyncio.get_running_loop().remove_reader(self._socket.fileno())
                self._socket = None
            context.destroy(linger=0)
            shutil.rmtree(directory, ignore_errors=True)

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """Take what comes there from now on."""
        self._socket = socket
        asyncio.get_running_loop().add_reader(socket.fileno(), self._hear_now)
        self._hear_soon()

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

    async def _hear_last_words(self) -> None:
        """Messages sent before a process ended may arrive after its end."""
        heard = -1.0
        while heard != self.last_heard:
            heard = self.last_heard
            await asyncio.sleep(LAST_WORDS_SECONDS / 5)

    def _hear_now(self) -> None:
        if not self._is_turn_due:  # once in each turn of the loop
            self._hear()

    def _hear_soon(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            asyncio.get_running_loop().call_soon(self._hear)

    def _hear(self) -> None:
        """Take some of the messages that are there; then it is the turn of others."""
        self._is_turn_due = False
        messages: list[FromEngine] = []
        while self._socket is not None:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            # One message must not end the hearing of all others.
            try:
                messages.append(self._decode(data))
            except msgspec.MsgspecError:
                logger.exception("a message of the engine cannot be read")
            if len(messages) == MAX_TAKEN_TOGETHER:
                # The descriptor tells only of what comes after this.
                self._hear_soon()
                break
        if not messages:
            return
        self.last_heard = time.monotonic()
        try:
            self._take(messages)
        except Exception:
            logger.exception("messages of the engine cannot be handled")


def _describe_exit(code: int) -> str:
    return f"by signal {-code}" if code < 0 else f"with exit code {code}"
