from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.engines import FakeEngine
from tiny_vllm.serving.engine_loop import EngineLoop
from tiny_vllm.serving.messages import Abort, Accepted, Add, Events, Quit, Refused, Report, Stop, Watch
from tiny_vllm.types import FinishReason, Request, SamplingParams


class ScriptedChannel:
    """Delivers one batch of messages per call, and keeps what the loop sends."""

    def __init__(self, *batches: list[Any]) -> None:
        self.batches = list(batches)
        self.sent: list[Any] = []

    def receive(self, timeout: float) -> list[Any]:
        if self.batches:
            return self.batches.pop(0)
        return [Quit()] if timeout else []  # the engine is idle, or its next step is due

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


def request(name: str, num_tokens: int = 4, **sampling: Any) -> Request:
    params = SamplingParams(**{"seed": 7, "max_tokens": 5, **sampling})
    return Request(name, tuple(range(1, num_tokens + 1)), params, 0.0)


def run(*batches: list[Any], **options: Any) -> tuple[ScriptedChannel, FakeEngine]:
    fake, channel = FakeEngine(**options), ScriptedChannel(*batches)
    EngineLoop(fake.engine, channel).run()
    return channel, fake


def tokens_of(channel: ScriptedChannel, name: str) -> list[int]:
    events = [event for message in channel.of(Events) for event in message.events]
    return [event.token_id for event in events if event.request_id == name and event.token_id is not None]


def ends_of(channel: ScriptedChannel) -> dict[str, FinishReason]:
    events = [event for message in channel.of(Events) for event in message.events]
    ends = [(event.request_id, event.finish_reason) for event in events if event.finish_reason is not None]
    assert len(dict(ends)) == len(ends), "a second end"
    return dict(ends)


def test_requests_run_to_their_end_and_a_last_report_shows_every_page_back() -> None:
    channel, _ = run([Add(1, [request("a"), request("b")])])
    assert channel.of(Accepted) == [Accepted(1)]
    assert len(tokens_of(channel, "a")) == len(tokens_of(channel, "b")) == 5
    stats = channel.of(Report)[-1].stats
    assert stats.num_running == 0 and stats.num_free_pages + stats.num_cached_pages == stats.num_pages


def test_new_requests_join_between_two_steps() -> None:
    channel, _ = run([Add(1, [request("a", max_tokens=20)])], [], [], [Add(2, [request("b", max_tokens=2)])])
    order = [next(iter(message.events)).request_id for message in channel.of(Events)]
    assert order[0] == "a" and list(ends_of(channel)) == ["b", "a"]


def test_a_batch_is_taken_whole_or_not_at_all() -> None:
    channel, fake = run([Add(1, [request("a"), request("b", num_tokens=500)])])
    (refused,) = channel.of(Refused)
    assert (refused.number, refused.error.kind) == (1, "PromptTooLong")
    assert tokens_of(channel, "a") == [] and fake.engine.stats().num_running == 0


def test_stops_and_aborts_end_their_choices_only() -> None:
    channel, _ = run(
        [Add(1, [request("a", max_tokens=20), request("b", max_tokens=20), request("c", max_tokens=20)])],
        [],
        [Stop([("a", 0)]), Abort(["b", "unknown"])],
    )
    assert ends_of(channel) == {
        "a": FinishReason.STOP,
        "b": FinishReason.ABORT,
        "c": FinishReason.LENGTH,
    }
    assert len(tokens_of(channel, "c")) == 20


def test_page_maps_are_sent_while_they_are_watched() -> None:
    channel, _ = run([Watch(True)], [], [Watch(False)], [], num_pages=5)
    maps = [report.page_map for report in channel.of(Report)]
    assert maps[0] is None and "nfffff" in maps and maps[-1] is None


def test_the_loop_ends_when_the_api_process_is_gone() -> None:
    class SilentChannel(ScriptedChannel):
        def receive(self, timeout: float) -> list[Any]:
            return []

    fake, channel = FakeEngine(), SilentChannel()
    EngineLoop(fake.engine, channel, is_orphan=lambda: len(channel.of(Report)) > 2).run()
    assert len(channel.of(Report)) == 3


def test_a_failed_step_ends_the_loop_with_its_error() -> None:
    fake, channel = FakeEngine(), ScriptedChannel([Add(1, [request("a")])])
    fake.executor.failure = RuntimeError("the device is on fire")
    with pytest.raises(Exception, match="on fire"):
        EngineLoop(fake.engine, channel).run()
