"""FP8 keys and values through the whole engine, in FP32: the tokens of transformers with such a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.tiny_families import make_tiny_model
from tests.helpers.tiny_models import save_tiny_llama
from tests.models.test_family_generation import NUM_TOKENS, PAGE_SIZE, PREFIX_LEN, ragged_prompts
from tiny_vllm import LLM, RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
TWICE = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, n=2)
# Plain, soft caps with windows, sinks with windows and experts, norms of heads and over all heads.
CASES = ["llama", "gemma2", "gpt-oss", "qwen3", "olmo2"]


def as_stored(x: Tensor) -> Tensor:
    """x [..., D] FP32 rounded to FP8, by arithmetic alone: three bits after the first, down to 2^-9."""
    scale = (x.abs().amax(-1, keepdim=True) / 448).bfloat16().float()
    scaled = x / scale
    _, exponent = torch.frexp(scaled)
    step = torch.exp2((exponent - 4).clamp(min=-9).float())
    return (scaled / step).round() * step * scale


@torch.inference_mode()
def logits_over_fp8(model: Any, tokens: list[int]) -> Tensor:
    """[tokens, vocab], every token attending to what a cache in FP8 holds of all of them."""
    from transformers import DynamicCache

    class Fp8DynamicCache(DynamicCache):
        def update(self, keys: Tensor, values: Tensor, *args: Any, **options: Any) -> Any:
            return super().update(as_stored(keys), as_stored(values), *args, **options)

    return model(torch.tensor([tokens]), cache=Fp8DynamicCache()).logits[0].float()


def assert_greedy(model: Any, output: RequestOutput) -> None:
    assert output.prompt_token_ids is not None
    for choice in output.outputs:
        assert len(choice.token_ids) == NUM_TOKENS
        logits = logits_over_fp8(model, [*output.prompt_token_ids, *choice.token_ids[:-1]])
        assert choice.token_ids == logits[len(output.prompt_token_ids) - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("case", CASES)
def test_chunks_hits_preemption_and_company_change_no_token(case: str, tmp_path: Path) -> None:
    model = make_tiny_model(case)
    save_tiny_llama(tmp_path, model)
    prompts = ragged_prompts()
    # Five sequences of up to 89 tokens need over 60 pages beside the shared prefix: one must be preempted.
    with LLM(
        str(tmp_path),
        kv_cache_dtype="fp8",
        page_size=PAGE_SIZE,
        num_pages=50,
        max_num_seqs=5,
        max_model_len=128,
        max_num_batched_tokens=13,
        prefill_policy="mixed",
    ) as llm:
        outputs = llm.generate(prompts, [GREEDY, GREEDY, GREEDY, TWICE])
        assert llm.stats().num_preemptions > 0
        (again,) = llm.generate([prompts[0]], GREEDY)
        assert again.num_cached_tokens == PREFIX_LEN
    for output in [*outputs, again]:
        assert_greedy(model, output)
    assert len(outputs[-1].outputs) == 2
    with LLM(
        str(tmp_path), kv_cache_dtype="fp8_e4m3", page_size=16, max_model_len=128, num_pages=8, max_num_seqs=1
    ) as llm:
        for output, prompt in zip(outputs, prompts, strict=True):
            (alone,) = llm.generate([prompt], GREEDY)
            assert alone.num_cached_tokens <= PREFIX_LEN
            assert all(choice.token_ids == alone.outputs[0].token_ids for choice in output.outputs)


def test_the_cache_really_is_in_fp8(tmp_path: Path) -> None:
    """Otherwise the oracle above would show nothing: its tokens differ from those of an exact cache."""
    model = make_tiny_model("llama")
    save_tiny_llama(tmp_path, model)
    tokens = []
    for kv_cache_dtype in ("auto", "fp8"):
        with LLM(str(tmp_path), kv_cache_dtype=kv_cache_dtype, num_pages=32, max_model_len=128) as llm:
            tokens.append([output.outputs[0].token_ids for output in llm.generate(ragged_prompts(), GREEDY)])
    assert tokens[0] != tokens[1]
