"""The whole engine on the CPU, planning ahead: against transformers and against planning step by step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.oracle import greedy_tokens
from tests.helpers.tiny_models import TURN_END_ID, VOCAB_SIZE, make_tiny_llama, save_tiny_llama
from tiny_vllm import LLM, RequestOutput, SamplingParams

EOS_IDS = (1, TURN_END_ID)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_tiny_llama()


@pytest.fixture(scope="module")
def directory(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), model)


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(str(directory), async_scheduling=True, max_num_seqs=4, num_pages=64) as llm:
        yield llm


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(4, 320) for _ in range(length)]


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def greedy(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": count, **options})


def assert_pool_is_whole(llm: LLM) -> None:
    stats = llm.stats()
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
    assert (stats.num_running, stats.num_waiting) == (0, 0)


def test_a_cpu_plans_step_by_step_unless_asked(directory: Path, llm: LLM) -> None:
    with LLM(str(directory), num_pages=8) as plain:
        assert plain.config.async_scheduling is False
        assert plain._live_engine().num_steps_ahead == 0
    assert llm.config.async_scheduling is True
    assert llm._live_engine().num_steps_ahead == 1


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("policy", ["exclusive", "mixed"])
def test_random_load_equals_solo_runs(model: Any, directory: Path, policy: str, ahead: int) -> None:
    """Shared prefixes, choices, stop tokens, priorities and a small pool; every output as if it ran alone."""
    rng = random.Random(2)
    prefixes = [random_prompt(rng, 40) for _ in range(3)]
    prompts = [
        rng.choice(prefixes)[: rng.randrange(40)] + random_prompt(rng, rng.randrange(1, 9)) for _ in range(40)
    ]
    params = [greedy(rng.randrange(1, 20), n=rng.choice([1, 1, 2])) for _ in prompts]
    with LLM(
        str(directory),
        async_scheduling=True,
        page_size=4,
        num_pages=36,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        prefill_policy=policy,
    ) as llm:
        llm._live_engine().num_steps_ahead = ahead
        outputs = llm.generate(prompts, params, priority=[rng.randrange(3) for _ in prompts])
        assert llm.stats().num_preemptions > 0
        assert_pool_is_whole(llm)
    for prompt, sampling, output in zip(prompts, params, outputs, strict=True):
        expected = greedy_tokens(model, prompt, sampling.max_tokens, EOS_IDS)
        assert [choice.token_ids for choice in output.outputs] == [expected] * sampling.n


SAMPLED = (
    SamplingParams(seed=1, max_tokens=14, ignore_eos=True),
    SamplingParams(seed=2, max_tokens=9, temperature=2.0, top_k=20, top_p=0.8),
    SamplingParams(seed=3, max_tokens=12, min_p=0.05, repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(seed=4, max_tokens=11, presence_penalty=1.0, frequency_penalty=0.5, n=2),
    SamplingParams(temperature=0, max_tokens=10, logit_bias={7: 3.0, 9: -100.0}, min_tokens=8),
    SamplingParams(seed=5, max_tokens=8, allowed_token_ids=[5, 6, 7, 8, 9]),
    SamplingParams(seed=6, max_tokens=8, logprobs=2),
    SamplingParams(seed=7, max_tokens=3, prompt_logprobs=1),
    SamplingParams(temperature=0, max_tokens=30, stop_token_ids=list(range(4, 90))),
    SamplingParams(seed=8, max_tokens=20, bad_words=["e", "the", "qu"], ignore_eos=True),
)


def test_every_sampling_parameter_gives_the_tokens_of_planning_step_by_step(directory: Path) -> None:
    rng = random.Random(3)
    params = [*SAMPLED, *SAMPLED]
    prompts = [random_prompt(rng, rng.randrange(2, 40)) for _ in params]
    runs = []
    for is_async in (False, True):
        with LLM(str(directory), async_scheduling=is_async, page_size=4, num_pages=60, max_num_seqs=6) as llm:
            outputs = llm.generate(prompts, params)
            assert_pool_is_whole(llm)
            runs.append(
                [
                    (choice.token_ids, choice.finish_reason, choice.stop_reason, choice.text)
                    for output in outputs
                    for choice in output.outputs
                ]
            )
    assert runs[0] == runs[1]


def test_streams_opened_and_left_at_any_moment_equal_generate(model: Any, llm: LLM) -> None:
    rng = random.Random(4)
    prompts = [random_prompt(rng, 5 + number) for number in range(9)]
    results: list[list[int]] = [[] for _ in prompts]
    streams: dict[int, Any] = {}
    left: set[int] = set()
    for number, prompt in enumerate(prompts):
        streams[number] = llm.stream(prompt, greedy(8, ignore_eos=True))
        for other in list(streams):
            update = next(streams[other], None)
            if update is None:
                del streams[other]
                continue
            results[other] += [token for delta in update.deltas for token in delta.token_ids]
            if other % 4 == 1 and len(results[other]) >= 3:
                streams.pop(other).close()
                left.add(other)
    for number, stream in streams.items():
        for update in stream:
            results[number] += [token for delta in update.deltas for token in delta.token_ids]
    assert left == {1, 5}
    for number, prompt in enumerate(prompts):
        expected = greedy_tokens(model, prompt, 8)
        assert results[number] == (expected[: len(results[number])] if number in left else expected)
    llm.generate([[5]], greedy(1))
    assert_pool_is_whole(llm)


def test_a_stop_string_cuts_the_text_where_it_did(directory: Path, llm: LLM) -> None:
    prompt = [5, 6, 7, 8]
    (whole,) = llm.generate(prompt, greedy(40, ignore_eos=True))
    stop = whole.outputs[0].text[9:15]
    params = greedy(40, ignore_eos=True, stop=[stop])
    with LLM(str(directory), num_pages=32) as plain:
        (expected,) = plain.generate(prompt, params)
    (actual,) = llm.generate(prompt, params)
    assert actual.outputs[0].text == expected.outputs[0].text
    assert actual.outputs[0].token_ids == expected.outputs[0].token_ids
    assert actual.outputs[0].finish_reason == "stop"
    assert_pool_is_whole(llm)


def test_nan_logits_fail_only_their_own_request(model: Any, tmp_path: Path) -> None:
    poisoned = make_tiny_llama()
    with torch.no_grad():
        poisoned.model.embed_tokens.weight[9] = float("nan")
    directory = save_tiny_llama(tmp_path / "poisoned", poisoned)
    with LLM(str(directory), async_scheduling=True, num_pages=32, page_size=4) as llm:
        bad, good = llm.generate([[5, 9, 6, 7, 8, 10], [5, 6, 7]], greedy(6, ignore_eos=True))
        assert bad.outputs[0].finish_reason == "error" and bad.outputs[0].token_ids == []
        assert tokens_of([good]) == [[greedy_tokens(model, [5, 6, 7], 6)]]
        assert_pool_is_whole(llm)


def test_log_probabilities_need_no_step_too_many(llm: LLM) -> None:
    """Steps that the host waits for are not planned ahead of: an end by a token is seen at once."""
    steps = llm.stats().num_steps
    (output,) = llm.generate([[5, 6, 7]], greedy(30, logprobs=1, stop_token_ids=list(range(VOCAB_SIZE))))
    assert len(output.outputs[0].token_ids) == 1
    assert llm.stats().num_steps == steps + 1
