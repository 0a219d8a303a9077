"""The bundled real model in FP32 against transformers with the same dequantised weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.helpers.bundled import PROMPTS, load_with_transformers
from tests.helpers.oracle import all_logits
from tiny_vllm import LLM, SamplingParams

# FP32 sums of up to 1536 terms in another order, 30 layers deep: 60 roundings of the residual stream at a
# relative 2^-24 x sqrt(1536) each, on logits of size about 20.
LOGPROB_TOLERANCE = 60 * 2**-24 * 1536**0.5 * 20


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", max_num_seqs=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle() -> Any:
    return load_with_transformers()


def compare(llm: LLM, oracle: Any, prompts: tuple[str, ...], count: int) -> float:
    """Assert equal greedy tokens; return the largest difference of the chosen tokens' log-probabilities.

    The oracle's greedy tokens are read off one pass over prompt plus output: if every token is the arg-max
    given those before it, the sequence is the greedy one.
    """
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0)
    largest = 0.0
    for output in llm.generate(list(prompts), params):
        prompt, choice = output.prompt_token_ids, output.outputs[0]
        rows = all_logits(oracle, [*prompt, *choice.token_ids])[len(prompt) - 1 : -1]
        assert choice.token_ids == rows.argmax(-1).tolist(), f"{output.prompt!r} continues differently"
        expected = torch.log_softmax(rows, -1)
        for row, token, entry in zip(expected, choice.token_ids, choice.logprobs or [], strict=True):
            largest = max(largest, abs(float(row[token]) - entry[token].logprob))
    return largest


def test_greedy_tokens_equal_transformers(llm: LLM, oracle: Any) -> None:
    assert compare(llm, oracle, PROMPTS[:4], 24) < LOGPROB_TOLERANCE


@pytest.mark.slow
def test_twenty_prompts_of_64_greedy_tokens_equal_transformers(
    llm: LLM, oracle: Any, record_property: Any
) -> None:
    largest = compare(llm, oracle, PROMPTS, 64)
    record_property("largest_logprob_difference", largest)
    print(f"largest difference of log-probabilities: {largest:.2e}")
    assert largest < LOGPROB_TOLERANCE


def test_the_text_is_sensible(llm: LLM) -> None:
    (output,) = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}],
        SamplingParams(temperature=0, max_tokens=20),
    )
    assert output.outputs[0].text == "The capital of France is Paris."
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
