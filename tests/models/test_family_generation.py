"""Every family through the whole engine, in FP32: whatever the schedule, the tokens of transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.oracle import all_logits
from tests.helpers.tiny_families import CASES, make_tiny_model
from tests.helpers.tiny_models import save_tiny_llama
from tiny_vllm import LLM, ConfigError, RequestOutput, SamplingParams

NUM_TOKENS = 32
PREFIX_LEN = 40
"""Beyond every window and every original length, so that a prefix hit and a chunk start outside them."""
PAGE_SIZE = 4

WINDOWS_ALONE = ("mistral", "mixtral with window", "phi3 with window")
"""Cases in which every layer has a window."""

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def ragged_prompts() -> list[list[int]]:
    rng = random.Random(0)
    prefix = [rng.randrange(4, 320) for _ in range(PREFIX_LEN)]
    return [prefix + [rng.randrange(4, 320) for _ in range(length)] for length in (1, 3, 9, 17)]


def assert_greedy(model: Any, output: RequestOutput) -> None:
    """Each token is the one that transformers prefers after all before it: then so is a greedy run."""
    assert output.prompt_token_ids is not None
    for choice in output.outputs:
        assert len(choice.token_ids) == NUM_TOKENS
        tokens = [*output.prompt_token_ids, *choice.token_ids[:-1]]
        expected = all_logits(model, tokens)[len(output.prompt_token_ids) - 1 :].argmax(-1).tolist()
        assert choice.token_ids == expected


@pytest.mark.parametrize("case", CASES)
def test_chunks_hits_preemption_and_choices_change_no_token(case: str, tmp_path: Path) -> None:
    model = make_tiny_model(case)
    save_tiny_llama(tmp_path, model)
    prompts = ragged_prompts()
    # Five sequences of up to 89 tokens need over 60 pages beside the shared prefix: one must be preempted.
    # Where all layers have windows of 4 pages, four that start with a page each and grow need 20 and more.
    windows_alone = case in WINDOWS_ALONE
    if windows_alone:
        prompts = [[5], [6], [7], [8], *prompts]
    with LLM(
        str(tmp_path),
        page_size=PAGE_SIZE,
        num_pages=18 if windows_alone else 50,
        max_num_seqs=5,
        max_model_len=128,
        max_num_batched_tokens=13,
        prefill_policy="mixed",
        fused_cpu_decode=False,
    ) as llm:
        twice = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, n=2)
        params = [GREEDY] * (len(prompts) - 1) + [twice]
        outputs = llm.generate(prompts, params)
        assert llm.stats().num_preemptions > 0
        llm.generate([prompts[-2]], SamplingParams(max_tokens=1))
        (again,) = llm.generate([prompts[-4]], GREEDY)
        assert again.num_cached_tokens == PREFIX_LEN
    for output in [*outputs, again]:
        assert_greedy(model, output)
    assert len(outputs[-1].outputs) == 2


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("case", WINDOWS_ALONE)
def test_models_of_windows_alone_outgrow_their_pool(
    case: str, async_scheduling: bool, tmp_path: Path
) -> None:
    """Two sequences of up to 89 tokens in a pool of 40: what slid out of the windows is used again."""
    model = make_tiny_model(case)
    save_tiny_llama(tmp_path, model)
    prompts = ragged_prompts()
    with LLM(
        str(tmp_path),
        page_size=PAGE_SIZE,
        num_pages=10,
        max_num_seqs=2,
        max_model_len=128,
        max_num_batched_tokens=13,
        async_scheduling=async_scheduling,
    ) as llm:
        outputs = llm.generate([prompts[0], prompts[-1]], GREEDY)
        assert llm.stats().num_free_pages + llm.stats().num_cached_pages == 10
    for output in outputs:
        assert_greedy(model, output)


@pytest.mark.parametrize("case", ["gemma2", "mistral", "qwen3", "mixtral", "granite", "smollm3", "olmo2"])
def test_the_fused_cpu_step_is_refused_where_it_lacks_the_traits(case: str, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, make_tiny_model(case))
    with pytest.raises(ConfigError, match="fused_cpu_decode is True, but the fused step does not compute"):
        LLM(str(tmp_path), num_pages=32, max_model_len=128, fused_cpu_decode=True)
    with LLM(str(tmp_path), num_pages=32, max_model_len=128) as llm:
        assert llm.config.fused_cpu_decode is False


@pytest.mark.parametrize("case", ["qwen2", "phi3", "phi3 longrope", "qwen2 yarn", "mistral without window"])
def test_the_fused_cpu_step_gives_the_same_tokens(case: str, tmp_path: Path) -> None:
    pytest.importorskip("numba", reason="compiles the fused step")
    model = make_tiny_model(case)
    save_tiny_llama(tmp_path, model)
    with LLM(str(tmp_path), num_pages=32, max_model_len=128, fused_cpu_decode=True) as llm:
        for output in llm.generate(ragged_prompts()[:2], GREEDY):
            assert_greedy(model, output)
