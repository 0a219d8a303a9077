"""What a machine and its clients can do to a server: it stays up, and says what happened."""

from __future__ import annotations

import http.client
import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.serving.support import Answer, Hold, assert_once_below, running_server, wait_until

ROOT = Path(__file__).parents[2]
SERVER = """
import json, sys
from tiny_vllm.config import EngineConfig
from tiny_vllm.serving import server
from tiny_vllm.serving.config import ServerConfig

port, command, tcp_options = json.loads(sys.argv[1])
server.TCP_OPTIONS.update(tcp_options)
server.serve(ServerConfig(port=port, drain_timeout=2.0), EngineConfig(), engine_command=command)
"""
LONG = {
    "prompt": [28, 29, 30],
    "max_tokens": 400,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,
}


@dataclass
class ServerProcess:
    """A server in a process of its own. log: what it has written to stderr. hold: of its engine."""

    process: subprocess.Popen[bytes]
    port: int
    log_path: Path
    hold: Hold

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def engine_id(self) -> int:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        (engine,) = path.read_text().split()
        return int(engine)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=120)

    def request(self, path: str, body: Any = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            if body is None:
                connection.request("GET", path)
            else:
                connection.request(
                    "POST", path, json.dumps(body).encode(), {"content-type": "application/json"}
                )
            response = connection.getresponse()
            return Answer(response.status, {}, response.read())
        finally:
            connection.close()

    def status(self, path: str = "/health") -> int:
        """0 while nobody answers."""
        try:
            return self.request(path).status
        except (OSError, http.client.HTTPException):
            return 0

    def metric(self, name: str) -> float:
        """NaN in the moment between an engine's readiness and its first report."""
        lines = self.request("/metrics").data.decode().splitlines()
        values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{")]
        assert len(values) <= 1
        return values[0] if values else math.nan

    def assert_alive(self) -> None:
        wait_until(lambda: self.status() == 200)
        answer = self.request(
            "/v1/completions", {"prompt": [28, 29], "max_tokens": 3, "return_token_ids": True}
        )
        assert answer.json()["choices"][0]["token_ids"] == [28, 29, 28]


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nobody else is given meanwhile. Who asks for it by number may still listen there."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


@contextmanager
def server_process(
    directory: Path,
    *,
    stderr: str | None = None,
    prefix: Sequence[str] = (),
    step_seconds: float = 0.01,
    **tcp_options: int,
) -> Iterator[ServerProcess]:
    """prefix: what to start it with. step_seconds: of its engine. tcp_options: instead of server.TCP_OPTIONS.
    It ends with code 0."""
    log_path = Path(stderr) if stderr is not None else directory / "log"
    hold = Hold(directory / "hold")
    with reserved_port() as port, open(log_path, "w") as log:
        arguments = json.dumps([port, hold.command(step_seconds), tcp_options])
        command = [*prefix, sys.executable, "-c", SERVER, arguments]
        with subprocess.Popen(command, stderr=log, stdout=log, cwd=ROOT) as process:
            try:
                server = ServerProcess(process, port, log_path, hold)
                wait_until(lambda: server.status() == 200, 180)
                yield server
                process.terminate()
                assert process.wait(60) == 0
            finally:
                process.kill()


def send(connection: socket.socket, body: Any) -> None:
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)


def test_an_engine_killed_under_load_ends_every_stream_once_and_is_replaced(tmp_path: Path) -> None:
    with server_process(tmp_path) as server, ThreadPoolExecutor(24) as pool:
        with server.hold:
            # More streams than the stub has slots: some run, and some still wait.
            streams = [pool.submit(server.request, "/v1/completions", LONG) for _ in range(20)]
            whole = {**LONG, "stream": False}
            wholes = [pool.submit(server.request, "/v1/completions", whole) for _ in range(4)]
            wait_until(lambda: server.metric("vllm:num_requests_running") == 8)
            wait_until(lambda: server.metric("vllm:num_requests_waiting") == 16)
            killed = server.engine_id
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: server.status() == 503)
        for stream in streams:
            answer = stream.result(60)
            events = answer.events()  # which has a look at the end of the stream
            assert answer.status == 200
            assert [event for event in events if "error" in event] == events[-1:]
            assert "signal 9" in events[-1]["error"]["message"]
            tokens = [t for event in events[:-1] for choice in event["choices"] for t in choice["token_ids"]]
            assert tokens == [28, 29, 30] * (len(tokens) // 3) + [28, 29, 30][: len(tokens) % 3]
        for answer in wholes:
            assert answer.result(60).status == 503
            assert "signal 9" in answer.result().error["message"]
        server.assert_alive()
        assert server.engine_id != killed
        assert "the engine process has ended: its process ended by signal 9" in server.log
        assert "starting a new engine process" in server.log and "Traceback" not in server.log
        assert server.metric("vllm:num_requests_running") == server.metric("vllm:kv_cache_usage_perc") == 0


def test_without_file_descriptors_connections_are_refused_and_streams_go_on(tmp_path: Path) -> None:
    with ExitStack() as stack:
        limited = server_process(tmp_path, prefix=("prlimit", "--nofile=64:64"), step_seconds=0.002)
        server = stack.enter_context(limited)
        pool = stack.enter_context(ThreadPoolExecutor(2))
        with ExitStack() as held:
            with server.hold:
                stream = pool.submit(server.request, "/v1/completions", LONG)
                wait_until(lambda: server.metric("vllm:num_requests_running") == 1)
                crowd = [held.enter_context(server.connect()) for _ in range(100)]
                assert crowd[-1].recv(1000).startswith(b"HTTP/1.1 503")
            ended = [event["choices"][0]["finish_reason"] for event in stream.result(60).events()]
            assert ended[-1] == "length"
        server.assert_alive()
        assert server.log.count("connections are refused: of 64 file descriptors") == 1


def test_an_engine_that_dies_while_connections_are_refused_is_replaced_all_the_same(tmp_path: Path) -> None:
    with server_process(tmp_path, prefix=("prlimit", "--nofile=64:64")) as server, ExitStack() as stack:
        first, *_ = [stack.enter_context(server.connect()) for _ in range(100)]
        wait_until(lambda: "connections are refused" in server.log)
        killed = server.engine_id

        def health() -> bytes:
            first.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            return first.recv(1000)[:12]

        with server.hold:
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: health() == b"HTTP/1.1 503")
        wait_until(lambda: health() == b"HTTP/1.1 200")
        assert server.engine_id != killed and "cannot be started" not in server.log


