"""Reading a request's body: JSON only, not too long, not too slowly."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tiny_vllm.errors import shown
from tiny_vllm.serving.config import ServerConfig
from tiny_vllm.serving.errors import ApiError
from tiny_vllm.serving.schemas import AnyBody, parse_body

LONG_BODY = 256 << 10
"""Bytes from which on parsing may take long: a megabyte of empty lists takes some tenths of a second."""
PAUSE_SECONDS = 0.02
MAX_DISCARDED_BYTES = 64 << 20
"""Of what comes of a body that has been refused, until the connection is closed."""
SILENCE_SECONDS = 1.0
"""Without any of it, until then."""


class BodyTooLong(ApiError):
    """rest_timeout: seconds in which more of the body may come."""

    def __init__(self, max_bytes: int, rest_timeout: float) -> None:
        super().__init__(
            413,
            f"the body is longer than {max_bytes} bytes\nhint: the limit is the server option max_body_bytes",
            headers={"connection": "close"},
        )
        self.rest_timeout = rest_timeout


class EarlyResponse(Response):
    """An error that a client gets before it has sent all of its request. What it still sends is read for a
    while: closing a connection with something unread resets it, and may take the answer from the client."""

    def __init__(self, error: BodyTooLong) -> None:
        super().__init__(error.encoded(), error.status, error.headers, "application/json")
        self._rest_timeout = error.rest_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._rest_timeout):
                await _discard(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    num_bytes = 0
    while num_bytes <= MAX_DISCARDED_BYTES:
        async with asyncio.timeout(SILENCE_SECONDS):
            message = await receive()
        if not message.get("more_body", False):
            return
        num_bytes += len(message["body"])


class BodyReader:
    """Reads the bodies of one server's requests, and lets long ones hold up others as little as may be."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._parsing = asyncio.Lock()

    async def read(self, http: Request, body_class: type[AnyBody]) -> AnyBody:
        """Raises ApiError: 408, 415 or 400; or BodyTooLong, as soon as it is known."""
        _check_headers(http)
        timeout, max_bytes = self._config.receive_timeout, self._config.max_body_bytes
        declared = http.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > max_bytes:
            waits = http.headers.get("expect", "").lower() == "100-continue"
            raise BodyTooLong(max_bytes, rest_timeout=0.0 if waits else timeout)
        try:
            async with asyncio.timeout(timeout):
                data = await self._read_all(http.receive)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {timeout:g} seconds\n"
                "hint: the limit is the server option receive_timeout",
                headers={"connection": "close"},
            ) from None
        if len(data) < LONG_BODY:
            return parse_body(body_class, data)
        # Parsing does not let go of the interpreter, so a thread would not help. One at a time, with time for
        # everybody else's few turns in between.
        async with self._parsing:
            await asyncio.sleep(PAUSE_SECONDS)
            return parse_body(body_class, data)

    async def _read_all(self, receive: Receive) -> bytes:
        data = bytearray()
        has_more = True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            data += message["body"]
            has_more = message["more_body"]
            if len(data) > self._config.max_body_bytes:
                rest_timeout = self._config.receive_timeout if has_more else 0.0
                raise BodyTooLong(self._config.max_body_bytes, rest_timeout)
        return bytes(data)


def _check_headers(http: Request) -> None:
    media_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Asking for this type also keeps web pages of other origins from sending anything without permission.
    if media_type != "application/json":
        raise ApiError(
            415,
            f"the content type is {shown(media_type)}, but must be application/json\n"
            "hint: send the header Content-Type: application/json",
            headers={"accept": "application/json"},
        )
    if http.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "compressed bodies are not supported\nhint: send plain JSON")
