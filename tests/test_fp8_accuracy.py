"""What FP8 keys and values do to the log-probabilities of the bundled real model, in FP32 otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.test_real_model_gpu import TEXT
from tiny_vllm import LLM, SamplingParams
from tiny_vllm.kernels import rope
from tiny_vllm.kernels.fp8_cache import Cache, write_rows

LARGEST_ERROR = 2**-4
"""Of a value of three mantissa bits after the first one, relative to the value."""


def logprobs(kv_cache_dtype: str) -> Tensor:
    """Of the tokens of the text, each after all before it."""
    with LLM(
        dtype="float32",
        kv_cache_dtype=kv_cache_dtype,
        fused_cpu_decode=False,
        max_model_len=512,
        max_num_batched_tokens=512,
        max_num_seqs=1,
    ) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
        (output,) = llm.generate([TEXT], params)
    assert output.prompt_logprobs is not None
    scores = [next(iter(score.values())).logprob for score in output.prompt_logprobs if score is not None]
    assert len(scores) > 100
    return torch.tensor(scores, dtype=torch.float64)


def test_it_costs_less_than_noise_of_its_largest_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stored value is off by at most a sixteenth of itself, the smallest aside. Errors that are
    spread evenly up to that have twice the variance of rounding (whose bound falls from 2^-4 to 2^-5
    between two powers of two): whatever they do to the log-probabilities, FP8 must do less. The mean of the
    differences, which is the change of the text's NLL per token, is no larger than that of their sizes."""
    exact, rounded = logprobs("auto"), logprobs("fp8")
    generator = torch.Generator().manual_seed(0)

    def write_noisy(cache: Cache, rows: Tensor, values: Tensor) -> None:
        noise = 2 * torch.rand(values.shape, generator=generator) - 1
        write_rows(cache, rows, values * (1 + LARGEST_ERROR * noise))

    monkeypatch.setattr(rope, "write_rows", write_noisy)
    noisy = logprobs("auto")
    error, bound = (float((scores - exact).abs().mean()) for scores in (rounded, noisy))
    print(f"mean difference of log-probabilities: FP8 {error:.4f}, noise {bound:.4f}")
    print(f"NLL per token: exact {-exact.mean():.5f}, FP8 {-rounded.mean():.5f}, noise {-noisy.mean():.5f}")
    assert 0 < error < bound
    assert abs(float((rounded - exact).mean())) < bound
