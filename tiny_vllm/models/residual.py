"""How a layer's attention or MLP joins the residual stream."""

from __future__ import annotations

from torch import Tensor

from tiny_vllm.kernels.finish_rows import finish_rows
from tiny_vllm.kernels.rms_norm import rms_norm
from tiny_vllm.kernels.triton_support import runs_triton
from tiny_vllm.models.spec import ModelSpec


class ResidualJoin:
    """residual + multiplier * norm(branch), rounded to the model's type at each operation; on a GPU it is one
    kernel, and the sum alone is rounded.

    norm: weight [H], or None for no norm on this branch's output.
    """

    def __init__(self, spec: ModelSpec, norm: Tensor | None) -> None:
        self.norm = None if norm is None else norm.float() + spec.norm_offset
        self.eps = spec.rms_norm_eps
        self.multiplier = spec.residual_multiplier
        self.is_sum = norm is None and self.multiplier == 1.0
        """Nothing but a sum, which the product before it can take over."""

    def __call__(self, branch: Tensor, residual: Tensor) -> Tensor:
        """branch, residual: [T, H] -> [T, H]."""
        if runs_triton(branch) and branch.numel():
            return self.add_parts(branch.contiguous().unsqueeze(0), residual)
        if self.norm is not None:
            branch = rms_norm(branch, self.norm, self.eps)
        if self.multiplier != 1.0:
            branch = branch * self.multiplier
        return residual + branch

    def add_parts(self, parts: Tensor, residual: Tensor) -> Tensor:
        """The same of a branch given as parts [S, T, H], FP32 or of residual's type: their sum."""
        y, _ = finish_rows(parts, residual, None, self.eps, branch_norm=self.norm, multiplier=self.multiplier)
        return y
