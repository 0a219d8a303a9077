"""Whatever bytes a connection brings, the answers are whole, in order, and one for each request.

Heads and what comes beside a body have limits; nothing that a client writes passes for another request.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import logging
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


def exchange(server: RunningServer, *parts: bytes, pause: float = 0.01) -> bytes:
    """Everything the server says to raw bytes, until it hangs up. pause: seconds after each part."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as client:
        with contextlib.suppress(OSError):
            for part in parts:
                client.sendall(part)
                time.sleep(pause)
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
    with running_server(receive_timeout=1.0) as hasty, concurrent.futures.ThreadPoolExecutor(3) as pool:
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
        answers = exchange(server, *parts, pause=0.001)
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


GET = b"GET /version HTTP/1.1\r\nhost: x\r\n"
LENGTH = b"content-length: %d\r\n" % len(JSON)
IN_CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(JSON), JSON)
LAST = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def get(target: bytes, version: bytes = b"HTTP/1.1") -> bytes:
    return b"GET %b %b\r\nhost: x\r\n\r\n" % (target, version)


def post(*headers: bytes, body: bytes = JSON) -> bytes:
    return HEAD + b"".join(header + b"\r\n" for header in headers) + b"\r\n" + body


def chunked(*encodings: bytes, body: bytes = IN_CHUNKS) -> bytes:
    return post(*(b"transfer-encoding: " + encoding for encoding in encodings), body=body)


