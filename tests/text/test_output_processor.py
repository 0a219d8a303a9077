from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiny_vllm.outputs import CompletionOutput, Logprob, RequestOutput
from tiny_vllm.text.output_processor import ChoiceDelta, OutputProcessor, Progress
from tiny_vllm.text.tokenizer import Tokenizer
from tiny_vllm.types import FinishReason, PromptInfo, Request, SamplingParams, TokenEvent, TokenLogprobs

EOS = 1
PROMPT = (5, 6, 7)


def request(request_id: str = "r", prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> Request:
    return Request(request_id, prompt, SamplingParams(**{"max_tokens": 100, **sampling}), arrival_time=10.0)


class Run:
    """Feeds one request's tokens to a processor, one step each, and keeps what came out."""

    def __init__(self, tokenizer: Tokenizer | None, **sampling: Any) -> None:
        self.processor = OutputProcessor(tokenizer)
        self.output = self.processor.add(request(**sampling), "prompt text")
        self.deltas: list[ChoiceDelta] = []
        self.stops: list[tuple[str, int]] = []
        self.num_finished_updates = 0

    def feed(self, token_ids: Sequence[int | None], **last: Any) -> CompletionOutput:
        """last: fields of the last event."""
        for place, token_id in enumerate(token_ids):
            event = TokenEvent("r", 0, token_id, **(last if place == len(token_ids) - 1 else {}))
            self.take(self.processor.process([event], now=11.0 + place))
        return self.output.outputs[0]

    def take(self, progress: Progress) -> None:
        self.stops += progress.stops
        for update in progress.updates:
            assert update.output is self.output
            self.deltas += update.deltas
            self.num_finished_updates += update.output.finished

    @property
    def streamed(self) -> str:
        return "".join(delta.text for delta in self.deltas)


def tokens(tokenizer: Tokenizer, *texts: str) -> list[int]:
    return [token_id for text in texts for token_id in tokenizer.encode(text, add_special_tokens=False)]


def test_increments_add_up_to_the_whole(byte_level_tokenizer: Tokenizer) -> None:
    run = Run(byte_level_tokenizer)
    ids = tokens(byte_level_tokenizer, "naïve 😀 한글 text")
    output = run.feed(ids, finish_reason=FinishReason.LENGTH)
    assert output.text == run.streamed == "naïve 😀 한글 text"
    assert output.token_ids == [token_id for delta in run.deltas for token_id in delta.token_ids] == ids
    assert (output.finish_reason, output.stop_reason) == ("length", None)
    assert [delta.finish_reason for delta in run.deltas] == [None] * (len(ids) - 1) + ["length"]
    assert run.num_finished_updates == 1
    assert run.stops == []
    assert len(run.processor) == 0


def test_the_output_names_its_prompt(byte_level_tokenizer: Tokenizer) -> None:
    run = Run(byte_level_tokenizer)
    assert (run.output.prompt, run.output.prompt_token_ids) == ("prompt text", list(PROMPT))
    assert not run.output.finished


def test_eos_is_a_token_but_not_text(byte_level_tokenizer: Tokenizer) -> None:
    run = Run(byte_level_tokenizer, skip_special_tokens=False)
    output = run.feed([*tokens(byte_level_tokenizer, "ab"), EOS], finish_reason=FinishReason.STOP)
    assert output.text == "ab"
    assert output.token_ids[-1] == EOS
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert run.stops == []


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_token_is_named_and_shown_only_when_asked(
    byte_level_tokenizer: Tokenizer, include: bool, text: str
) -> None:
    (stop,) = tokens(byte_level_tokenizer, "b")
    run = Run(byte_level_tokenizer, stop_token_ids=[stop], include_stop_str_in_output=include)
    ids = [*tokens(byte_level_tokenizer, "a"), stop]
    output = run.feed(ids, finish_reason=FinishReason.STOP, stop_reason=stop)
    assert (output.text, output.token_ids, output.stop_reason) == (text, ids, stop)


def test_a_stop_string_ends_a_choice_without_leaking(byte_level_tokenizer: Tokenizer) -> None:
    run = Run(byte_level_tokenizer, stop=["<end>", "<enough>"])
    ids = tokens(byte_level_tokenizer, "a", "<", "e", "n", "d", ">", "b")
    output = run.feed(ids)
    assert output.text == run.streamed == "a"
    assert (output.finish_reason, output.stop_reason) == ("stop", "<end>")
    assert run.stops == [("r", 0)]
    assert output.token_ids == ids[:-1]
    assert run.num_finished_updates == 1


def test_a_stop_string_may_end_inside_a_token(byte_level_tokenizer: Tokenizer) -> None:
    (token_id,) = tokens(byte_level_tokenizer, "  ")
    run = Run(byte_level_tokenizer, stop=["a "], include_stop_str_in_output=True)
    output = run.feed([*tokens(byte_level_tokenizer, "xa"), token_id])
    assert (output.text, output.stop_reason) == ("xa ", "a ")


def test_held_back_text_is_released_at_the_end(byte_level_tokenizer: Tokenizer) -> None:
    for reason, last in ((FinishReason.LENGTH, []), (FinishReason.STOP, [EOS]), (FinishReason.ABORT, [None])):
        run = Run(byte_level_tokenizer, stop=["###END"])
        ids = tokens(byte_level_tokenizer, "a", "#", "#", "#", "E")
        output = run.feed([*ids, *last], finish_reason=reason)
        assert output.text == run.streamed == "a###E"
        assert output.finish_reason == reason.value


def test_a_character_cut_off_at_the_end_is_marked(byte_level_tokenizer: Tokenizer) -> None:
    run = Run(byte_level_tokenizer)
    first_byte = byte_level_tokenizer.token_id("ð")
    assert first_byte is not None
    output = run.feed([*tokens(byte_level_tokenizer, "a"), first_byte], finish_reason=FinishReason.LENGTH)
    assert output.text == run.streamed == "a\ufffd"


def test_a_stop_string_in_the_last_token_wins_over_length(byte_level_tokenizer: Tokenizer) -> None:
    run = Run(byte_level_tokenizer, stop=["b"])
    output = run.feed(tokens(byte_level_tokenizer, "a", "b"), finish_reason=FinishReason.LENGTH)
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "b")
    assert run.stops == []


