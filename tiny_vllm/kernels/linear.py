"""Linear layer: y = x W^T + b, with the residual that follows it fused into the product.

x [T, in], W [out, in], b [out], y [T, out]; all of one type, FP32 accumulation, one rounding at the end.
Moves 2 * out * in bytes in BF16 for 2 * T * out * in FLOPs: memory-bound below some hundred rows, so a decode
step costs what reading the weights costs.

On the CPU the matrix is copied into oneDNN's blocked layout when the layer is built. Products then read it in
the order of their register tiles (BF16, one row, 3072 x 576, two cores: 83 us, plain 165), and a post-op adds
the residual to the FP32 accumulators. A call costs some 10 us besides, so few large matrices beat many small
ones. Where oneDNN cannot (other devices, FP16, builds without it) the layer is plain torch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear:
    """One matrix with its bias. Packed on a CPU when oneDNN can; the plain matrix is then not kept.

    weight: [out, in]; bias: [out] or None.
    """

    __slots__ = ("weight", "bias", "is_packed")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        packed = _pack(weight)
        self.is_packed = packed is not None
        self.weight = weight if packed is None else packed
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        if self.is_packed:
            return _pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + (x W^T + b); x [T, in], residual [T, out] -> [T, out].

        The result may be written over residual: on a GPU that spares a kernel which reads both and writes.
        """
        if self.is_packed:
            return _pointwise_binary(x, residual, self.weight, self.bias, "add")
        if self.bias is None:
            return residual.addmm_(x, self.weight.T)
        return F.linear(x, self.weight, self.bias) + residual


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN's packed products can be used for matrices there, which are then copied."""
    if device.type != "cpu" or _reorder is None:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def _pack(weight: Tensor) -> Tensor | None:
    if not can_pack(weight.dtype, weight.device):
        return None
    try:
        packed: Tensor = _reorder(weight.detach(), None)
        _pointwise(weight.new_zeros(1, weight.shape[1]), packed, None, "none", [], "")
    except RuntimeError:
        return None
    return packed


def _load_onednn() -> tuple:
    """The three private oneDNN operators, or Nones where this torch lacks them."""
    if not torch.backends.mkldnn.is_available():
        return None, None, None
    try:
        operators = torch.ops.mkldnn
        return (
            operators._reorder_linear_weight.default,
            operators._linear_pointwise.default,
            operators._linear_pointwise.binary,
        )
    except AttributeError:
        return None, None, None


_reorder, _pointwise, _pointwise_binary = _load_onednn()
