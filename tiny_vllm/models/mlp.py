"""The gated MLP of one layer: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from torch import Tensor

from tiny_vllm.kernels.linear import Linear
from tiny_vllm.kernels.silu_and_mul import silu_and_mul
from tiny_vllm.models.weights import LayerWeights


class MLP:
    """hidden [T, H] (normed) and residual [T, H] -> residual + MLP [T, H]."""

    def __init__(self, weights: LayerWeights) -> None:
        self.gate_up = Linear(weights.gate_up, weights.gate_up_bias)
        self.down = Linear(weights.down, weights.down_bias)

    def __call__(self, hidden: Tensor, residual: Tensor) -> Tensor:
        return self.down.add(silu_and_mul(self.gate_up(hidden)), residual)
