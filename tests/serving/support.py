"""What the server's tests share: a server in a thread, a raw HTTP client, waiting."""

from __future__ import annotations

import asyncio
import functools
import http.client
import json
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_vllm.config import EngineConfig, GenerationConfig
from tiny_vllm.serving.config import ServerConfig
from tiny_vllm.serving.engine_client import EngineState
from tiny_vllm.serving.server import Server, listening_socket, open_model
from tiny_vllm.serving.service import ServedModel, Service

STUB_COMMAND = (sys.executable, str(Path(__file__).with_name("stub_engine.py")))


async def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until something is true, and fail if it takes too long."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def wait_until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """The same, without an event loop."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.01)


def has_ended(process_id: int) -> bool:
    """Also if nobody has asked for its exit code yet."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def assert_once_below(limit: float, measure: Callable[[], float], tries: int = 5) -> None:
    """One of a few measurements is below the limit: other programs on the machine only make them larger."""
    seen: list[float] = []
    while not seen or (min(seen) >= limit and len(seen) < tries):
        seen.append(measure())
    assert min(seen) < limit, seen


@dataclass
class Hold:
    """While this is entered, what engines of `command` do comes to no end: see stub_engine.py."""

    path: Path

    def command(self, step_seconds: float = 0.005) -> tuple[str, ...]:
        return ("env", f"STUB_HOLD={self.path}", f"STUB_STEP_SECONDS={step_seconds}", *STUB_COMMAND)

    def __enter__(self) -> None:
        self.path.touch()

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        self.path.unlink(missing_ok=True)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    data: bytes

    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def error(self) -> dict[str, Any]:
        """The error, after a look at its shape."""
        body = self.json()
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert len(self.data) < 2000
        return body["error"]

    def events(self) -> list[dict[str, Any]]:
        """The chunks of a stream, which ends as it must."""
        parts = self.data.decode().split("\n\n")
        assert parts[-2:] == ["data: [DONE]", ""]
        return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


@dataclass
class RunningServer:
    """A server in a thread of this process. Its parts may be looked at, but only the loop may change them."""

    service: Service
    port: int
    stop: Callable[[], None]
    thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """One request on a connection of its own. body: bytes as they are, anything else as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            sent = {"content-type": "application/json"} if data is not None else {}
            connection.request(method, path, data, {**sent, **(headers or {})})
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, names, response.read())
        finally:
            connection.close()

    def get(self, path: str, **options: Any) -> Answer:
        return self.request("GET", path, **options)

    def post(self, path: str, body: Any, **options: Any) -> Answer:
        return self.request("POST", path, body, **options)

    def complete(self, prompt: Any, **options: Any) -> Answer:
        return self.post("/v1/completions", {"prompt": prompt, **options})

    def is_idle(self) -> bool:
        """Whether nothing is left of any request: in the server, in the slots, in the pool."""
        stats = self.service.engine.stats
        return (
            self.service.admission.num_requests == 0
            and self.service.engine.num_requests == 0
            and stats is not None
            and stats.num_running == stats.num_waiting == 0
            and stats.num_free_pages + stats.num_cached_pages == stats.num_pages
        )

    def slowest_health(self, calls: Sequence[Future[Any]]) -> float:
        """The longest wait for /health while calls run, in seconds. Calls that take more than four, as on a
        slow machine, count as if they took four. Infinite if there was no time to ask several times."""
        start, waits = time.monotonic(), list[float]()
        while not all(call.done() for call in calls):
            asked = time.monotonic()
            assert self.get("/health").status == 200
            waits.append(time.monotonic() - asked)
        return max(waits) / max(1.0, (time.monotonic() - start) / 4) if len(waits) > 5 else math.inf

    def assert_alive(self) -> None:
        wait_until(self.is_idle)
        answer = self.complete([5, 6, 7], max_tokens=4, return_token_ids=True)
        assert answer.status == 200, answer.data


@functools.cache
def _model(name: str | None, generation_config: GenerationConfig) -> ServedModel:
    return open_model(ServerConfig(), EngineConfig(model=name, generation_config=generation_config))


@contextmanager
def sent(server: RunningServer, body: Any, headers: str = "") -> Iterator[socket.socket]:
    """A completion on a raw socket that is closed, without a good-bye, at the end."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{headers}"
    head += f"content-length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as connection:
        connection.sendall(head.encode() + data)
        yield connection


@contextmanager
def running_server(
    command: Sequence[str] = STUB_COMMAND,
    engine: dict[str, Any] | None = None,
    *,
    wait: bool = True,
    **options: Any,
) -> Iterator[RunningServer]:
    """engine: engine options. wait: until the engine is ready and has said so. options: server options."""
    config = ServerConfig(port=0, **{"drain_timeout": 1.0, **options})
    engine_config = EngineConfig(**(engine or {}))
    model = _model(engine_config.model, engine_config.generation_config)
    service = Service(config, engine_config, model, engine_command=command)
    listener = listening_socket(config.host, config.port)
    port = listener.getsockname()[1]
    server = Server(service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        if wait:
            wait_until(lambda: service.engine.state is not EngineState.LOADING, 180.0)
            assert service.engine.state is EngineState.READY, service.engine.failure
            wait_until(lambda: service.engine.stats is not None)  # its first report comes after that
        yield RunningServer(service, port, server.stop, thread)
    finally:
        server.stop()
        thread.join(60)
        assert not thread.is_alive(), "the server does not stop"
