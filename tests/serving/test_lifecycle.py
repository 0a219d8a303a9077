"""Requests that end early, engines that die, servers that stop: nothing is lost or left behind."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.serving.stub_engine import EXIT, FAIL, HANG
from tests.serving.support import Hold, RunningServer, assert_once_below, running_server, sent, wait_until

LONG = {"prompt": [28, 29, 30], "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Hold:
    """Tests that look at a request while it runs hold its end back: on a busy machine it would be over before
    they have looked."""
    return Hold(tmp_path_factory.mktemp("lifecycle") / "hold")


@pytest.fixture(scope="module")
def server(hold: Hold) -> Iterator[RunningServer]:
    with running_server(hold.command(), {"max_num_seqs": 2, "max_queue_len": 3}) as server:
        yield server


def stats(server: RunningServer) -> Any:
    return server.service.engine.stats


def num_steps_after(server: RunningServer, leave: Callable[[], None]) -> int:
    """How many steps the engine makes from a client's leaving until nothing is left of its request."""
    start = stats(server).num_steps
    leave()
    wait_until(server.is_idle)
    return int(stats(server).num_steps - start)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_goes_away_frees_its_slot_and_pages(
    server: RunningServer, hold: Hold, is_streamed: bool
) -> None:
    def go_away() -> int:
        with sent(server, {**LONG, "stream": is_streamed}) as connection:
            if is_streamed:
                assert connection.recv(1000).startswith(b"HTTP/1.1 200")
            wait_until(lambda: stats(server).num_running == 1)
            return num_steps_after(server, connection.close)

    with hold:
        assert_once_below(60, go_away)
    assert b'status="503"' not in server.get("/metrics").data, "nobody was told anything"
    server.assert_alive()


