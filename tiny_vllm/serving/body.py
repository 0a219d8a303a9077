"""Reading a request's body: JSON only, not too long, not too slowly."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from tiny_vllm.serving.config import ServerConfig
from tiny_vllm.serving.errors import ApiError
from tiny_vllm.serving.schemas import AnyBody, parse_body

LONG_BODY = 256 << 10
"""Bytes from which on parsing may take long: a megabyte of empty lists takes some tenths of a second."""
PAUSE_SECONDS = 0.02
MAX_DISCARDED_BYTES = 64 << 20
"""Read beyond the limit before hanging up: a client that is still sending would not see the answer."""


class BodyReader:
    """Reads the bodies of one server's requests, and lets long ones hold up others as little as may be."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._parsing = asyncio.Lock()

    async def read(self, http: Request, body_class: type[AnyBody]) -> AnyBody:
        """Raises ApiError: 408, 413, 415 or 400."""
        _check_headers(http)
        timeout, max_bytes = self._config.receive_timeout, self._config.max_body_bytes
        declared = http.headers.get("content-length", "")
        is_too_long = declared.isdecimal() and int(declared[:20]) > max_bytes
        if is_too_long and http.headers.get("expect", "").lower() == "100-continue":
            raise _too_long(max_bytes)
        try:
            async with asyncio.timeout(timeout):
                data = await _read(http, max_bytes)
        except TimeoutError:
            if is_too_long:
                raise _too_long(max_bytes) from None
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


def _check_headers(http: Request) -> None:
    media_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Asking for this type also keeps web pages of other origins from sending anything without permission.
    if media_type != "application/json":
        raise ApiError(
            415,
            f"the content type is {media_type[:100]!r}, but must be application/json",
            headers={"accept": "application/json"},
        )
    if http.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "compressed bodies are not supported\nhint: send plain JSON")


async def _read(http: Request, max_bytes: int) -> bytes:
    data = bytearray()
    num_bytes = 0
    async for part in http.stream():
        num_bytes += len(part)
        if num_bytes <= max_bytes:
            data += part
        elif num_bytes > max_bytes + MAX_DISCARDED_BYTES:
            break
    if num_bytes > max_bytes:
        raise _too_long(max_bytes)
    return bytes(data)


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the body is longer than {max_bytes} bytes\nhint: the limit is the server option max_body_bytes",
        headers={"connection": "close"},
    )