def test_stop_strings_wait_for_min_tokens(byte_level_tokenizer: Tokenizer) -> None:
    run = Run(byte_level_tokenizer, stop=["."], min_tokens=3)
    output = run.feed(tokens(byte_level_tokenizer, ".", "a", ".", "b", ".", "c"))
    assert output.text == ".a.b"
    assert len(output.token_ids) == 5


def test_a_stop_string_in_the_prompt_does_not_count(byte_level_tokenizer: Tokenizer) -> None:
    prompt = tuple(tokens(byte_level_tokenizer, "say E", "N"))
    processor = OutputProcessor(byte_level_tokenizer)
    output = processor.add(request(prompt=prompt, stop=["END"]))
    for token_id in tokens(byte_level_tokenizer, "D", "x"):
        processor.process([TokenEvent("r", 0, token_id)], 0.0)
    assert output.outputs[0].text == "Dx"


def test_special_tokens_show_only_when_asked(byte_level_tokenizer: Tokenizer) -> None:
    for skip, text in ((True, "ab"), (False, "a<s>b")):
        run = Run(byte_level_tokenizer, skip_special_tokens=skip, ignore_eos=True)
        assert run.feed(tokens(byte_level_tokenizer, "a", "<s>", "b")).text == text


def test_text_continues_the_prompt(sentencepiece_tokenizer: Tokenizer) -> None:
    word = tuple(tokens(sentencepiece_tokenizer, "is"))
    for prompt, text in ((word, " is"), ((1,), "is"), ((1, *word), " is")):
        processor = OutputProcessor(sentencepiece_tokenizer)
        output = processor.add(request(prompt=prompt))
        processor.process([TokenEvent("r", 0, word[0])], 0.0)
        assert output.outputs[0].text == text


def test_without_detokenising_there_is_no_text(byte_level_tokenizer: Tokenizer) -> None:
    position = TokenLogprobs((5,), (-1.0,), (1,))
    for tokenizer, detokenize in ((byte_level_tokenizer, False), (None, True)):
        run = Run(tokenizer, detokenize=detokenize, logprobs=0)
        output = run.feed([5], finish_reason=FinishReason.LENGTH, logprobs=position)
        assert (output.text, output.token_ids) == ("", [5])
        assert output.logprobs == [{5: Logprob(-1.0, 1, None)}]


def test_logprobs_carry_text_and_add_up(byte_level_tokenizer: Tokenizer) -> None:
    (a,), (b,) = tokens(byte_level_tokenizer, "a"), tokens(byte_level_tokenizer, "b")
    run = Run(byte_level_tokenizer, logprobs=2)
    first = TokenLogprobs((a, a, b), (-0.5, -0.5, -1.0), (1, 1, 2))
    second = TokenLogprobs((b, a, EOS), (-3.0, -0.25, -1.5), (7, 1, 2))
    run.feed([a], logprobs=first)
    output = run.feed([b], logprobs=second, finish_reason=FinishReason.LENGTH)
    assert output.logprobs == [
        {a: Logprob(-0.5, 1, "a"), b: Logprob(-1.0, 2, "b")},
        {b: Logprob(-3.0, 7, "b"), a: Logprob(-0.25, 1, "a"), EOS: Logprob(-1.5, 2, "</s>")},
    ]
    assert output.cumulative_logprob == -3.5
    assert [delta.logprobs for delta in run.deltas] == [[entry] for entry in output.logprobs]


def test_logprobs_are_absent_unless_asked_for(byte_level_tokenizer: Tokenizer) -> None:
    output = Run(byte_level_tokenizer).feed([5])
    assert (output.logprobs, output.cumulative_logprob) == (None, None)


