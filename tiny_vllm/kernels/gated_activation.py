"""Activations of gated MLPs beyond SiLU: y = f(gate) * g(up).

    gelu_tanh         f(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))),  g(u) = u
    clamped_swiglu    f(x) = x sigmoid(1.702 x) for x cut off above 7,  g(u) = u + 1 for u within +-7

gate_up [T, 2I] (columns gate then up) -> y [T, I] of the same type; FP32 in between, rounded once. Moves
3 * T * I values: memory-bound. Sources: Hendrycks and Gimpel 2016, arXiv 1606.08415; the reference code of
gpt-oss. SiLU, the common case, has a kernel of its own (silu_and_mul.py). `activate` is what kernels compute
that end a product with its activation.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_vllm.kernels.silu_and_mul import silu_and_mul
from tiny_vllm.kernels.triton_support import jit, tl

SWIGLU_SLOPE = 1.702
SWIGLU_LIMIT = 7.0


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2I] -> [T, I]."""
    gate, up = gate_up.float().chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2I] -> [T, I]."""
    gate, up = gate_up.float().chunk(2, -1)
    gate = gate.clamp(max=SWIGLU_LIMIT)
    up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (gate * torch.sigmoid(SWIGLU_SLOPE * gate) * (up + 1)).to(gate_up.dtype)


def activate_ref(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [T, 2I] -> [T, I]. activation: of a ModelSpec."""
    operators = dict(silu=silu_and_mul, gelu_tanh=gelu_tanh_and_mul, clamped_swiglu=clamped_swiglu)
    return operators[activation](gate_up)


@jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    """FP32 gate and up of one shape."""
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate)) * up
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), with 2 sqrt(2 / pi) = 1.5957691216.
        return gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))) * up
    else:
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