def test_a_client_that_never_reads_is_given_up(tmp_path: Path) -> None:
    """Its slots are free when the text is complete, and its place when the system gives the connection up."""
    body = {**LONG, "n": 100, "max_tokens": 500}
    with server_process(tmp_path, TCP_USER_TIMEOUT=1000) as server:
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", server.port))
            send(deaf, body)
            wait_until(lambda: server.metric("vllm:num_requests_running") == 8)
            wait_until(lambda: server.metric("vllm:num_requests_running") == 0, 60)
            assert server.status() == 200
        server.assert_alive()


def test_many_half_open_connections_do_not_keep_others_out(tmp_path: Path) -> None:
    beginnings = (b"", b"POST", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-le")
    body = (
        b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
    )
    with running_server(receive_timeout=5.0) as server, ExitStack() as stack:
        halves = []
        for number in range(300):
            half = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=120))
            half.sendall([*beginnings, body][number % 4])
            halves.append(half)
        assert server.complete([28, 29], max_tokens=2).status == 200
        # Nobody had to be hung up on for this.
        halves[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            halves[-1].recv(1)
        halves[-1].settimeout(120)
        # In the end the server hangs up on all of them.
        for number, half in enumerate(halves):
            data = b"".join(iter(lambda half=half: half.recv(4096), b""))
            assert data.startswith(b"HTTP/1.1 408") if number % 4 == 3 else data == b""
        server.assert_alive()


def test_five_megabytes_of_nested_json_from_many_do_not_hold_up_health() -> None:
    nested = b'{"prompt": ' + b"[" * 2_500_000 + b"]" * 2_500_000 + b"}"
    flat = b'{"prompt": [' + b"[]," * 1_600_000 + b"[]]}"
    paths = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
    with running_server() as server, ThreadPoolExecutor(8) as pool:

        def slowest_health() -> float:
            answers = [pool.submit(server.post, path, data) for path in paths * 2 for data in (nested, flat)]
            slowest = server.slowest_health(answers)
            assert {answer.result().status for answer in answers} == {400}
            return slowest

        assert_once_below(5, slowest_health)
        server.assert_alive()


def test_a_full_disk_behind_the_log_is_survived(tmp_path: Path) -> None:
    with server_process(tmp_path, stderr="/dev/full") as server:
        with server.hold:
            os.kill(server.engine_id, signal.SIGKILL)  # there is something to log
            wait_until(lambda: server.status() == 503)
        server.assert_alive()


def test_a_disk_that_fills_up_while_streams_run_disturbs_none(tmp_path: Path) -> None:
    """The log is a pipe nobody reads any more: writing fails, or would wait for ever."""
    script = SERVER.replace("engine_command=command", "engine_command=command, log_level=10")
    hold = Hold(tmp_path / "hold")
    with reserved_port() as port:
        arguments = json.dumps([port, hold.command(step_seconds=0.002), {}])
        with subprocess.Popen(
            [sys.executable, "-c", script, arguments], stderr=subprocess.PIPE, cwd=ROOT
        ) as process:
            try:
                server = ServerProcess(process, port, Path(os.devnull), hold)
                wait_until(lambda: server.status() == 200, 180)
                assert process.stderr is not None
                with ThreadPoolExecutor(4) as pool:
                    with hold:
                        streams = [pool.submit(server.request, "/v1/completions", LONG) for _ in range(4)]
                        wait_until(lambda: server.metric("vllm:num_requests_running") == 4)
                        process.stderr.close()
                    for stream in streams:
                        tokens = [t for e in stream.result(60).events() for t in e["choices"][0]["token_ids"]]
                        assert len(tokens) >= 400 and tokens[:6] == [28, 29, 30] * 2
                server.assert_alive()
                process.terminate()
                assert process.wait(60) == 0
            finally:
                process.kill()
