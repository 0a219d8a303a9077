"""One process of raw HTTP clients that all ask for a stream at once, for http_cost.py; prints what they saw.

All are connected before the first asks, and the clock starts with that.

    python -m benchmarks.http_burst PORT NUM_REQUESTS NUM_TOKENS NUM_WORDS

Times between events are vLLM's "inter-token latency": of two that arrive in one read, the second counts 0.
"""

from __future__ import annotations

import json
import random
import selectors
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

WORDS = (
    *("information", "government", "development", "different", "important", "something", "education"),
    *("community", "including", "following", "experience", "university", "international", "department"),
    *("management", "president", "technology", "significant", "environment"),
)


@dataclass
class Stream:
    """One request. tail: the end of what was received, in which an event or its end may begin."""

    connection: socket.socket
    start: float
    tail: bytes = b""
    times: list[float] = field(default_factory=list)
    is_done: bool = False

    def take(self, data: bytes, now: float) -> None:
        """Count the events of what was read."""
        seen = self.tail + data
        self.times += [now] * seen.count(b"data: {")
        self.is_done = b"data: [DONE]" in seen
        place = seen.rfind(b"data: ")
        self.tail = seen[max(place + 7, len(seen) - 11) :] if place >= 0 else seen[-11:]


def request(rng: random.Random, num_tokens: int, num_words: int) -> bytes:
    body = {"prompt": " ".join(rng.choices(WORDS, k=num_words)), "max_tokens": num_tokens}
    data = json.dumps(body | {"ignore_eos": True, "stream": True, "temperature": 0}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    )
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def run(port: int, num_requests: int, num_tokens: int, num_words: int) -> dict[str, Any]:
    rng = random.Random(0)
    requests = [request(rng, num_tokens, num_words) for _ in range(num_requests)]
    selector = selectors.DefaultSelector()
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in requests]
    begin = time.perf_counter()
    streams: list[Stream] = []
    num_open = num_requests
    while num_open:
        if len(streams) < num_requests:
            connection = connections[len(streams)]
            stream = Stream(connection, begin)
            connection.sendall(requests[len(streams)])
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ, stream)
            streams.append(stream)
        for key, _ in selector.select(0 if len(streams) < num_requests else None):
            stream = key.data
            data = stream.connection.recv(1 << 16)
            if data:
                stream.take(data, time.perf_counter())
            else:
                selector.unregister(stream.connection)
                stream.connection.close()
                num_open -= 1
    seconds = time.perf_counter() - begin
    assert all(stream.is_done for stream in streams), "a stream has no end"
    first = sorted(stream.times[0] - stream.start for stream in streams)
    gaps = sorted(
        later - earlier
        for stream in streams
        for earlier, later in zip(stream.times, stream.times[1:], strict=False)
    )
    per_token = sorted((stream.times[-1] - stream.times[0]) / (num_tokens - 1) for stream in streams)
    num_events = sum(len(stream.times) for stream in streams)
    return {
        "tokens": num_requests * num_tokens,
        "events": num_events,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(num_requests * num_tokens / seconds),
        "events_per_second": round(num_events / seconds),
        "ttft_ms_p50_p99": milliseconds(first),
        "tpot_ms_p50_p99": milliseconds(per_token),
        "itl_ms_p50_p99": milliseconds(gaps),
    }


def milliseconds(seconds: list[float]) -> list[float]:
    """p50 and p99 of sorted values."""
    return [round(1000 * seconds[int(len(seconds) * share)], 2) for share in (0.5, 0.99)]


if __name__ == "__main__":
    print(json.dumps(run(*map(int, sys.argv[1:]))))
