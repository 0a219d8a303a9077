"""With -v, one line for every request, when it has ended."""

from __future__ import annotations

import http.client
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.stub_engine import FAIL
from tests.serving.support import Hold, RunningServer, running_server, wait_until
from tests.serving.test_serve_command import call, serving

LOGGER = "tiny_vllm.serving.access_log"


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Hold:
    return Hold(tmp_path_factory.mktemp("access_log") / "hold")


@pytest.fixture(scope="module")
def server(hold: Hold) -> Iterator[RunningServer]:
    logger = logging.getLogger(LOGGER)
    logger.setLevel(logging.INFO)
    try:
        with running_server(hold.command(), api_key=("k",), cors_origin=("http://friend",)) as server:
            yield server
    finally:
        logger.setLevel(logging.NOTSET)


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == LOGGER]


def line_of(caplog: pytest.LogCaptureFixture) -> str:
    wait_until(lambda: lines_of(caplog))
    (line,) = lines_of(caplog)
    caplog.clear()
    return line


def ask(server: RunningServer, method: str, path: str, body: Any = None, **headers: str) -> None:
    names = {"authorization": "Bearer k", "x-request-id": "mine", **headers}
    server.request(method, path, body, headers=names)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_generation_has_its_tokens(
    server: RunningServer, caplog: pytest.LogCaptureFixture, is_streamed: bool
) -> None:
    body = {"prompt": [[28, 29, 30], [31]], "n": 2, "max_tokens": 5, "ignore_eos": True}
    ask(server, "POST", "/v1/completions", {**body, "stream": is_streamed})
    assert re.fullmatch(
        r"POST /v1/completions 200 \d+ ms, 4 prompt \+ 20 completion tokens, id mine", line_of(caplog)
    )


def test_other_requests_have_none(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    ask(server, "GET", "/health?secret=1")
    assert re.fullmatch(r"GET /health 200 \d+ ms, id mine", line_of(caplog))
    ask(server, "POST", "/v1/completions", {"prompt": [5], "nonsense": 1})
    assert re.fullmatch(r"POST /v1/completions 400 \d+ ms, id mine", line_of(caplog))
    ask(server, "GET", "/nowhere")
    assert line_of(caplog).startswith("GET /nowhere 404 ")


def test_requests_that_never_reach_an_endpoint_are_there_too(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    ask(server, "POST", "/v1/completions", {"prompt": [5]}, authorization="Bearer wrong")
    assert line_of(caplog).startswith("POST /v1/completions 401 ")
    names = {"origin": "http://friend", "access-control-request-method": "POST"}
    server.request("OPTIONS", "/v1/completions", headers=names)
    assert re.fullmatch(r"OPTIONS /v1/completions 200 \d+ ms", line_of(caplog))


def test_no_path_can_write_a_line_of_its_own(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    ask(server, "GET", "/x%0AI%20fake%1b[2J" + "y" * 1000)
    line = line_of(caplog)
    assert line.startswith("GET /x%0AI%20fake%1b[2J") and "\n" not in line and len(line) < 400


def test_a_client_that_goes_away_is_a_499(
    server: RunningServer, hold: Hold, caplog: pytest.LogCaptureFixture
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    names = {"authorization": "Bearer k", "content-type": "application/json"}
    body = {"prompt": [28, 29, 30], "max_tokens": 400, "ignore_eos": True}
    with hold:
        connection.request("POST", "/v1/completions", json.dumps(body).encode(), names)
        wait_until(lambda: server.service.engine.stats and server.service.engine.stats.num_running)
        connection.close()
        line = line_of(caplog)
    assert re.match(r"POST /v1/completions 499 \d+ ms, 3 prompt \+ \d+ completion tokens, id \w+$", line)
    wait_until(server.is_idle)


def test_an_engine_that_dies_is_a_503(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    ask(server, "POST", "/v1/completions", {"prompt": [FAIL, FAIL]})
    assert line_of(caplog).startswith("POST /v1/completions 503 ")
    wait_until(lambda: server.get("/ready").status == 200)


def test_without_verbose_there_is_no_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, LOGGER), running_server() as server:
        assert server.get("/health").status == 200
    assert not lines_of(caplog)


def test_the_command_has_it_with_v() -> None:
    with serving("-v", "--load-format", "dummy", "--num-pages", "16") as (process, url):
        call(f"{url}/version")
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        line = next(line for line in lines if "access_log" in line)
    assert re.fullmatch(rf"I {LOGGER}: GET /version 200 \d+ ms, id \w+\n", line)
