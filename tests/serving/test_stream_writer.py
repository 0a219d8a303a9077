"""Chunks that are written without a task's help are the chunks that it would have sent."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tiny_vllm.outputs import ChoiceDelta, CompletionOutput, RequestMetrics, RequestOutput, RequestUpdate
from tiny_vllm.serving.chat_format import ChatFormat
from tiny_vllm.serving.completion_format import CompletionFormat
from tiny_vllm.serving.formats import Heading, StreamFormat
from tiny_vllm.serving.protocol import BodyWriter
from tiny_vllm.serving.schemas import ChatBody, CompletionBody
from tiny_vllm.serving.stream_writer import MARK, StreamWriter, encoded_events

TEXTS = [" plain", "", 'a "quote" \\ and\nlines', "žluťoučký 🐎", MARK, "\x00\x1f", " plain"]


class FakeCycle:
    """As much of uvicorn's as a BodyWriter needs."""

    def __init__(self) -> None:
        self.flow = SimpleNamespace(write_paused=False)
        self.disconnected = False
        self.chunked_encoding = True
        self.written: list[bytes] = []
        self.transport = SimpleNamespace(write=self.written.append)

    def bodies(self) -> list[bytes]:
        """What was written, out of its HTTP chunks, one each."""
        found = []
        for data in self.written:
            size, _, rest = data.partition(b"\r\n")
            assert rest.endswith(b"\r\n") and len(rest) - 2 == int(size, 16) > 0
            found.append(rest[:-2])
        return found


def output() -> RequestOutput:
    choices = [CompletionOutput(index) for index in range(2)]
    return RequestOutput("r", "prompt", [5, 6], choices, RequestMetrics(0.0))


def form(kind: str, options: dict[str, Any], call_id: str = "id") -> StreamFormat:
    heading = Heading(call_id, 1, "model")
    if kind == "chat":
        return ChatFormat(ChatBody(messages=[], stream=True, **options), heading, None)
    return CompletionFormat(CompletionBody(prompt="", stream=True, **options), heading, None)


def writer_of(cycle: FakeCycle, shown: StreamFormat) -> StreamWriter:
    return StreamWriter(shown, [output(), output()], BodyWriter(cast(Any, cycle)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"continuous_usage_stats": True}},
        {"return_token_ids": True},
        {"echo": True},
        {"logprobs": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_what_is_pushed_is_what_would_have_been_sent(kind: str, options: dict[str, Any]) -> None:
    if kind == "chat":
        options = {name: value for name, value in options.items() if name not in ("echo", "logprobs")}
    shown, cycle = form(kind, options), FakeCycle()
    writer, outputs = writer_of(cycle, form(kind, options)), [output(), output()]
    place = 0 if kind == "chat" else 1
    expected = []
    for text in TEXTS:
        update = RequestUpdate(outputs[place], [ChoiceDelta(0, text, [7]), ChoiceDelta(1, text + "!", [8])])
        expected.append(encoded_events(shown.chunks(outputs, [(place, update)])))
        assert writer.push((place, update))
    assert cycle.bodies() == expected


def test_an_id_that_looks_like_the_mark_changes_nothing() -> None:
    cycle = FakeCycle()
    call_id = f"cmpl-{MARK}-1"
    writer = writer_of(cycle, form("completion", {}, call_id))
    assert writer.push((0, RequestUpdate(output(), [ChoiceDelta(0, "text")])))
    (body,) = cycle.bodies()
    event = json.loads(body.removeprefix(b"data: "))
    assert (event["id"], event["choices"][0]["text"]) == (call_id, "text")


@pytest.mark.parametrize("obstacle", ["end", "slow reader", "gone", "no chunks", "no writer"])
def test_what_may_have_to_wait_is_left_to_the_task(obstacle: str) -> None:
    cycle = FakeCycle()
    writer = writer_of(cycle, form("completion", {}))
    delta = ChoiceDelta(0, "text")
    match obstacle:
        case "end":
            delta.finish_reason = "stop"
        case "slow reader":
            cycle.flow.write_paused = True
        case "gone":
            cycle.disconnected = True
        case "no chunks":
            cycle.chunked_encoding = False
        case "no writer":
            writer = StreamWriter(form("completion", {}), [output()], None)
    assert not writer.push((0, RequestUpdate(output(), [ChoiceDelta(1, "other"), delta])))
    assert cycle.written == []
