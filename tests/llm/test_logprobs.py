"""Log-probabilities of outputs and prompts are those of transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.llm_checks import greedy, random_prompt
from tests.helpers.oracle import all_logits
from tests.helpers.tiny_models import VOCAB_SIZE
from tiny_vllm import LLM, RequestError, SamplingParams

# Largest difference of log-probabilities: FP32 sums of at most 96 terms of size ~10, over two layers, in
# another order: about 10 x sqrt(96) x 2^-24 per product, and a few products deep.
LOGPROB_TOLERANCE = 1e-4


@pytest.mark.parametrize("budget", [4, 7, 64])
def test_prompt_logprobs_equal_transformers_with_cold_and_warm_prefix(
    model: Any, directory: Path, budget: int
) -> None:
    prompt = random_prompt(random.Random(4), 37)
    expected = torch.log_softmax(all_logits(model, prompt), dim=-1)
    params = SamplingParams(max_tokens=0, prompt_logprobs=3)
    with LLM(str(directory), page_size=4, max_num_batched_tokens=budget, max_num_seqs=2) as llm:
        for _ in range(3):
            (output,) = llm.generate(prompt, params)
            scores = output.prompt_logprobs
            assert scores is not None and scores[0] is None and len(scores) == len(prompt)
            assert output.outputs[0].token_ids == [] and output.outputs[0].finish_reason == "length"
            for position, entry in enumerate(scores[1:], start=1):
                row = expected[position - 1]
                top = row.topk(3)
                assert set(entry) == {prompt[position], *top.indices.tolist()}
                for token, logprob in entry.items():
                    assert logprob.logprob == pytest.approx(float(row[token]), abs=LOGPROB_TOLERANCE)
                    assert logprob.rank == 1 + int((row > row[token]).sum())
            llm.generate(prompt, greedy(3))  # warms the cache without logprobs


@pytest.mark.parametrize("temperature", [0.0, 0.1, 1.0, 2.0])
def test_logprobs_are_the_models_whatever_the_sampling_settings(
    model: Any, llm: LLM, temperature: float
) -> None:
    prompt = random_prompt(random.Random(5), 9)
    params = SamplingParams(
        temperature=temperature,
        top_p=0.5,
        logprobs=2,
        max_tokens=6,
        seed=1,
        ignore_eos=True,
        presence_penalty=1.0,
    )
    (output,) = llm.generate(prompt, params)
    choice = output.outputs[0]
    rows = torch.log_softmax(all_logits(model, [*prompt, *choice.token_ids]), dim=-1)[len(prompt) - 1 :]
    total = 0.0
    assert choice.logprobs is not None
    for row, token, entry in zip(rows, choice.token_ids, choice.logprobs, strict=False):
        assert entry[token].logprob == pytest.approx(float(row[token]), abs=LOGPROB_TOLERANCE)
        assert set(row.topk(2).indices.tolist()) <= set(entry)
        total += entry[token].logprob
    assert choice.cumulative_logprob == pytest.approx(total)


def test_all_logprobs_of_the_vocabulary_sum_to_one(llm: LLM) -> None:
    (output,) = llm.generate([5, 6], SamplingParams(logprobs=-1, max_tokens=1))
    entry = output.outputs[0].logprobs[0]
    assert len(entry) == VOCAB_SIZE
    assert sum(torch.tensor([value.logprob for value in entry.values()]).exp()) == pytest.approx(1, abs=1e-5)


def test_logprobs_above_the_cap_are_refused(directory: Path) -> None:
    with LLM(str(directory), num_pages=8) as llm:
        for value in (21, -1):
            with pytest.raises(RequestError, match="20"):
                llm.generate([5], SamplingParams(logprobs=value))
            with pytest.raises(RequestError, match="20"):
                llm.generate([5], SamplingParams(prompt_logprobs=value))