OK, LAST_OK, REFUSED = (200, 200), (200,), (400,)
RAW: dict[str, tuple[bytes, tuple[int, ...]]] = {
    # Where a line ends, and which it belongs to.
    "a folded header": (GET + b"x: a\r\n  b\r\n\r\n", REFUSED),
    "a header folded by a tab": (GET + b"x: a\r\n\tb\r\n\r\n", REFUSED),
    "a folded length": (post(b"content-length:\r\n %d" % len(JSON)), REFUSED),
    "a folded encoding": (chunked(b"\r\n chunked"), REFUSED),
    "a fold before any header": (b"GET /version HTTP/1.1\r\n host: x\r\n\r\n", REFUSED),
    "bare line feeds": (GET.replace(b"\r", b"") + b"\n", REFUSED),
    "a bare line feed for a blank line": (GET + b"\n", REFUSED),
    "a bare line feed in a head": (GET + b"x: y\nz: y\r\n\r\n", REFUSED),
    "a bare carriage return in a value": (GET + b"x: a\rb: c\r\n\r\n", REFUSED),
    "empty lines before a request": (b"\r\n\r\n" + GET + b"\r\n", OK),
    # Lengths.
    "a length twice": (post(LENGTH[:-2], LENGTH[:-2]), REFUSED),
    "two lengths": (post(LENGTH[:-2], b"content-length: 5"), REFUSED),
    "a list of lengths": (post(b"content-length: 32, 32"), REFUSED),
    "a length with a plus": (post(b"content-length: +32"), REFUSED),
    "a length with a minus": (post(b"content-length: -32"), REFUSED),
    "a length with a space": (post(b"content-length: 3 2"), REFUSED),
    "a length before a space": (post(b"content-length: 32 \t"), OK),
    "a length with an underscore": (post(b"content-length: 3_2"), REFUSED),
    "a hexadecimal length": (post(b"content-length: 0x20"), REFUSED),
    "no length in its header": (post(b"content-length: "), REFUSED),
    "a length of 23 digits": (post(b"content-length: " + b"9" * 23), REFUSED),
    "a length in other digits": (post("content-length: ٣٢".encode()), REFUSED),
    "a space before a colon": (post(b"content-length : 32"), REFUSED),
    "a length and chunks": (post(LENGTH[:-2], b"transfer-encoding: chunked", body=IN_CHUNKS), REFUSED),
    "chunks and a length": (post(b"transfer-encoding: chunked", LENGTH[:-2], body=IN_CHUNKS), REFUSED),
    # Encodings.
    "gzip": (chunked(b"gzip"), REFUSED),
    "gzip and a length": (post(b"transfer-encoding: gzip", LENGTH[:-2]), REFUSED),
    "chunks, then gzip": (chunked(b"chunked, gzip"), REFUSED),
    "chunks of chunks": (chunked(b"chunked, chunked"), REFUSED),
    "chunks in two headers": (chunked(b"chunked", b"chunked"), REFUSED),
    "gzip in chunks": (chunked(b"gzip, chunked"), (501,)),
    "gzip in chunks, in two headers": (chunked(b"gzip", b"chunked"), (501,)),
    "identity": (post(b"transfer-encoding: identity", LENGTH[:-2]), REFUSED),
    "capital letters": (chunked(b"CHUNKED"), OK),
    "almost chunks": (chunked(b"xchunked"), REFUSED),
    "chunks with a parameter": (chunked(b"chunked;q=1"), REFUSED),
    "quoted chunks": (chunked(b'"chunked"'), REFUSED),
    "chunks behind a vertical tab": (chunked(b"\x0bchunked"), REFUSED),
    "gzip without a body": (GET + b"transfer-encoding: gzip\r\n\r\n", REFUSED),
    # Whatever it says of the connection, that ends: another server may not have known of chunks.
    "chunks before their time": (
        chunked(b"chunked").replace(b"1.1\r\n", b"1.0\r\nconnection: keep-alive\r\n"),
        LAST_OK,
    ),
    "a chunk's size with a sign": (chunked(b"chunked", body=b"+" + IN_CHUNKS), REFUSED),
    "a chunk's size with 0x": (chunked(b"chunked", body=b"0x" + IN_CHUNKS), REFUSED),
    "a chunk's size before a space": (chunked(b"chunked", body=b"20 " + IN_CHUNKS[2:]), REFUSED),
    "a chunk's size with an underscore": (chunked(b"chunked", body=b"2_0" + IN_CHUNKS[2:]), REFUSED),
    "a chunk's size of 17 digits": (chunked(b"chunked", body=b"f" * 17 + IN_CHUNKS[2:]), REFUSED),
    "chunks between line feeds": (chunked(b"chunked", body=IN_CHUNKS.replace(b"\r", b"")), REFUSED),
    "an extension before a line feed": (chunked(b"chunked", body=b"20;a\n" + IN_CHUNKS[4:]), REFUSED),
    "a chunk longer than its size": (chunked(b"chunked", body=b"1f" + IN_CHUNKS[2:]), REFUSED),
    "a trailer that is none": (chunked(b"chunked", body=IN_CHUNKS[:-2] + b"none\r\n\r\n"), REFUSED),
    "a length in a trailer": (chunked(b"chunked", body=IN_CHUNKS[:-2] + LENGTH + b"\r\n"), REFUSED),
    # Targets.
    "an absolute target": (get(b"http://x/version?y"), OK),
    "an absolute target elsewhere": (get(b"http://user@[::1]:99/version"), OK),
    "an absolute target without a path": (get(b"http://x"), OK),
    "an absolute target with only a query": (get(b"http://x?y=z"), OK),
    "a port that is none": (get(b"http://x:port/version"), REFUSED),
    "a port above all": (get(b"http://x:99999/version"), REFUSED),
    "an authority": (get(b"x:80"), REFUSED),
    "an authority to connect to": (get(b"x:80").replace(b"GET", b"CONNECT"), (405,)),
    "a path to connect to": (get(b"/version").replace(b"GET", b"CONNECT"), (405,)),
    "a relative target": (get(b"version"), REFUSED),
    "a query alone": (get(b"?x"), REFUSED),
    "everything": (get(b"*"), (404, 200)),
    "two slashes": (get(b"//version"), (404, 200)),
    "steps upwards": (get(b"/v1/../version"), (404, 200)),
    "a written-out letter": (get(b"/%76ersion"), OK),
    "a written-out slash": (get(b"/v1%2fmodels"), OK),
    "no text, written out": (get(b"/%ff%fe"), (404, 200)),
    "no text, written out, as a name": (get(b"/v1/models/%ff"), (404, 200)),
    "half an escape": (get(b"/%zz%4"), (404, 200)),
    "line ends, written out": (get(b"/a%00b%0d%0aset-cookie:%20x"), (404, 200)),
    "letters that are not written out": (get("/ä".encode()), REFUSED),
    "no text": (get(b"/\xe4\xff"), REFUSED),
    "no text in a query": (get(b"/version?\xe4\xff"), REFUSED),
    "a space in a target": (get(b"/ver sion"), REFUSED),
    "a NUL in a target": (get(b"/ver\0sion"), REFUSED),
    # Versions.
    "1.0": (get(b"/version", b"HTTP/1.0"), LAST_OK),
    "1.0 that would stay": (get(b"/version", b"HTTP/1.0\r\nconnection: keep-alive"), LAST_OK),
    "1.0 without a host": (b"GET /version HTTP/1.0\r\n\r\n", LAST_OK),
    "0.9": (b"GET /version\r\n\r\n", (505,)),
    "0.9 by name": (get(b"/version", b"HTTP/0.9"), (505,)),
    "1.2": (get(b"/version", b"HTTP/1.2"), REFUSED),
    "2.0": (get(b"/version", b"HTTP/2.0"), (505,)),
    "HTTP/2 by prior knowledge": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", REFUSED),
    "small letters": (get(b"/version", b"http/1.1"), REFUSED),
    # Hosts.
    "no host": (b"GET /version HTTP/1.1\r\n\r\n", REFUSED),
    "two hosts": (GET + b"host: y\r\n\r\n", REFUSED),
    "the same host twice": (GET + b"host: x\r\n\r\n", REFUSED),
    "a host that is none": (GET.replace(b"host: x", b"host: a b/c") + b"\r\n", REFUSED),
    "an empty host": (GET.replace(b"host: x", b"host:") + b"\r\n", OK),
    "a host with everything": (GET.replace(b"host: x", b"host: [fe80::1%25en0]:8000") + b"\r\n", OK),
    # Values and names.
    "a NUL in a value": (GET + b"x: a\0b\r\n\r\n", REFUSED),
    "a NUL in a name": (GET + b"x\0: b\r\n\r\n", REFUSED),
    "a control character in a value": (GET + b"x: a\x01b\r\n\r\n", REFUSED),
    "other letters in a value": (GET + b"x: \xe4\xff\r\n\r\n", OK),
    "other letters in a name": (GET + b"\xe4: x\r\n\r\n", REFUSED),
    "a space in a name": (GET + b"a b: x\r\n\r\n", REFUSED),
    "no colon": (GET + b"abc\r\n\r\n", REFUSED),
    "no name": (GET + b": x\r\n\r\n", REFUSED),
    # Methods.
    "a long method": (b"G" * 5000 + get(b"/version"), REFUSED),
    "a very long method": (b"G" * 70_000 + get(b"/version"), REFUSED),
    "an unknown method": (b"X" + get(b"/version"), REFUSED),
    "a method in small letters": (get(b"/version").replace(b"GET", b"get"), REFUSED),
    "a method that is not for here": (get(b"/version").replace(b"GET", b"TRACE"), (405, 200)),
    # What comes behind a refused request that was whole.
    "another path": (get(b"/nothing"), (404, 200)),
    "a body that is no JSON": (post(b"content-length: 2", body=b"{]"), (400, 200)),
    "a body of another type": (post(LENGTH[:-2]).replace(b"/json", b"/x"), (415, 200)),
    "a body where none belongs": (GET + LENGTH + b"\r\n" + JSON, OK),
    "the end of the connection": (GET + b"connection: close, keep-alive\r\n\r\n", LAST_OK),
}


