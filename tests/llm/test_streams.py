"""Text as it comes: stop strings, several streams at once, streams that nobody reads to the end."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.helpers.llm_checks import assert_pool_is_whole, greedy, random_prompt
from tests.helpers.oracle import greedy_tokens
from tiny_vllm import LLM, SamplingParams


def test_stop_string_over_several_tokens_never_leaks_while_streaming(llm: LLM) -> None:
    prompt = [5, 6, 7, 8]
    (whole,) = llm.generate(prompt, greedy(40, ignore_eos=True))
    text = whole.outputs[0].text
    assert len(text) > 20
    stop = text[9:15]
    cut = text.index(stop)
    for include, expected in ((False, text[:cut]), (True, text[: cut + len(stop)])):
        params = greedy(
            40, ignore_eos=True, stop=["never", stop, stop + "x"], include_stop_str_in_output=include
        )
        streamed, shown = "", ""
        for update in llm.stream(prompt, params):
            streamed += update.text
            shown = update.output.outputs[0].text
            assert expected.startswith(streamed)
        assert streamed == shown == expected
        (at_once,) = llm.generate(prompt, params)
        assert at_once.outputs[0].text == expected
        assert (at_once.outputs[0].finish_reason, at_once.outputs[0].stop_reason) == ("stop", stop)
    assert_pool_is_whole(llm)


def test_text_held_back_for_a_stop_string_arrives_at_the_end(llm: LLM) -> None:
    (whole,) = llm.generate([5, 6, 7, 8], greedy(12, ignore_eos=True))
    text = whole.outputs[0].text
    (output,) = llm.generate([5, 6, 7, 8], greedy(12, ignore_eos=True, stop=text[-3:] + "never"))
    assert output.outputs[0].text == text
    assert output.outputs[0].finish_reason == "length"


def test_streams_run_together_and_equal_generate(model: Any, llm: LLM) -> None:
    prompts = [random_prompt(random.Random(seed), 5 + seed) for seed in range(6)]
    streams = [llm.stream(prompt, greedy(8, ignore_eos=True)) for prompt in prompts]
    results: list[list[int]] = [[] for _ in prompts]
    pending = list(enumerate(streams))
    while pending:
        for number, stream in list(pending):
            update = next(stream, None)
            if update is None:
                pending.remove((number, stream))
            else:
                results[number] += [token for delta in update.deltas for token in delta.token_ids]
    assert results == [greedy_tokens(model, prompt, 8) for prompt in prompts]
    assert llm.stats().num_steps > 0
    assert_pool_is_whole(llm)


def test_updates_of_several_choices_that_are_read_late_lose_nothing(llm: LLM) -> None:
    """The choices end at different steps, all of them before the stream is read."""
    (whole,) = llm.generate([5, 6, 7, 8], greedy(30, ignore_eos=True))
    stops = [whole.outputs[0].text[12:14]]
    params = SamplingParams(n=3, seed=3, max_tokens=30, ignore_eos=True, stop=stops, logit_bias={9: 2.0})
    stream = llm.stream([5, 6, 7, 8], params)
    llm.generate([[9, 9]], greedy(60, ignore_eos=True))
    texts = ["", "", ""]
    for update in stream:
        for delta in update.deltas:
            texts[delta.index] += delta.text
    assert update.finished
    assert texts == [choice.text for choice in update.output.outputs]


def test_leaving_a_stream_aborts_its_request_and_keeps_its_prefix(llm: LLM) -> None:
    prompt = random_prompt(random.Random(77), 50)
    stream = llm.stream(prompt, greedy(100, ignore_eos=True))
    for _ in range(3):
        next(stream)
    stream.close()
    stream.close()
    assert list(stream) == []
    (output,) = llm.generate(prompt, greedy(2))
    assert output.num_cached_tokens == 48
    unstarted = llm.stream(prompt, greedy(100))
    del unstarted
    llm.generate([5], greedy(1))
    assert_pool_is_whole(llm)


def test_urgent_requests_finish_first(directory: Path) -> None:
    with LLM(str(directory), max_num_seqs=1, num_pages=32) as llm:
        outputs = llm.generate([[5, 6], [7, 8], [9, 10]], greedy(4, ignore_eos=True), priority=[2, 1, 0])
        finished = [output.metrics.finished_time for output in outputs]
        assert finished == sorted(finished, reverse=True)


def test_metrics_are_consistent(llm: LLM) -> None:
    (output,) = llm.generate([[5, 6, 7]], greedy(5, ignore_eos=True))
    metrics = output.metrics
    assert metrics.queue_time >= 0
    assert metrics.time_to_first_token >= metrics.queue_time
    assert metrics.time_per_output_token > 0
    assert metrics.num_generated_tokens == 5
    assert metrics.finished_time == metrics.last_token_time
