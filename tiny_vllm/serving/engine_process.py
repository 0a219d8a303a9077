"""The engine process: `python -m tiny_vllm.serving.engine_process ADDRESS START`.

It builds the engine, tells when it is ready, and runs the loop. Signals are the API process's business: a
Ctrl-C or SIGTERM for the whole group must not end the engine while requests are finishing. If the API process
goes away, however it does, the engine goes too.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import msgspec
import zmq

from tiny_vllm.config import EngineConfig
from tiny_vllm.serving.engine_loop import DrivenEngine, EngineLoop
from tiny_vllm.serving.messages import Failed, Fault, FromEngine, Loading, Ready, Start, ToEngine, encode
from tiny_vllm.serving.warm_up import warm_up

PROGRESS_SECONDS = 0.1
LINGER_MS = 2000

Progress = Callable[[int, int], None]
Build = Callable[[EngineConfig, Progress], tuple[DrivenEngine, EngineConfig]]
"""Builds the engine of a configuration, and returns it with the resolved configuration."""


class ZmqChannel:
    """The engine's end of the socket pair."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        # A step never waits for a reader: what is unread is bounded by the tokens of the running requests.
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.connect(address)
        self._decode = msgspec.msgpack.Decoder(ToEngine).decode

    def receive(self, timeout: float) -> list[ToEngine]:
        messages: list[ToEngine] = []
        if timeout and not self._socket.poll(int(timeout * 1000)):
            return messages
        while True:
            try:
                messages.append(self._decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def send(self, message: FromEngine) -> None:
        self._socket.send(encode(message))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def build_engine(config: EngineConfig, progress: Progress) -> tuple[DrivenEngine, EngineConfig]:
    from tiny_vllm.engine import build

    plan = build.plan_engine(config)
    return build.build_engine(plan, progress=progress), plan.config


def main(arguments: Sequence[str], build: Build = build_engine) -> int:
    """arguments: the ZeroMQ address to connect to, and a Start message as JSON."""
    address, start_text = arguments
    start = msgspec.json.decode(start_text, type=Start)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname).1s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("tiny_vllm").setLevel(start.log_level)
    channel = ZmqChannel(address)
    has_started = False
    try:
        engine, config = build(start.config, _Reporter(channel))
        warm_up(engine, config)
        # What exists now stays: looking for cycles in it would hold steps up for a tenth of a second.
        gc.collect()
        gc.freeze()
        channel.send(Ready(asdict(config)))
        has_started = True
        EngineLoop(engine, channel, is_orphan=lambda: os.getppid() != start.parent_id).run()
    except Exception as error:
        logging.getLogger(__name__).debug("the engine process ends", exc_info=True)
        if has_started:  # why it could not start is what the command ends with
            cause = error.__cause__
            logging.getLogger(__name__).error("%s%s", error, f" (cause: {cause!r})" if cause else "")
        channel.send(Failed(Fault.of(error)))
        return 1
    finally:
        channel.close()
    return 0


class _Reporter:
    """Tells about the progress of loading, not too often. A load whose API process has gone is given up."""

    def __init__(self, channel: ZmqChannel) -> None:
        self._channel = channel
        self._parent_id = os.getppid()
        self._last = 0.0
        channel.send(Loading(0, 0))

    def __call__(self, num_done: int, num_total: int) -> None:
        now = time.monotonic()
        if now - self._last >= PROGRESS_SECONDS or num_done >= num_total:
            self._last = now
            self._channel.send(Loading(num_done, num_total))
            if os.getppid() != self._parent_id:
                sys.exit(1)


if __name__ == "__main__":
    # Afterwards everything is sent and closed. Taking Python and torch apart would hold up the server's end.
    os._exit(main(sys.argv[1:]))
