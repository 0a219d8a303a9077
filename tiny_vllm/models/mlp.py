"""The gated MLP of one layer: down(activation(gate(x)) * up(x))."""

from __future__ import annotations

from torch import Tensor

from tiny_vllm.kernels.gated_activation import gated_activation
from tiny_vllm.kernels.hopper_linear import launch as hopper_linear
from tiny_vllm.kernels.hopper_prefill.launch import is_hopper
from tiny_vllm.kernels.linear import Linear
from tiny_vllm.models.residual import ResidualJoin
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.models.weights import LayerWeights


class MLP:
    """hidden [T, H] (normed as the spec says) and residual [T, H] -> residual + MLP [T, H].

    Gate and up of many rows with SiLU are one kernel on Hopper GPUs, see `hopper_linear`."""

    def __init__(self, spec: ModelSpec, weights: LayerWeights, join: ResidualJoin) -> None:
        self.gate_up = Linear(weights.gate_up, weights.gate_up_bias)
        self.down = Linear(weights.down, weights.down_bias)
        self.activation = spec.activation
        self.join = join
        self.may_be_one_kernel = (
            spec.activation == "silu" and weights.gate_up_bias is None and is_hopper(weights.gate_up.device)
        )

    def __call__(self, hidden: Tensor, residual: Tensor) -> Tensor:
        activated = self._multiply_gated(hidden) if self.may_be_one_kernel else None
        if activated is None:
            activated = gated_activation(self.gate_up(hidden), self.activation)
        if self.join.is_sum:
            return self.down.add(activated, residual)
        return self.join(self.down(activated), residual)

    def _multiply_gated(self, hidden: Tensor) -> Tensor | None:
        """[T, H] -> [T, I] as one kernel; None where two are as fast, or it cannot be had."""
        weight = self.gate_up.weight
        if len(hidden) < hopper_linear.MIN_ROWS or hopper_linear.obstacle(hidden, weight) is not None:
            return None
        return hopper_linear.multiply_gated(hidden, weight)
