"""RMSNorm against FP64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tiny_vllm.kernels.rms_norm import rms_norm

# Relative. FP32: a sum of squares and four operations, some ten roundings. Others: the one at the end.
TOLERANCES = {torch.float32: 10 * 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-10}
CASES = {
    "typical": (16, 576),
    "irregular": (7, 129),
    "one_row": (1, 64),
    "empty": (0, 64),
    "largest": (512, 4096),
}
EPS = 1e-5


def oracle(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_formula_with_one_rounding(case: str, dtype: torch.dtype) -> None:
    num_tokens, hidden_size = CASES[case]
    x = torch.randn(num_tokens, hidden_size).to(dtype)
    weight = torch.rand(hidden_size).to(dtype)
    actual = rms_norm(x, weight.float(), EPS)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), oracle(x, weight), rtol=TOLERANCES[dtype], atol=1e-7)


def test_leaves_its_input_alone() -> None:
    x = torch.randn(3, 8)
    before = x.clone()
    rms_norm(x, torch.ones(8), EPS)
    assert torch.equal(x, before)


@pytest.mark.parametrize("size", [1e-30, 0.0, 1e15])
def test_tiny_zero_and_huge_rows_stay_finite(size: float) -> None:
    x = torch.full((2, 16), size)
    torch.testing.assert_close(
        rms_norm(x, torch.ones(16), EPS).double(), oracle(x, torch.ones(16)), rtol=1e-6, atol=0
    )
