"""What happens to every HTTP request before and after its endpoint: id, API key, door, counting."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tiny_vllm.serving.admission import ApiKeys, Door
from tiny_vllm.serving.errors import ApiError

MAX_ID_LEN = 128


class Gate:
    """ASGI middleware. Puts "request_id" and "api_key" into the request's state.

    open_paths: served without a key. door: what asks for work goes through it. count: called with path and
    status of every response.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        open_paths: frozenset[str],
        door: Door,
        count: Callable[[str, int], None],
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths
        self._door = door
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _usable_id(headers.get("x-request-id")) or secrets.token_hex(12)
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
                # The router has left its mark on what it knows, so that labels stay few.
                route = scope.get("route")
                self._count(getattr(route, "path", "other"), message["status"])
            await send(message)

        if headers.get("expect", "").lower() == "100-continue":
            receive, send = _ending_unless_asked(receive, send)
        path = scope["path"]
        with ExitStack() as inside:
            try:
                state["api_key"] = (
                    "" if path in self._open_paths else self._keys.check(headers.get("authorization"))
                )
                if scope["method"] == "POST":
                    inside.enter_context(self._door.entered())
            except ApiError as error:
                await error_response(error)(scope, receive, send_with_id)
                return
            await self._app(scope, receive, send_with_id)


def error_response(error: ApiError) -> Response:
    return Response(
        error.encoded(), status_code=error.status, headers=error.headers, media_type="application/json"
    )


def _ending_unless_asked(receive: Receive, send: Send) -> tuple[Receive, Send]:
    """For a client that waits until it is asked for its body: if it never is, it may send that or another
    request next, so the connection has to end with the answer."""
    is_asked = False

    async def ask() -> Message:
        nonlocal is_asked
        is_asked = True
        return await receive()

    async def answer(message: Message) -> None:
        end = (b"connection", b"close")
        if message["type"] == "http.response.start" and not is_asked and end not in message["headers"]:
            message["headers"] = [*message["headers"], end]
        await send(message)

    return ask, answer


def _usable_id(text: str | None) -> str | None:
    """A client's id, if it can go back in a header."""
    if text and len(text) <= MAX_ID_LEN and text.isascii() and text.isprintable():
        return text
    return None
