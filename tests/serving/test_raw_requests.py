"""Whatever bytes a connection brings, the answers are whole, in order, and one for each request.

Heads and what comes beside a body have limits; nothing that a client writes passes for another request.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from tests.serving.support import STUB_COMMAND, RunningServer, running_server
from tiny_vllm.serving.protocol import (
    CALLS_PER_TURN,
    MAX_HEAD_BYTES,
    MAX_PIPELINED,
    PIECE_BYTES,
    LimitedProtocol,
)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    # Longer than any of these tests waits: what is answered was not waited for.
    with running_server(engine={"max_num_seqs": 4}, max_body_bytes=6 << 20, receive_timeout=600.0) as server:
        yield server
        server.assert_alive()


def exchange(server: RunningServer, *parts: bytes) -> bytes:
    """Everything the server says to raw bytes, until it hangs up."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as client:
        with contextlib.suppress(OSError):
            for part in parts:
                client.sendall(part)
                time.sleep(0.01)
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while part := client.recv(1000):
                said += part
        return said


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
ANNOUNCED = HEAD + b"content-length: 99999999\r\n"


def answer_on(client: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of the next answer, which tells its length; its connection need not end."""
    said = b""
    while b"\r\n\r\n" not in said:
        said += received(client)
    head, _, body = said.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    assert length is not None
    while len(body) < int(length[1]):
        body += received(client)
    assert len(body) == int(length[1])
    return head, body


def received(client: socket.socket) -> bytes:
    part = client.recv(1000)
    assert part, "the server has hung up"
    return part


def test_long_bodies_that_are_only_announced_are_not_waited_for(server: RunningServer) -> None:
    answer = exchange(server, ANNOUNCED + b"expect: 100-continue\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")


MEBIBYTE = b" " * (1 << 20)


@pytest.mark.parametrize(
    "start",
    [
        ANNOUNCED + b"\r\n",
        ANNOUNCED + b"\r\n{",
        HEAD + b"transfer-encoding: chunked\r\n\r\n5000000\r\n" + 9 * MEBIBYTE,
    ],
    ids=["announced", "begun", "in chunks"],
)
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_body_that_is_too_long_is_refused_before_its_end(
    server: RunningServer, start: bytes, goes_on: bool
) -> None:
    """A client that sends all the same, and reads only then, sees the answer, too: what it sends is read."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(start)
        if goes_on:
            for _ in range(20):
                client.sendall(MEBIBYTE)
        head, body = answer_on(client)
        assert head.startswith(b"HTTP/1.1 413 ") and b"connection: close" in head
        assert "max_body_bytes" in json.loads(body)["error"]["message"]
        assert client.recv(1) == b""


def test_slow_requests_are_given_up() -> None:
    beginnings = (
        HEAD + b"content-length: 100\r\n\r\n{",
        # Without a whole head there is nobody to answer.
        HEAD,
        b"",
    )
    with running_server(receive_timeout=3.0) as hasty, concurrent.futures.ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda beginning: exchange(hasty, beginning), beginnings))
    assert [answer[:13] for answer in answers] == [b"HTTP/1.1 408 ", b"", b""]


