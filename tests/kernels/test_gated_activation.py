"""Activations of gated MLPs against FP64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tiny_vllm.kernels.gated_activation import gated_activation

# Relative. FP32: exp, sum, division, two products. Others: the one rounding at the end.
TOLERANCES = {torch.float32: 10 * 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-10}
CASES = {"typical": (16, 1536), "irregular": (5, 37), "one_row": (1, 64), "empty": (0, 64)}


def silu(gate: Tensor, up: Tensor) -> Tensor:
    return gate * gate.sigmoid() * up


def gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return gate / 2 * (1 + inner.tanh()) * up


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=7)
    return gate * (1.702 * gate).sigmoid() * (up.clamp(-7, 7) + 1)


FORMULAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": silu, "gelu_tanh": gelu_tanh, "clamped_swiglu": clamped_swiglu,
}  # fmt: skip


@pytest.mark.parametrize("activation", FORMULAS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_formula_with_one_rounding(case: str, dtype: torch.dtype, activation: str) -> None:
    num_tokens, size = CASES[case]
    gate_up = (5 * torch.randn(num_tokens, 2 * size)).to(dtype)
    before = gate_up.clone()
    gate, up = gate_up.double().chunk(2, -1)
    actual = gated_activation(gate_up, activation)
    assert actual.dtype == dtype
    assert torch.equal(gate_up, before)
    # Products below FP16's normal range lose relative precision: its step there is 2^-24. Where 1 + tanh
    # cancels, what is left is off by FP32's step at 1, times gate and up, as is up + 1 near -1.
    atol = 2**-24 if activation == "silu" else 2**-22 * 25
    torch.testing.assert_close(
        actual.double(), FORMULAS[activation](gate, up), rtol=TOLERANCES[dtype], atol=atol
    )


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        ("silu", [0.0, 2e4, 0.0]),
        ("gelu_tanh", [0.0, 2e4, 0.0]),
        ("clamped_swiglu", [0.0, 21 / (1 + math.exp(-7 * 1.702)), 0.0]),
    ],
)
def test_far_negative_and_positive_gates_do_not_overflow(activation: str, expected: list[float]) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, 2.0, 2.0, 2.0]])
    assert gated_activation(gate_up, activation).tolist() == [pytest.approx(expected)]
