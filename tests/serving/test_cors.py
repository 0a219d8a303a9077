"""What a browser is told when it asks whether a page of another origin may call the server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving.support import Answer, RunningServer, running_server

FRIEND, FOE = "http://friend", "http://foe"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(cors_origin=(FRIEND,)) as server:
        yield server


def ask(server: RunningServer, origin: str, method: str, **headers: str) -> Answer:
    given = {"origin": origin, "access-control-request-method": method, **headers}
    return server.request("OPTIONS", "/v1/completions", headers=given)


def test_a_friend_may_call(server: RunningServer) -> None:
    answer = ask(server, FRIEND, "POST", **{"access-control-request-headers": "authorization"})
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == FRIEND


REFUSALS: list[tuple[str, str, dict[str, str], str]] = [
    (
        FOE,
        "POST",
        {},
        "web pages of 'http://foe' may not call this server\n"
        "hint: origins that may are named by the server option cors_origin",
    ),
    (FRIEND, "DELETE", {}, "web pages may not use 'DELETE' here, but GET and POST\nhint: use one of these"),
    (
        FRIEND,
        "POST",
        {"access-control-request-private-network": "true"},
        "web pages of a public network may not call this server\nhint: serve the page from its own network",
    ),
]


@pytest.mark.parametrize(("origin", "method", "headers", "message"), REFUSALS)
def test_others_are_refused_in_openais_form(
    server: RunningServer, origin: str, method: str, headers: dict[str, str], message: str
) -> None:
    answer = ask(server, origin, method, **headers)
    assert (answer.status, answer.headers["content-type"]) == (400, "application/json")
    assert answer.error == {
        "message": message,
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
    assert answer.headers.get("access-control-allow-origin") == (FRIEND if origin == FRIEND else None)
    assert "origin" in answer.headers["vary"].lower()


def test_an_origin_is_cut(server: RunningServer) -> None:
    message = ask(server, "http://" + "x" * 1000, "POST").error["message"]
    assert message.startswith("web pages of 'http://xxx") and "xxx ... may not" in message
