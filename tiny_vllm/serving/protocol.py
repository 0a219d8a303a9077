"""uvicorn's HTTP protocol with limits on the head of a request, which it does not have of its own."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tiny_vllm.serving.errors import ApiError

MAX_HEAD_BYTES = 64 << 10


class LimitedProtocol(HttpToolsProtocol):
    """A connection that is closed when the head of a request comes too slowly or is too long.

    head_timeout: seconds from the first byte, or from connecting, to the end of the head.
    """

    def __init__(self, *arguments: Any, head_timeout: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_timeout = head_timeout
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head_bytes > MAX_HEAD_BYTES:
            self._stop_waiting()
            self._refuse(ApiError(431, f"the head of the request is longer than {MAX_HEAD_BYTES} bytes"))
            return
        if self._head_timer is not None:
            self._head_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg))

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_timeout, self.transport.close)

    def _stop_waiting(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: ApiError) -> None:
        """Answer without an application: there is no request it could be given."""
        if self.transport.is_closing():
            return
        body = error.encoded()
        head = f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()


def limited_protocol(head_timeout: float) -> Any:
    """What uvicorn takes for a protocol class."""
    return functools.partial(LimitedProtocol, head_timeout=head_timeout)
