"""uvicorn's HTTP protocol with what it does not have of its own: limits on the head of a request, on what
comes beside its body, and on connections; what RFC 9112 asks of a head beyond its syntax; parts of a body
that are written without waiting."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import resource
import sys
import time
from collections import deque
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tiny_vllm.serving.errors import ApiError

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10
"""Also of all that is neither size nor content of the chunks of a body: extensions and trailers."""
CHUNK_LINE_BYTES = 20
"""A chunk's size in up to 16 digits, and the ends of two lines: what a chunk that has not ended may have."""
PIECE_BYTES = 4 << 10
"""The parser gets no more at a time, and nothing behind a blank line: it does not say where in a piece a head
or a body in chunks ends, and both end with one."""
BLANK_LINE = b"\r\n\r\n"
CALLS_PER_TURN = 500
"""Pieces and chunks, of some microseconds each, until the event loop has its turn. What the system hands over
at once may hold 40,000 chunks."""
RESERVED_DESCRIPTORS = 32
MAX_PIPELINED = 16
"""Requests of a connection that wait for the answer to one before, until nothing more is read."""
WARNING_SECONDS = 10.0
HOST = re.compile(rb"(\[[\w.:%~-]*\]|[\w.~!$&'()*+,;=%-]*)(:\d*)?")
OFFER_HEADERS = (b"upgrade", b"http2-settings")
BODY_WRITER = "tiny_vllm.body_writer"
"""The key of the BodyWriter among the extensions of an ASGI scope."""


