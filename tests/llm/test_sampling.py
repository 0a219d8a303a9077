"""What sampling parameters do to a choice, and that seeds hold."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.llm_checks import greedy, random_prompt, tokens_of
from tests.helpers.oracle import greedy_tokens
from tests.helpers.tiny_models import VOCAB_SIZE
from tiny_vllm import LLM, SamplingParams


def test_a_seeded_request_gives_the_same_tokens_in_any_company(directory: Path) -> None:
    rng = random.Random(3)
    prompt = random_prompt(rng, 21)
    others = [random_prompt(rng, rng.randrange(1, 30)) for _ in range(6)]
    seeded = SamplingParams(seed=1234, max_tokens=20, n=3, ignore_eos=True, top_p=0.9, top_k=50)
    free = SamplingParams(max_tokens=30, ignore_eos=True)
    runs = []
    for num_pages, company in ((64, []), (64, [free] * 6), (30, [seeded] * 6), (22, [greedy(25)] * 6)):
        with LLM(str(directory), page_size=4, num_pages=num_pages, max_num_seqs=5) as llm:
            outputs = llm.generate([*others[: len(company)], prompt], [*company, seeded])
            runs.append(tokens_of(outputs)[-1])
            if num_pages == 22:
                assert llm.stats().num_preemptions > 0
    assert all(run == runs[0] for run in runs)
    assert len({tuple(tokens) for tokens in runs[0]}) == 3, "choices of one request must differ"


def test_different_seeds_differ_and_unseeded_requests_repeat_from_run_to_run(directory: Path) -> None:
    runs = []
    for _ in range(2):
        with LLM(str(directory), seed=5) as llm:
            params = [SamplingParams(seed=1), SamplingParams(seed=2), SamplingParams(), SamplingParams()]
            runs.append(tokens_of(llm.generate([[5, 6, 7]] * 4, params)))
    assert runs[0] == runs[1]
    assert len({str(tokens) for tokens in runs[0]}) == 4


def test_bfloat16_decodes_do_not_depend_on_their_company(directory: Path) -> None:
    """With the fused step a row's result is the same in every batch, so seeds hold in 16 bits too."""
    pytest.importorskip("numba", reason="the fused step needs numba")
    rng = random.Random(9)
    prompt = random_prompt(rng, 20)
    params = SamplingParams(seed=5, max_tokens=40, ignore_eos=True)
    others = [random_prompt(rng, 15) for _ in range(11)]
    with LLM(str(directory), dtype="bfloat16", max_num_seqs=12, device="cpu") as llm:
        runs = [tokens_of(llm.generate([prompt, *others[:count]], params))[0] for count in (0, 3, 7, 8, 11)]
    assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize("temperature", [2**63, 2**64 - 1, 10**30, 1e308])
def test_enormous_temperatures_sample_and_hurt_nobody(model: Any, llm: LLM, temperature: float) -> None:
    running = llm.stream([5, 6, 7], greedy(8, ignore_eos=True))
    next(running)
    params = SamplingParams(temperature=temperature, max_tokens=3, ignore_eos=True)
    assert len(llm.generate([[5]], params)[0].outputs[0].token_ids) == 3
    for update in running:
        last = update
    assert last.output.outputs[0].token_ids == greedy_tokens(model, [5, 6, 7], 8)


def test_logit_bias_forces_and_forbids(llm: LLM) -> None:
    (plain,) = llm.generate([5, 6], greedy(1))
    best = plain.outputs[0].token_ids[0]
    (forbidden,) = llm.generate([5, 6], greedy(4, logit_bias={best: -100}, ignore_eos=True))
    assert best not in forbidden.outputs[0].token_ids
    # The last row of the embedding belongs to no token of the tokenizer, and may be chosen all the same.
    (forced,) = llm.generate([5, 6], greedy(3, logit_bias={VOCAB_SIZE - 1: 100}))
    assert forced.outputs[0].token_ids == [VOCAB_SIZE - 1] * 3
    assert forced.outputs[0].text == ""


@pytest.mark.parametrize("length", [1, 255])
@pytest.mark.parametrize("max_tokens", [None, 1, 10_000])
def test_output_is_clamped_to_the_context(llm: LLM, length: int, max_tokens: int | None) -> None:
    prompt = random_prompt(random.Random(6), length)
    (output,) = llm.generate(prompt, greedy(1, max_tokens=max_tokens, ignore_eos=True))
    expected = 256 - length if max_tokens is None else min(max_tokens, 256 - length)
    assert len(output.outputs[0].token_ids) == expected
    assert output.outputs[0].finish_reason == "length"