@pytest.mark.parametrize("first", [b"", GET + b"\r\n"], ids=["first", "second"])
@pytest.mark.parametrize("name", RAW)
def test_raw_requests_are_answered_as_rfc_9112_has_it(
    server: RunningServer, caplog: pytest.LogCaptureFixture, name: str, first: bytes
) -> None:
    """Where it is unsure what comes next, nothing behind it is answered."""
    request, statuses = RAW[name]
    answers = exchange(server, first + request + LAST).split(b"HTTP/1.1 ")[1:]
    assert [int(answer[:3]) for answer in answers] == [200] * bool(first) + list(statuses)
    for answer in answers:
        head, _, body = answer.partition(b"\r\n\r\n")
        if not answer.startswith(b"200 "):
            assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
        assert (b"connection: close" in head) is (answer is answers[-1])
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    ("old", "new", "status"),
    [(b"/json", b"/x", 415), (b"/v1", b"/v0", 404), (b"POST", b"PUT", 405)],
    ids=["type", "path", "method"],
)
@pytest.mark.parametrize("framing", [LENGTH[:-2], b"transfer-encoding: chunked"], ids=["length", "chunks"])
def test_behind_a_body_that_is_refused_without_being_asked_for_nothing_is_read(
    server: RunningServer, framing: bytes, old: bytes, new: bytes, status: int
) -> None:
    """The client may send it or not: what comes could be the body or a request."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(post(framing, b"expect: 100-Continue", body=b"").replace(old, new))
        head, _ = answer_on(client)
        assert head.startswith(b"HTTP/1.1 %d " % status) and head.count(b"connection: close") == 1
        with contextlib.suppress(ConnectionError):
            client.sendall(LAST)
            assert client.recv(1) == b""


def test_a_body_that_is_asked_for_and_taken_leaves_the_connection(server: RunningServer) -> None:
    answers = exchange(server, post(LENGTH[:-2], b"expect: 100-continue") + LAST).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"100", b"200", b"200"]


def test_clients_of_http_1_0_get_no_chunks_and_are_asked_for_nothing(server: RunningServer) -> None:
    """Neither existed then: a stream ends with its connection."""
    for body in (JSON, STREAM):
        old = post(b"content-length: %d" % len(body), b"expect: 100-continue", body=body)
        head, _, answer = exchange(server, old.replace(b"HTTP/1.1", b"HTTP/1.0")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ") and b"transfer-encoding" not in head
        if body == JSON:
            assert json.loads(answer)["usage"]["completion_tokens"] == 2
            assert b"content-length: %d" % len(answer) in head
        else:
            assert answer.startswith(b"data: {") and answer.endswith(b"}\n\ndata: [DONE]\n\n")


def test_the_rest_of_a_refused_body_may_not_take_for_ever() -> None:
    with running_server(receive_timeout=1.0) as hasty:
        start = post(b"content-length: 1000", body=b"").replace(b"/json", b"/x")
        with socket.create_connection(("127.0.0.1", hasty.port), timeout=0.2) as client:
            client.sendall(start)
            said, deadline = b"", time.monotonic() + 20
            with contextlib.suppress(ConnectionError):
                while time.monotonic() < deadline:
                    client.sendall(b" ")
                    with contextlib.suppress(TimeoutError):
                        if not (part := client.recv(1000)):
                            break
                        said += part
            assert time.monotonic() < deadline and said.startswith(b"HTTP/1.1 415 ")
