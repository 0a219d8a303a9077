"""The gated MLP of one layer: down(activation(gate(x)) * up(x))."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from tiny_vllm.kernels.gated_activation import clamped_swiglu, gelu_tanh_and_mul
from tiny_vllm.kernels.linear import Linear
from tiny_vllm.kernels.silu_and_mul import silu_and_mul
from tiny_vllm.models.residual import ResidualJoin
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.models.weights import LayerWeights

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_and_mul,
    "gelu_tanh": gelu_tanh_and_mul,
    "clamped_swiglu": clamped_swiglu,
}


class MLP:
    """hidden [T, H] (normed as the spec says) and residual [T, H] -> residual + MLP [T, H]."""

    def __init__(self, spec: ModelSpec, weights: LayerWeights, join: ResidualJoin) -> None:
        self.gate_up = Linear(weights.gate_up, weights.gate_up_bias)
        self.down = Linear(weights.down, weights.down_bias)
        self.activation = ACTIVATIONS[spec.activation]
        self.join = join

    def __call__(self, hidden: Tensor, residual: Tensor) -> Tensor:
        activated = self.activation(self.gate_up(hidden))
        if self.join.is_sum:
            return self.down.add(activated, residual)
        return self.join(self.down(activated), residual)
