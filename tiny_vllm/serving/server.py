"""Runs the server: opens the model's tokenizer, listens, and stops in order.

From the first SIGTERM or Ctrl-C on, /ready fails; `drain_delay` seconds later new requests are refused, and
running ones have `drain_timeout` seconds to finish. Then the server stops listening. The second signal ends
at once.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import uvicorn

from tiny_vllm.config import EngineConfig
from tiny_vllm.errors import ConfigError, EngineDead, TinyVLLMError, shown, written_out
from tiny_vllm.serving.app import create_app
from tiny_vllm.serving.config import ServerConfig
from tiny_vllm.serving.engine_client import ENGINE_COMMAND, EngineState
from tiny_vllm.serving.protocol import limited_protocol
from tiny_vllm.serving.service import ServedModel, Service
from tiny_vllm.serving.turnstile import Turnstile
from tiny_vllm.weights.checkpoint import open_checkpoint

BACKLOG = 2048
COLLECT_AFTER = 20_000
"""Objects more than at the last look for cycles. The tokens of a few steps are a thousand objects, and in
Python's own setting of 700 each look goes through those: half of what a token costs."""
KEEP_ALIVE_SECONDS = 30
TCP_OPTIONS = {
    "TCP_KEEPIDLE": 30,  # seconds of silence before asking
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 120_000,  # milliseconds that data may stay unread
}


def serve(
    config: ServerConfig,
    engine_config: EngineConfig,
    *,
    engine_command: Sequence[str] = ENGINE_COMMAND,
    log_level: int = logging.WARNING,
) -> None:
    """Serve until told to stop. Raises ConfigError and ModelError for what cannot be served."""
    model = open_model(config, engine_config)
    service = Service(config, engine_config, model, engine_command=engine_command, log_level=log_level)
    _raise_file_limit()
    with listening_socket(config.host, config.port) as listener:
        address = listener.getsockname()
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        with contextlib.suppress(OSError):  # a full disk behind stderr is no reason not to serve
            name = written_out(model.name)
            print(f"{name}: listening on http://{host}:{address[1]}", file=sys.stderr, flush=True)
            if model.recommendation is not None:
                print(
                    f"requests that do not set them have {written_out(model.recommendation)} "
                    "(--generation-config none: OpenAI's)",
                    file=sys.stderr,
                    flush=True,
                )
        # What exists now stays: looking for cycles in it would hold every stream up.
        gc.collect()
        gc.freeze()
        gc.set_threshold(COLLECT_AFTER, 10, 10)
        server = Server(service)
        server.run(sockets=[listener])
    if server.start_failure is not None:
        raise server.start_failure


def open_model(config: ServerConfig, engine_config: EngineConfig) -> ServedModel:
    """What the API needs of the model. Raises ConfigError or ModelError."""
    checkpoint = open_checkpoint(
        engine_config.model, load_format=engine_config.load_format, tokenizer=engine_config.tokenizer
    )
    choice = checkpoint.choose_sampling_defaults(engine_config.generation_config)
    defaults = checkpoint.sampling_defaults(engine_config.generation_config)
    aliases = {checkpoint.name, engine_config.model} - {None}
    return ServedModel(
        name=config.served_model_name or checkpoint.name,
        aliases=frozenset() if config.served_model_name else frozenset(map(str, aliases)),
        vocab_size=checkpoint.spec.vocab_size,
        hidden_size=checkpoint.spec.hidden_size,
        kv_values_per_token=checkpoint.spec.kv_values_per_token,
        head_dim=checkpoint.spec.head_dim,
        tokenizer=None if checkpoint.tokenizer is None else checkpoint.load_tokenizer(),
        sampling_defaults=defaults,
        recommendation=choice.reason if defaults else None,
    )


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that clients can reach; it outlives every engine process. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, ValueError) as error:
        # Names that the encoding for host names refuses are a UnicodeError, those with a null a ValueError.
        reason = error.strerror if isinstance(error, OSError) else "no name of a host is so"
        raise ConfigError(
            f"host {shown(host)} is no address of this machine: {reason}",
            hint="127.0.0.1 is for this machine only, 0.0.0.0 is every network interface",
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _notice_lost_peers(listener)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}", hint="give another --host or --port"
        ) from None
    return listener


def _notice_lost_peers(listener: socket.socket) -> None:
    """Have the system close connections whose other side is gone without a word. They inherit this."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in TCP_OPTIONS.items():
        if hasattr(socket, name):  # not every system has all of them
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Server(uvicorn.Server):
    """uvicorn, with our way to stop. start_failure: why the engine could not even start."""

    def __init__(self, service: Service) -> None:
        self._service = service
        config = uvicorn.Config(
            Turnstile(create_app(service, on_engine_end=self._stop_without_engine)),
            log_config=None,
            log_level=logging.getLogger("tiny_vllm").getEffectiveLevel() + 10,
            access_log=False,  # ours knows more
            server_header=False,
            proxy_headers=False,  # nothing here depends on the client's address
            http=limited_protocol(service.config.receive_timeout),
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=service.config.drain_timeout,  # type: ignore[arg-type]
            backlog=BACKLOG,
        )
        super().__init__(config)
        self.start_failure: TinyVLLMError | None = None
        self._stop_time: float | None = None

    def stop(self) -> None:
        """Take no more requests, and end when the running ones have finished."""
        self._service.is_draining = True
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Whether to end now. Until then the server listens, if only to say that it takes no more."""
        return await super().on_tick(counter) and self._is_drained(time.monotonic())

    def _is_drained(self, now: float) -> bool:
        """Also shuts the door when it is time. now: seconds on the monotonic clock."""
        config, door = self._service.config, self._service.door
        if self._stop_time is None:
            self._stop_time = now
        # Whoever has never heard that it is ready need not hear that it no longer is.
        shut_time = self._stop_time + (config.drain_delay if self._service.has_been_ready else 0.0)
        seconds_left = shut_time + config.drain_timeout - now
        self.config.timeout_graceful_shutdown = max(seconds_left, 0.0)  # type: ignore[assignment]
        door.is_shut = now >= shut_time
        is_over = door.is_shut and (not door.num_inside or seconds_left <= 0)
        return is_over or self.force_exit

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does it, but the application also ends in order after a second signal."""
        await super().shutdown(sockets)
        if self.force_exit:
            self._service.must_end_at_once = True
            await self.lifespan.shutdown()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn does it, but a stop that was asked for is no failure: signals are not raised again."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread hears signals
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        previous = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.stop()

    def _stop_without_engine(self) -> None:
        """An engine that could not even start is a mistake in the options: there is nothing to wait for."""
        if self._service.engine.state is EngineState.DEAD and not self._service.has_been_ready:
            failure = self._service.engine.failure
            if isinstance(failure, EngineDead):
                failure = EngineDead(f"the engine could not start: {failure.message}", hint=failure.hint)
            self.start_failure = failure
            self.stop()


def _raise_file_limit() -> None:
    """As many open files, and so connections, as the system allows without asking."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