class BodyWriter:
    """Writes parts of a response's body at once, which ASGI's `send` needs a coroutine for.

    Only between the start of a response without a length and its last part, which are sent as ASGI has it.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_ready(self) -> bool:
        """Whether the client reads as fast as it is written to, and is still there."""
        cycle = self._cycle
        return not (cycle.flow.write_paused or cycle.disconnected) and cycle.chunked_encoding is True

    def write(self, body: bytes) -> None:
        """body: not empty."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class HeldFlow(FlowControl):
    """Reads nothing while it is held, whatever uvicorn says, and afterwards does what uvicorn said last."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_held = False

    def pause_reading(self) -> None:
        if not self._is_held:
            super().pause_reading()
        self.read_paused = True

    def resume_reading(self) -> None:
        if not self._is_held:
            super().resume_reading()
        self.read_paused = False

    def hold(self) -> None:
        if not self._is_held and not self.read_paused:
            self._transport.pause_reading()
        self._is_held = True

    def release(self) -> None:
        if self._is_held and not self.read_paused:
            self._transport.resume_reading()
        self._is_held = False


class DescriptorGuard:
    """Keeps the last file descriptors from connections: the engine's next process will need some.

    The event loop, when there are none at all, hangs up on new connections without a word.
    """

    def __init__(self) -> None:
        self._next_warning = 0.0

    def is_surplus(self, descriptor: int) -> bool:
        """Whether a connection has come too close to the limit. Says so in the log, not too often."""
        # The system gives out the lowest one that is free.
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit == resource.RLIM_INFINITY or descriptor < limit - RESERVED_DESCRIPTORS:
            return False
        now = time.monotonic()
        if now >= self._next_warning:
            self._next_warning = now + WARNING_SECONDS
            logger.warning("connections are refused: of %d file descriptors, too few are left", limit)
        return True


class LimitedProtocol(HttpToolsProtocol):
    """A connection that is closed when the head of a request comes too slowly or is too long, or what comes
    beside a body in chunks is.

    Trailers are dropped: nothing here reads them. A client that hangs up is noticed also while requests of
    its own wait behind the one being answered. What is refused is so once the requests before it have been
    answered; until then nothing more is read. Offers to go on with another protocol (`Upgrade`), as clients
    make that would rather have HTTP/2, are passed over. What comes at once is taken in turns with the event
    loop if it is much work, and nothing more is read meanwhile.

    head_timeout: seconds from the first byte, or from connecting, to the end of the head; also from an answer
    to the end of a body that was not read for it. guard: shared.
    """

    def __init__(self, *arguments: Any, head_timeout: float, guard: DescriptorGuard, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._guard = guard
        self._head_timeout = head_timeout
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._last_bytes = b""
        self._is_in_body = False
        self._framing_bytes = 0
        self._chunk_bytes = 0
        self._is_in_chunks = False
        self._num_calls = 0
        self._unparsed = memoryview(b"")
        self._next_turn: asyncio.Handle | None = None
        self._running: RequestResponseCycle | None = None
        self._refusal: ApiError | None = None
        self._head_without_offer: bytes | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = self._held_flow = HeldFlow(transport)
        descriptor = transport.get_extra_info("socket").fileno()
        if self._guard.is_surplus(descriptor):
            # At once, since more may be coming.
            self._refuse(
                ApiError(
                    503,
                    "the server has as many connections as it can have\nhint: try again later",
                    kind="server_error",
                )
            )
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._next_turn is not None:
            self._next_turn.cancel()
        # uvicorn tells the latest request alone.
        if (running := self._running) is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed = memoryview(data)
        self._take_turn()

    def _take_turn(self) -> None:
        self._next_turn = None
        self._num_calls = 0
        while self._unparsed and self._refusal is None and not self.transport.is_closing():
            if self._num_calls >= CALLS_PER_TURN or len(self.pipeline) >= MAX_PIPELINED:
                self._held_flow.hold()
                # Requests that wait are answered first: the end of each answer is another turn.
                if len(self.pipeline) < MAX_PIPELINED:
                    self._next_turn = self.loop.call_soon(self._take_turn)
                return
            self._parse_piece()
        self._unparsed = memoryview(b"")
        if not self.transport.is_closing():
            self._held_flow.release()

    def _parse_piece(self) -> None:
        size = PIECE_BYTES if self._is_in_body else min(PIECE_BYTES, MAX_HEAD_BYTES - self._head_bytes)
        piece = bytes(self._unparsed[:size])
        known = self._last_bytes
        end = (known + piece).find(BLANK_LINE)
        if end >= 0:
            piece = piece[: end + len(BLANK_LINE) - len(known)]
        self._last_bytes = (known + piece)[1 - len(BLANK_LINE) :]
        self._unparsed = self._unparsed[len(piece) :]
        if self._is_in_body:
            self._framing_bytes += len(piece)
        else:
            self._head_bytes += len(piece)
        self._num_calls += 1
        super().data_received(piece)
        # The end of the head sets it to 0.
        if self._head_bytes >= MAX_HEAD_BYTES:
            self._stop_waiting()
            self._refuse(
                ApiError(
                    431,
                    f"the head of the request is longer than {MAX_HEAD_BYTES} bytes\n"
                    "hint: send fewer or shorter headers",
                )
            )
        elif self._framing_bytes > MAX_HEAD_BYTES + CHUNK_LINE_BYTES:
            self._refuse_framing()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_body:
            super().on_header(name, value)

    def on_chunk_header(self) -> None:
        self._num_calls += 1
        self._is_in_chunks = True
        self._chunk_bytes = 0

    def on_chunk_complete(self) -> None:
        self._framing_bytes -= len(b"%x\r\n\r\n" % self._chunk_bytes)

    def on_body(self, body: bytes) -> None:
        self._framing_bytes -= len(body)
        self._chunk_bytes += len(body)
        super().on_body(body)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self._head_without_offer = self._write_head()
            return
        self._check_head()
        self._is_in_body = True
        self._stop_waiting()
        num_waiting = len(self.pipeline)
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            # It knows no chunks: the end of the connection is that of an answer without a length.
            self.cycle.chunked_encoding = False
            self.cycle.send = functools.partial(_send_as_it_is, self.cycle)  # type: ignore[method-assign]
        if len(self.pipeline) == num_waiting:
            self._running = self.cycle
        elif num_waiting < MAX_PIPELINED:
            # uvicorn stops reading until it is this request's turn, and so would not hear a client hang up.
            self.flow.resume_reading()
        # The task that reads the scope has not begun yet.
        extensions: dict[str, Any] = self.scope.setdefault("extensions", {})
        extensions[BODY_WRITER] = BodyWriter(self.cycle)

    def _check_head(self) -> None:
        """What the parser leaves to others. Raises ApiError, or the parser's error for a target."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise ApiError(505, f"HTTP {version} is not spoken here\nhint: use HTTP/1.1")
        if version == "1.0":
            self.expect_100_continue = False
        target = httptools.parse_url(self.url)
        if not target.path:
            self.url = b"/" if target.query is None else b"/?" + target.query
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (version != "1.0" and not hosts) or not all(map(HOST.fullmatch, hosts)):
            raise ApiError(
                400,
                "a request needs one header Host, with a name and at most a port\nhint: send Host: NAME:PORT",
            )
        encodings = [
            encoding.strip().lower()
            for name, value in self.headers
            if name == b"transfer-encoding"
            for encoding in value.split(b",")
        ]
        if encodings and encodings[-1] != b"chunked":
            raise ApiError(400, "where the body ends is not known\nhint: its last encoding must be chunked")
        if len(encodings) > 1:
            raise ApiError(
                501, "bodies in other encodings than chunked are not supported\nhint: send plain JSON"
            )

    def on_message_complete(self) -> None:
        if self._head_without_offer is not None:
            return
        if self._is_in_chunks and self._framing_bytes > MAX_HEAD_BYTES:
            self._refuse_framing()
            return
        self._stop_waiting()
        # What the piece has behind a body of known length is of the next head.
        self._head_bytes = 0 if self._is_in_chunks else self._framing_bytes
        self._is_in_body = self._is_in_chunks = False
        self._framing_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()
        if self._is_in_body and self.cycle.response_complete:
            self._await_head()  # and before that, the end of the body that nobody reads
        if self._refusal is not None:
            self._refuse(self._refusal)
        elif self._unparsed and self._next_turn is None:
            self._next_turn = self.loop.call_soon(self._take_turn)

    def send_400_response(self, msg: str) -> None:
        """Called while uvicorn handles an error of the parser, which may come from one of a callback."""
        error = sys.exception()
        cause = None if error is None else error.__context__
        self._refuse(
            cause
            if isinstance(cause, ApiError)
            else ApiError(400, f"{msg}\nhint: send HTTP/1.1, without TLS")
        )

    def _unsupported_upgrade_warning(self) -> None:
        """Called while uvicorn handles that the parser has stopped behind the head of a request with an
        offer, since another protocol would follow. Another parser gets the head without it, and goes on."""
        head = self._head_without_offer
        assert head is not None
        self._head_without_offer = None
        if self.parser.get_method() == b"CONNECT":
            self._refuse(
                ApiError(
                    405, "CONNECT is not possible here: this is no proxy\nhint: send requests straight to it"
                )
            )
            return
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        super().data_received(head)

    def _refuse_framing(self) -> None:
        self._refuse(
            ApiError(
                431,
                "the extensions of the chunks of the body and its trailers are together longer than "
                f"{MAX_HEAD_BYTES} bytes\nhint: send the body without them",
            )
        )

    def _write_head(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(t for t in value.split(b",") if t.strip().lower() not in OFFER_HEADERS)
            if name not in OFFER_HEADERS:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_timeout, self._end_waiting)

    def _end_waiting(self) -> None:
        self._head_timer = None
        if self._is_answering:
            self._await_head()  # its turn has not come
        else:
            self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _stop_waiting(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: ApiError) -> None:
        """Answer what is being read without an application: it is no request that one could be given."""
        if self.transport.is_closing():
            return
        if self._is_in_body:
            if self.cycle.response_started:
                # Another answer would be taken for that of the next request.
                self.transport.close()
                return
            if self.cycle is self._running:
                self._running = None
            self.pipeline = deque(waiting for waiting in self.pipeline if waiting[0] is not self.cycle)
            self._is_in_body = False
        if self._is_answering:
            self._refusal = error
            self._stop_waiting()
            return
        body = error.encoded()
        head = f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()


async def _send_as_it_is(cycle: RequestResponseCycle, message: Any) -> None:
    if message["type"] == "http.response.body":
        # uvicorn takes it for a body whose length was told.
        cycle.expected_content_length = len(message.get("body", b""))
    await RequestResponseCycle.send(cycle, message)


def limited_protocol(head_timeout: float) -> Any:
    """What uvicorn takes for a protocol class."""
    return functools.partial(LimitedProtocol, head_timeout=head_timeout, guard=DescriptorGuard())