def test_what_is_no_http_is_refused_in_the_same_shape(server: RunningServer) -> None:
    for parts, status in (
        ([b"nonsense\r\n\r\n"], b"400"),
        ([HEAD, *[b"x: " + b"y" * 10_000 + b"\r\n"] * 9], b"431"),
        ([b"GET /" + b"z" * 50_000, b"z" * 50_000, b"z"], b"431"),
        # Refused without waiting for more of it, which may not come.
        ([b"GET /" + b"z" * 66_000], b"431"),
        # Whole heads in one piece.
        ([b"GET /version?" + b"z" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n"], b"431"),
        ([head_of(MAX_HEAD_BYTES + 1)], b"431"),
        ([head_of(70_000)], b"431"),
        ([head_of(200_000)], b"431"),
    ):
        head, _, body = exchange(server, *parts).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 " + status)
        error = json.loads(body)["error"]
        assert error["type"] == "invalid_request_error"
        assert status != b"431" or str(MAX_HEAD_BYTES) in error["message"]


def head_of(num_bytes: int) -> bytes:
    """A request without a body."""
    head = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx: %b\r\n\r\n"
    return head % (b"y" * (num_bytes - len(head) + 2))


@pytest.mark.parametrize("num_parts", [1, 2, 9])
def test_a_head_as_long_as_the_limit_is_taken(server: RunningServer, num_parts: int) -> None:
    whole = head_of(MAX_HEAD_BYTES)
    assert len(whole) == MAX_HEAD_BYTES
    size = -(-len(whole) // num_parts)
    parts = (whole[start : start + size] for start in range(0, len(whole), size))
    assert exchange(server, *parts).startswith(b"HTTP/1.1 200 ")


CHUNKED = HEAD + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
JSON = b'{"prompt": [5], "max_tokens": 2}'


@pytest.mark.parametrize(
    ("start", "endless"),
    [
        (b"", b"1;x=" + b"y" * 70_000),
        (b"", (b"1;" + b"x" * 40 + b"\r\n \r\n") * 3000),
        (b"", b"0" * 70_000),
        (b"0\r\n", b"x: " + b"y" * 70_000),
        (b"%x\r\n%b\r\n0\r\n" % (len(JSON), JSON), b"x: y\r\n" * 12_000),
    ],
    ids=["an extension", "many extensions", "zeros of a size", "a trailer", "many trailers"],
)
@pytest.mark.parametrize("in_pieces", [False, True])
def test_what_comes_beside_a_chunked_body_has_a_limit(
    server: RunningServer, start: bytes, endless: bytes, in_pieces: bool
) -> None:
    parts = [endless[at : at + 9000] for at in range(0, len(endless), 9000)] if in_pieces else [endless]
    head, _, body = exchange(server, CHUNKED + start, *parts).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    assert f"longer than {MAX_HEAD_BYTES} bytes" in error["message"] and "chunk" in error["message"]


def with_extensions(sizes: list[int]) -> bytes:
    """A chunked body of one-byte chunks, each with that many bytes beside its size and content."""
    body = JSON.ljust(len(sizes))
    lines = (b"1" + (b";" + b"x" * (size - 1) if size else b"") for size in sizes)
    return b"".join(b"%b\r\n%c\r\n" % pair for pair in zip(lines, body, strict=True)) + b"0\r\n\r\n"


@pytest.mark.parametrize("in_one_piece", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        lambda total: [total, *[0] * 99],
        lambda total: [*[0] * 99, total],
        lambda total: [*[7] * (total // 7), total % 7],
        # Short chunks make up for nothing that others have.
        lambda total: [*[*[0] * 900, 3000] * 20, *[0] * 900, total - 60_000],
    ],
    ids=["in the first chunk", "in the last chunk", "in all chunks", "among short chunks"],
)
def test_extensions_as_long_as_the_limit_are_taken_and_longer_ones_not(
    server: RunningServer, sizes: Callable[[int], list[int]], in_one_piece: bool
) -> None:
    for total, status in ((MAX_HEAD_BYTES, b"200"), (MAX_HEAD_BYTES + 1, b"431")):
        body = with_extensions(sizes(total))
        parts = [CHUNKED + body] if in_one_piece else [CHUNKED, body]
        assert exchange(server, *parts).startswith(b"HTTP/1.1 " + status)


def test_chunks_of_one_byte_are_no_fault_and_trailers_no_headers(server: RunningServer) -> None:
    # Of 20,000 chunks the sizes and line ends alone are 100,000 bytes.
    body = JSON.ljust(20_000)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\nx-priority: none\r\n\r\n"
    assert exchange(server, CHUNKED + chunks).startswith(b"HTTP/1.1 200 ")
    one = b"%x;name=value\r\n%b\r\n0\r\n\r\n" % (len(JSON), JSON)
    assert exchange(server, CHUNKED + one).startswith(b"HTTP/1.1 200 ")


def counted_per_turn(monkeypatch: pytest.MonkeyPatch, callback: str) -> list[int]:
    """How often the parser calls back between two turns of the event loop: others wait for that."""
    counts: list[int] = []
    is_same_turn = False
    original = getattr(LimitedProtocol, callback)

    def end_turn() -> None:
        nonlocal is_same_turn
        is_same_turn = False

    def count(self: LimitedProtocol) -> None:
        nonlocal is_same_turn
        if not is_same_turn:
            counts.append(0)
            is_same_turn = True
            self.loop.call_soon(end_turn)
        counts[-1] += 1
        original(self)

    monkeypatch.setattr(LimitedProtocol, callback, count)
    return counts


def test_many_short_chunks_hold_nobody_up(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = counted_per_turn(monkeypatch, "on_chunk_header")
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in JSON.ljust(300_000)) + b"0\r\n\r\n"
    assert exchange(server, CHUNKED + body).startswith(b"HTTP/1.1 200 ")
    assert sum(counts) == 300_001
    # A piece more than the limit, at six bytes a chunk.
    assert max(counts) <= CALLS_PER_TURN + PIECE_BYTES // 6 + 1


def test_many_requests_that_come_together_hold_nobody_up(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = counted_per_turn(monkeypatch, "on_message_begin")
    request = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    last = request.replace(b"host", b"connection: close\r\nhost")
    answers = exchange(server, request * 3000 + last)
    assert answers.count(b"HTTP/1.1 200 ") == sum(counts) == 3001
    assert max(counts) <= MAX_PIPELINED + 1


def test_an_endless_trailer_after_the_answer_ends_the_connection(server: RunningServer) -> None:
    """Its request was refused without being read; a second answer would be taken for that of a next one."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    answers = exchange(server, head, b"0\r\nx: " + b"y" * 70_000)
    assert answers.startswith(b"HTTP/1.1 415 ") and answers.count(b"HTTP/1.1 ") == 1


def test_a_later_head_of_a_connection_is_limited_as_its_first(server: RunningServer) -> None:
    whole = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n" + b" " * 200_000
    answers = exchange(server, b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n", b"GET /" + b"z" * 66_000)
    assert answers.startswith(b"HTTP/1.1 200 ") and answers.count(b"HTTP/1.1 431 ") == 1
    # What comes in one piece with a long body is not taken for a long head.
    answers = exchange(server, whole + b"GET /version HTTP/1.1\r\nhost: x\r\n", b"connection: close\r\n\r\n")
    assert answers.count(b"HTTP/1.1 ") == 2 and b"HTTP/1.1 431 " not in answers


OFFER = b"connection: Upgrade, HTTP2-Settings, close\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"


@pytest.mark.parametrize("in_pieces", [False, True])
def test_an_offer_of_another_protocol_is_passed_over(server: RunningServer, in_pieces: bool) -> None:
    """As curl's --http2 and Java's client make it with every request: the body is the body still."""
    length = b"content-length: %d\r\n\r\n" % len(JSON)
    chunks = b"transfer-encoding: chunked\r\n\r\n" + b"%x\r\n%b\r\n0\r\n\r\n" % (len(JSON), JSON)
    for request in (HEAD + OFFER + length + JSON, HEAD + OFFER + chunks):
        parts = [bytes([byte]) for byte in request] if in_pieces else [request]
        answers = exchange(server, *parts)
        assert answers.startswith(b"HTTP/1.1 200 ") and answers.count(b"HTTP/1.1 ") == 1


def test_nothing_hides_behind_an_offer_of_another_protocol(server: RunningServer) -> None:
    hidden = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    head = HEAD + OFFER + b"content-length: %d\r\n\r\n" % len(hidden)
    for parts in ([head + hidden], [head, hidden]):
        answers = exchange(server, *parts)
        assert answers.startswith(b"HTTP/1.1 400 ") and answers.count(b"HTTP/1.1 ") == 1
    offer = OFFER.replace(b", close", b"")
    first = b"GET /version HTTP/1.1\r\nhost: x\r\n" + offer + b"\r\n"
    last = b"GET /version HTTP/1.1\r\nhost: x\r\n" + OFFER + b"\r\n"
    assert exchange(server, first + first + last).count(b"HTTP/1.1 200 ") == 3
    assert exchange(server, b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n").startswith(b"HTTP/1.1 405 ")


STREAM = b'{"prompt": "ab", "max_tokens": 50, "stream": true}'
STREAMED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
STREAMED += b"content-length: %d\r\n\r\n" % len(STREAM) + STREAM


@pytest.fixture(scope="module")
def slow_server() -> Iterator[RunningServer]:
    """Whose streams last some 0.4 seconds."""
    with running_server(("env", "STUB_STEP_SECONDS=0.006", *STUB_COMMAND)) as server:
        yield server
        server.assert_alive()


@pytest.mark.parametrize("in_one_piece", [False, True])
@pytest.mark.parametrize(
    ("following", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /" + b"z" * 70_000, 431),
        (CHUNKED + b"nonsense\r\n", 400),
        (CHUNKED + b"1;" + b"x" * 80_000, 431),
    ],
    ids=["no request", "a long head", "no chunk", "a long extension"],
)
def test_what_is_refused_waits_for_the_answer_before_it(
    slow_server: RunningServer, following: bytes, status: int, in_one_piece: bool
) -> None:
    parts = [STREAMED + following] if in_one_piece else [STREAMED, following]
    stream, *others = exchange(slow_server, *parts).split(b"HTTP/1.1 ")[1:]
    assert stream.startswith(b"200 ") and stream.count(b"data: {") > 20
    assert stream.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert len(others) == 1 and others[0].startswith(b"%d " % status)


def test_a_head_that_waits_for_an_answer_is_not_late() -> None:
    command = ("env", "STUB_STEP_SECONDS=0.04", *STUB_COMMAND)
    with running_server(command, receive_timeout=1.0) as hasty:
        answers = exchange(hasty, STREAMED, b"GE")
    assert answers.count(b"HTTP/1.1 ") == 1 and answers.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