@pytest.mark.parametrize("next_path", ["/health", "/v1/completions"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_goes_away_after_sending_more_requests_frees_its_slot_too(
    server: RunningServer,
    hold: Hold,
    is_streamed: bool,
    next_path: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def go_away() -> int:
        with sent(server, {**LONG, "stream": is_streamed}) as connection:
            wait_until(lambda: stats(server).num_running == 1)
            if next_path == "/health":
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 3)
            else:
                body = json.dumps(LONG).encode()
                head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                connection.sendall(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
            time.sleep(0.1)
            return num_steps_after(server, connection.close)

    with hold:
        assert_once_below(60, go_away)
    assert "Traceback" not in caplog.text
    server.assert_alive()


def test_a_waiting_client_that_goes_away_is_forgotten(server: RunningServer, hold: Hold) -> None:
    with hold, sent(server, {**LONG, "n": 2}):
        wait_until(lambda: stats(server).num_running == 2)
        with sent(server, LONG):
            wait_until(lambda: stats(server).num_waiting == 1)
        wait_until(lambda: stats(server).num_waiting == 0)
        assert stats(server).num_running == 2
    server.assert_alive()


def test_a_client_that_closes_only_its_sending_side_still_is_gone(server: RunningServer, hold: Hold) -> None:
    with hold, sent(server, LONG) as connection:
        wait_until(lambda: stats(server).num_running == 1)
        connection.shutdown(socket.SHUT_WR)
        wait_until(server.is_idle)


def test_a_full_queue_is_429_with_a_time_to_come_back(server: RunningServer, hold: Hold) -> None:
    with hold, ExitStack() as stack:
        stack.enter_context(sent(server, {**LONG, "n": 2}))
        wait_until(lambda: stats(server).num_running == 2)
        stack.enter_context(sent(server, {**LONG, "n": 3}))
        wait_until(lambda: stats(server).num_waiting == 3)
        for stream in (False, True):
            answer = server.complete([5], stream=stream)
            assert (answer.status, answer.error["type"]) == (429, "rate_limit_error")
            assert int(answer.headers["retry-after"]) > 0
        assert server.get("/health").status == 200
    server.assert_alive()


def test_many_streams_at_once_lose_and_repeat_nothing(server: RunningServer) -> None:
    def one(number: int) -> list[int]:
        body = {"prompt": [number, 30, 31], "max_tokens": 30, "stream": True, "return_token_ids": True}
        while (answer := server.post("/v1/completions", body)).status == 429:
            time.sleep(0.01)
        return [t for event in answer.events() for t in event["choices"][0]["token_ids"]]

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(one, range(200, 232)))
    assert results == [[number, 30, 31] * 10 for number in range(200, 232)]
    server.assert_alive()


def test_a_client_that_reads_slowly_gets_everything(server: RunningServer) -> None:
    body = {**LONG, "max_tokens": 200, "stream": True, "return_token_ids": True, "n": 2}
    before = stats(server).num_steps
    with sent(server, body) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        wait_until(lambda: stats(server).num_steps >= before + 200 and stats(server).num_running == 0)
        data = b""
        while not data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            part = connection.recv(4096)
            assert part, "the stream was cut"
            data += part
    lines = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
    tokens = [len(event["choices"][0]["token_ids"]) for event in lines]
    assert sum(tokens) == 400


def test_a_half_open_connection_holds_nothing(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as half, sent(server, ""):
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        server.assert_alive()


def test_metrics_have_vllms_names_and_add_up(server: RunningServer) -> None:
    def metrics() -> dict[str, float]:
        lines = server.get("/metrics").data.decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        label = f'{{model_name="{server.service.model.name}"}}'
        return {name.replace(label, ""): float(value) for name, value in pairs}

    before = metrics()
    assert server.complete([5, 6, 7], max_tokens=4, n=2).status == 200
    wait_until(server.is_idle)
    after = metrics()
    for name, growth in {
        "vllm:prompt_tokens_total": 3,
        "vllm:generation_tokens_total": 8,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:request_time_per_output_token_seconds_count": 1,
        "vllm:inter_token_latency_seconds_count": 6,
    }.items():
        assert after[name] - before[name] == growth, name
    names = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}
    names |= {"tiny_vllm:engine_restarts_total", "process_open_fds", "process_resident_memory_bytes"}
    names |= {"vllm:num_preemptions_total", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"}
    assert names <= set(after)
    aborted = (
        f'vllm:request_success_total{{finished_reason="abort",model_name="{server.service.model.name}"}}'
    )
    assert after[aborted] > 0


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("action", [EXIT, FAIL])
def test_a_dead_engine_is_503_and_then_replaced(hold: Hold, action: int, is_streamed: bool) -> None:
    with running_server(hold.command()) as server:
        with hold, ThreadPoolExecutor(1) as pool:
            victim = pool.submit(server.post, "/v1/completions", {**LONG, "stream": is_streamed})
            wait_until(lambda: stats(server) and stats(server).num_running == 1)
            guilty = server.complete([action, action], max_tokens=5)
            assert (guilty.status, guilty.error["code"]) == (503, "engine_unavailable")
            answer = victim.result(60)
            for path in ("/health", "/ready"):
                dead = server.get(path)
                assert (dead.status, dead.error["code"]) == (503, "engine_unavailable")
            assert server.complete([5], stream=True).status == 503
        if is_streamed:
            events = answer.events()
            assert events[-1]["error"]["code"] == "engine_unavailable"
            assert sum("error" in event for event in events) == 1
        else:
            assert (answer.status, answer.error["code"]) == (503, "engine_unavailable")
        wait_until(lambda: server.get("/health").status == 200)
        assert server.service.engine.num_restarts == 1
        assert b"\ntiny_vllm:engine_restarts_total 1.0\n" in server.get("/metrics").data
        server.assert_alive()


def test_without_restart_a_dead_engine_stays_503() -> None:
    with running_server(restart_engine=False) as server:
        process_id = server.service.engine.process_id
        assert process_id is not None
        os.kill(process_id, signal.SIGKILL)
        wait_until(lambda: server.get("/health").status == 503)
        wait_until(lambda: "signal 9" in server.get("/health").error["message"])
        assert server.complete([5]).status == 503


def test_while_loading_everything_is_503(hold: Hold) -> None:
    with ExitStack() as stack:
        stack.enter_context(hold)
        server = stack.enter_context(running_server(hold.command(), wait=False))
        wait_until(lambda: server.service.engine.load_progress is not None)
        assert "loaded" in server.get("/health").error["message"]
        assert (server.get("/ready").status, server.complete([5]).status) == (503, 503)
        assert server.get("/v1/models").status == server.get("/metrics").status == 200
        hold.release()
        wait_until(lambda: server.get("/ready").status == 200)


def test_health_answers_at_once_during_a_long_step_and_fails_when_it_is_too_long(
    hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server(hold.command(), stall_timeout=600.0) as server, ThreadPoolExecutor(1) as pool:
        with hold:
            hanging = pool.submit(server.complete, [HANG, HANG], max_tokens=1)
            wait_until(lambda: server.service.engine.num_requests == 1)
            assert {server.get("/health").status for _ in range(30)} == {200}
            later = SimpleNamespace(monotonic=lambda: time.monotonic() + 601)
            monkeypatch.setattr("tiny_vllm.serving.service.time", later)
            assert "no sign of life for 60" in server.get("/health").error["message"]
            monkeypatch.undo()
            assert not hanging.done()
        assert hanging.result().status == 200
        assert server.get("/health").status == 200
        assert stats(server).num_steps < 20, "probes are no work for the engine"


def test_requests_that_take_too_long_are_given_up(hold: Hold) -> None:
    with running_server(hold.command(), request_timeout=0.5) as server:
        with hold:
            answer = server.post("/v1/completions", LONG)
            assert (answer.status, answer.error["code"]) == (504, "timeout")
            # On a busy machine the time may be over before the first token.
            for _ in range(10):
                answer = server.post("/v1/completions", {**LONG, "stream": True})
                if answer.status == 200:
                    break
            events = answer.events()
            assert "choices" in events[0] and events[-1]["error"]["code"] == "timeout"
        wait_until(server.is_idle)


def test_keys_are_asked_for_and_limited(hold: Hold) -> None:
    with running_server(
        hold.command(), api_key=("one", "two"), max_requests_per_key=1, separate_keys=True
    ) as server:
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        for wrong in ({}, {"authorization": "Bearer three"}, {"authorization": "Basic one"}):
            answer = server.post("/v1/completions", {"prompt": [5]}, headers=wrong)
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
            assert server.get("/metrics", headers=wrong).status == 401
        for path in ("/health", "/ready", "/version"):
            assert server.get(path).status == 200
        with ThreadPoolExecutor(1) as pool:
            with hold:
                running = pool.submit(server.post, "/v1/completions", LONG, headers=one)
                wait_until(lambda: server.service.admission.num_requests == 1)
                answer = server.post("/v1/completions", {"prompt": [5]}, headers=one)
                assert answer.status == 429 and "max_requests_per_key (1)" in answer.error["message"]
            assert running.result(60).status == 200
            with hold, sent(server, LONG, "authorization: Bearer one\r\n"):
                wait_until(lambda: server.service.admission.num_requests == 1)
                stop = {"prompt": [5, 2]}
                assert server.post("/v1/completions", stop, headers=two).status == 200
            wait_until(lambda: server.service.admission.num_requests == 0)
        assert server.post("/v1/completions", {"prompt": [5]}, headers=one).status == 200


def test_too_many_requests_are_429(hold: Hold) -> None:
    with running_server(hold.command(), max_requests=1) as server, hold, sent(server, LONG):
        wait_until(lambda: server.service.admission.num_requests == 1)
        answer = server.complete([5])
        assert answer.status == 429 and "max_requests (1)" in answer.error["message"]


def test_web_pages_of_other_origins_need_permission() -> None:
    origin = {"origin": "http://friend", "access-control-request-method": "POST"}
    with running_server() as server:
        assert "access-control-allow-origin" not in server.get("/v1/models", headers=origin).headers
    with running_server(cors_origin=("http://friend",), api_key=("k",)) as server:
        assert server.request("OPTIONS", "/v1/completions", headers=origin).status == 200
        answer = server.get("/health", headers=origin)
        assert answer.headers["access-control-allow-origin"] == "http://friend"
        # Without this, a page cannot read when to come back, nor which id to complain about.
        shown = answer.headers["access-control-expose-headers"].lower()
        assert "retry-after" in shown and "x-request-id" in shown
        stranger = server.get("/health", headers={"origin": "http://stranger"})
        assert "access-control-allow-origin" not in stranger.headers


@contextmanager
def stopping(server: RunningServer, hold: Hold) -> Iterator[Any]:
    """A server that was told to stop while a request runs; gives the request's future answer."""
    with ThreadPoolExecutor(1) as pool, hold:
        running = pool.submit(server.post, "/v1/completions", {**LONG, "max_tokens": 20, "stream": True})
        wait_until(lambda: stats(server) and stats(server).num_running == 1)
        server.stop()
        yield running


def test_stopping_lets_running_requests_finish_and_takes_no_more(hold: Hold) -> None:
    with running_server(hold.command(), drain_timeout=60.0) as server, stopping(server, hold) as running:
        wait_until(lambda: server.service.door.is_shut)
        assert not running.done()
    assert running.result(60).events()[-1]["choices"][0]["finish_reason"] == "length"
    with pytest.raises(OSError):
        server.get("/health")


def test_while_requests_finish_probes_are_answered_and_new_ones_are_told_to_go_elsewhere(hold: Hold) -> None:
    with running_server(hold.command(), drain_timeout=60.0) as server:
        with stopping(server, hold) as running:
            wait_until(lambda: server.service.door.is_shut)
            for _ in range(3):  # each on a connection of its own: the server still listens
                for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize"):
                    answer = server.post(path, {})
                    assert (answer.status, answer.error["type"]) == (503, "server_error")
                    assert "shutting down" in answer.error["message"]
                    assert int(answer.headers["retry-after"]) > 0 and answer.headers["connection"] == "close"
                ready = server.get("/ready")
                assert (ready.status, int(ready.headers["retry-after"]) > 0) == (503, True)
                assert server.get("/health").status == server.get("/metrics").status == 200
            assert not running.done()
        assert running.result(60).events()[-1]["choices"][0]["finish_reason"] == "length"
        server.thread.join(60)
        with pytest.raises(ConnectionRefusedError):
            server.get("/ready")


def test_ready_fails_at_once_on_a_connection_that_stays_open(hold: Hold) -> None:
    with running_server(hold.command(), drain_timeout=60.0) as server:
        probe = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        for _ in range(2):
            probe.request("GET", "/ready")
            answer = probe.getresponse()
            assert answer.status == 200 and answer.read()
        with stopping(server, hold) as running:
            wait_until(lambda: server.service.door.is_shut)
            probe.request("GET", "/ready")
            answer = probe.getresponse()
            assert answer.status == 503 and answer.read()
        assert running.result(60).status == 200
        probe.close()


def test_during_the_delay_an_idle_server_stays_and_still_takes_requests() -> None:
    with running_server(drain_delay=3.0) as server:
        start = time.monotonic()
        server.stop()
        assert server.get("/ready").status == 503
        assert server.complete([5, 6], max_tokens=3).status == 200
        server.thread.join(60)
        assert time.monotonic() - start >= 3.0


def test_a_server_that_has_not_been_ready_does_not_wait_for_load_balancers(hold: Hold) -> None:
    with hold, running_server(hold.command(), wait=False, drain_delay=100.0) as server:
        wait_until(lambda: server.service.engine.load_progress is not None)
        server.stop()
        server.thread.join(60)
        assert not server.thread.is_alive()


def test_stopping_ends_what_takes_too_long_with_an_error(hold: Hold) -> None:
    with running_server(hold.command(), drain_timeout=0.2) as server, stopping(server, hold) as running:
        assert "shutting down" in running.result(60).events()[-1]["error"]["message"]