def test_metrics_and_prompt_logprobs_come_with_the_first_event(byte_level_tokenizer: Tokenizer) -> None:
    run = Run(byte_level_tokenizer, prompt_logprobs=0)
    info = PromptInfo(10.5, 2, (None, TokenLogprobs((6,), (-2.0,), (3,)), None))
    run.take(run.processor.process([TokenEvent("r", 0, 5, prompt=info)], now=11.0))
    run.take(run.processor.process([TokenEvent("r", 0, 5)], now=12.0))
    run.take(run.processor.process([TokenEvent("r", 0, 5, FinishReason.LENGTH)], now=14.0))
    metrics = run.output.metrics
    assert run.output.prompt_logprobs == [
        None,
        {6: Logprob(-2.0, 3, byte_level_tokenizer.token_text(6))},
        None,
    ]
    assert (metrics.queue_time, metrics.time_to_first_token, metrics.time_per_output_token) == (0.5, 1.0, 1.5)
    assert (metrics.finished_time, metrics.num_generated_tokens) == (14.0, 3)
    assert run.output.num_cached_tokens == 2


def test_an_end_without_a_token_counts_none(byte_level_tokenizer: Tokenizer) -> None:
    run = Run(byte_level_tokenizer, max_tokens=0)
    output = run.feed([None], finish_reason=FinishReason.LENGTH)
    assert (output.token_ids, output.text, output.finish_reason) == ([], "", "length")
    assert run.output.metrics.num_generated_tokens == 0
    assert run.output.metrics.first_token_time is None
    assert run.num_finished_updates == 1


def test_choices_end_one_by_one(byte_level_tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(byte_level_tokenizer)
    output = processor.add(request(n=3, stop=["b"]))
    a, b = tokens(byte_level_tokenizer, "a"), tokens(byte_level_tokenizer, "b")
    progress = processor.process([TokenEvent("r", index, (a, b, a)[index][0]) for index in range(3)], 11.0)
    assert [(update.output is output, len(update.deltas)) for update in progress.updates] == [(True, 3)]
    assert progress.stops == [("r", 1)]
    late = processor.process([TokenEvent("r", 1, a[0]), TokenEvent("r", 1, None, FinishReason.ABORT)], 12.0)
    assert (late.updates, late.stops) == ([], [])
    processor.process([TokenEvent("r", 0, EOS, FinishReason.STOP)], 13.0)
    assert not output.finished
    last = processor.process([TokenEvent("r", 2, a[0], FinishReason.LENGTH)], 14.0)
    assert last.updates[0].output.finished
    assert [choice.text for choice in output.outputs] == ["a", "", "aa"]
    assert [choice.finish_reason for choice in output.outputs] == ["stop", "stop", "length"]
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert output.metrics.num_generated_tokens == 5


def test_several_events_of_a_choice_in_one_batch_make_one_delta(byte_level_tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(byte_level_tokenizer)
    processor.add(request(logprobs=0))
    ids = tokens(byte_level_tokenizer, "a", "b")
    events = [TokenEvent("r", 0, id_, logprobs=TokenLogprobs((id_,), (-1.0,), (1,))) for id_ in ids]
    (update,) = processor.process(events, 11.0).updates
    (delta,) = update.deltas
    assert (delta.text, delta.token_ids, len(delta.logprobs or ())) == ("ab", ids, 2)


def test_requests_do_not_mix(byte_level_tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(byte_level_tokenizer)
    outputs = [processor.add(request(request_id=name)) for name in "xy"]
    a, b = tokens(byte_level_tokenizer, "a"), tokens(byte_level_tokenizer, "b")
    progress = processor.process(
        [TokenEvent("x", 0, a[0]), TokenEvent("y", 0, b[0]), TokenEvent("x", 0, b[0])], 11.0
    )
    assert [update.output.request_id for update in progress.updates] == ["x", "y"]
    assert [output.outputs[0].text for output in outputs] == ["ab", "b"]


def test_events_of_unknown_and_removed_requests_are_ignored(byte_level_tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(byte_level_tokenizer)
    processor.add(request())
    assert "r" in processor
    processor.remove("r")
    processor.remove("r")
    assert "r" not in processor
    assert processor.process([TokenEvent("r", 0, 5), TokenEvent("other", 0, 5)], 11.0).updates == []


@given(data=st.data())
def test_any_tokens_with_any_stop_strings_stream_what_they_end_as(
    byte_level_tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(2, byte_level_tokenizer.vocab_size + 3), min_size=1, max_size=30))
    stops = data.draw(st.lists(st.text(alphabet="aeno t", min_size=1, max_size=3), max_size=3))
    run = Run(byte_level_tokenizer, stop=stops or None)
    output = run.feed(ids, finish_reason=FinishReason.LENGTH)
    whole = byte_level_tokenizer.decode(ids)
    ends = [place for stop in stops if (place := whole.find(stop)) >= 0]
    assert output.text == run.streamed
    assert whole.startswith(output.text)
    assert (output.finish_reason == "stop") == bool(ends)
    assert not any(stop in output.text for stop in stops)
    if not ends:
        assert output.text == whole
    assert run.num_finished_updates == 1
    assert isinstance(run.output, RequestOutput)
