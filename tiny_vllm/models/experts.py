"""The mixture of experts of one layer: for each token the weighted sum of a few gated MLPs.

    p = softmax(router x);  y = sum of w_e * expert_e(x) over the largest p_e; w = p, or p summing to 1

Tokens are sorted by expert, so that an expert is one pair of products over all its tokens; sums over experts
are FP32 and rounded once. On a GPU all experts are two grouped products (kernels/expert_products.py), and the
host does not wait; elsewhere the host reads how many tokens each expert has.
Sources: Shazeer et al. 2017, arXiv 1701.06538; Jiang et al. 2024, arXiv 2401.04088.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tiny_vllm.kernels.expert_products import ExpertMatrices, expert_parts
from tiny_vllm.kernels.gated_activation import gated_activation
from tiny_vllm.kernels.linear import Linear
from tiny_vllm.kernels.pick_experts import pick_experts
from tiny_vllm.kernels.triton_support import runs_triton
from tiny_vllm.models.residual import ResidualJoin
from tiny_vllm.models.spec import ExpertsSpec, ModelSpec
from tiny_vllm.models.weights import LayerWeights

MAX_PICKS = 131072
"""Picks of experts computed at a time on a GPU, where each needs an output of its own in FP32. More tokens
per expert fill tiles better and read its matrices less often: see gpu_expert_prompts.py."""


def route(logits: Tensor, spec: ExpertsSpec) -> tuple[Tensor, Tensor]:
    """Router logits [T, experts] -> the picked experts of each token and their FP32 weights, [T, num_active].

    Probabilities are FP32, and equal ones favour the lower expert, so that a row alone decides its experts.
    """
    return pick_experts(logits.unsqueeze(0), None, spec.num_active, spec.normalize)


class Experts:
    """hidden [T, H] (normed) and residual [T, H] -> residual + mixture [T, H]."""

    def __init__(self, spec: ModelSpec, weights: LayerWeights, join: ResidualJoin) -> None:
        assert spec.experts is not None and weights.router is not None
        self.spec = spec.experts
        self.activation = spec.activation
        self.join = join
        self.router = Linear(weights.router, weights.router_bias)
        self.matrices = self.gate_up = self.down = None
        if runs_triton(weights.down):
            self.matrices = ExpertMatrices(
                weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias
            )
        else:
            self.gate_up = _linears(weights.gate_up, weights.gate_up_bias)
            self.down = _linears(weights.down, weights.down_bias)

    def __call__(self, hidden: Tensor, residual: Tensor) -> Tensor:
        if self.matrices is None:
            return self.join(self._one_by_one(hidden), residual)
        num_rows = MAX_PICKS // self.spec.num_active
        pairs = zip(hidden.split(num_rows), residual.split(num_rows), strict=True)
        joined = [self._grouped(*pair, self.matrices) for pair in pairs]
        return joined[0] if len(joined) == 1 else torch.cat(joined)

    def _grouped(self, hidden: Tensor, residual: Tensor, matrices: ExpertMatrices) -> Tensor:
        experts, weights = route(self.router(hidden), self.spec)
        parts = expert_parts(hidden, experts, weights, matrices, self.activation)
        return self.join.add_parts(parts, residual)

    def _one_by_one(self, hidden: Tensor) -> Tensor:
        assert self.gate_up is not None and self.down is not None
        experts, weights = route(self.router(hidden), self.spec)
        order = experts.flatten().argsort(stable=True)
        tokens = order // self.spec.num_active
        scale = weights.flatten()[order].unsqueeze(1)
        mixture = torch.zeros_like(hidden, dtype=torch.float32)
        start = 0
        counts = experts.flatten().bincount(minlength=self.spec.num_experts).tolist()
        for expert, count in enumerate(counts):
            if count:
                rows = tokens[start : start + count]
                activated = gated_activation(self.gate_up[expert](hidden[rows]), self.activation)
                outputs = self.down[expert](activated).float() * scale[start : start + count]
                mixture.index_add_(0, rows, outputs)
                start += count
        return mixture.to(hidden.dtype)


def _linears(matrices: Tensor, biases: Tensor | None) -> list[Linear]:
    """One layer of each expert, from [experts, out, in] and [experts, out]."""
    rows = [None] * len(matrices) if biases is None else list(biases)
    return [Linear(matrix, bias) for matrix, bias in zip(matrices, rows, strict=True)]
