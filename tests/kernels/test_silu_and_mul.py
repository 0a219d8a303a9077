"""SiLU times up against FP64."""

from __future__ import annotations

import pytest
import torch

from tiny_vllm.kernels.silu_and_mul import silu_and_mul

# Relative. FP32: exp, sum, division, two products. Others: the one rounding at the end.
TOLERANCES = {torch.float32: 10 * 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-10}
CASES = {"typical": (16, 1536), "irregular": (5, 37), "one_row": (1, 64), "empty": (0, 64)}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_formula_with_one_rounding(case: str, dtype: torch.dtype) -> None:
    num_tokens, size = CASES[case]
    gate_up = (3 * torch.randn(num_tokens, 2 * size)).to(dtype)
    before = gate_up.clone()
    gate, up = gate_up.double().chunk(2, -1)
    actual = silu_and_mul(gate_up)
    assert actual.dtype == dtype
    assert torch.equal(gate_up, before)
    # Products below FP16's normal range lose relative precision: its step there is 2^-24.
    torch.testing.assert_close(
        actual.double(), gate * gate.sigmoid() * up, rtol=TOLERANCES[dtype], atol=2**-24
    )


def test_far_negative_and_positive_gates_do_not_overflow() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, 2.0, 2.0, 2.0]])
    assert silu_and_mul(gate_up).tolist() == [[0.0, 2e4, 0.0]]
