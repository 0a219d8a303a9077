"""The gated MLP of one layer: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from torch import Tensor

from tiny_vllm.kernels.linear import Linear, can_pack
from tiny_vllm.kernels.silu_and_mul import silu_and_mul
from tiny_vllm.models.weights import LayerWeights


class MLP:
    """hidden [T, H] (normed) and residual [T, H] -> residual + MLP [T, H].

    One product computes gate and up together. Packed CPU matrices are the exception: two products there, so
    that SiLU and the multiplication run on the accumulators instead of in passes of their own.
    """

    def __init__(self, weights: LayerWeights) -> None:
        self.gate_up: Linear | None = None
        if can_pack(weights.gate_up):
            gate, up = weights.gate_up.chunk(2)
            gate_bias, up_bias = (
                (None, None) if weights.gate_up_bias is None else weights.gate_up_bias.chunk(2)
            )
            self.gate, self.up = Linear(gate, gate_bias), Linear(up, up_bias)
        else:
            self.gate_up = Linear(weights.gate_up, weights.gate_up_bias)
        self.down = Linear(weights.down, weights.down_bias)

    def __call__(self, hidden: Tensor, residual: Tensor) -> Tensor:
        if self.gate_up is None:
            product = self.up.multiply(hidden, self.gate.silu(hidden))
        else:
            product = silu_and_mul(self.gate_up(hidden))
        return self.down.add(product, residual)
