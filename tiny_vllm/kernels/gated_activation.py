"""Activations of gated MLPs beyond SiLU: y = f(gate) * g(up).

    gelu_tanh         f(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))),  g(u) = u
    clamped_swiglu    f(x) = x sigmoid(1.702 x) for x cut off above 7,  g(u) = u + 1 for u within +-7

gate_up [T, 2I] (columns gate then up) -> y [T, I] of the same type; FP32 in between, rounded once. Moves
3 * T * I values: memory-bound. Sources: Hendrycks and Gimpel 2016, arXiv 1606.08415; the reference code of
gpt-oss. SiLU, the common case, has a kernel of its own (silu_and_mul.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
