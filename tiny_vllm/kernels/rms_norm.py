"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight.

x [T, H], y [T, H] of one type, weight [H]; everything in between is FP32 and y is rounded once. The decoder
keeps norm weights in FP32, which saves converting them every time.
Moves 2 * T * H values for about 4 * T * H FLOPs: memory-bound. Source: Zhang and Sennrich 2019,
arXiv 1910.07467.

Written as cheap torch operators because a decode step on a CPU runs it twice per layer on few rows, where an
operator costs about a microsecond: one BF16 row of 576 takes 7 us, `torch.nn.functional.rms_norm` 10.3.
The Triton kernel holds a row in registers, so that it is read once. Few rows have no norm of their own on a
GPU: it is part of the product that follows (`norm_linear`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
from torch import Tensor

from tiny_vllm.kernels.triton_support import (
    jit,
    launch_options,
    next_power_of_2,
    runs_triton,
    tl,
    with_fallback,
)

# (longest row, warps): 16 values per thread, so that a row is 32 bytes of BF16 loads per thread in flight.
NUM_WARPS = ((1024, 2), (2048, 4), (1 << 20, 8))


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [.., H], weight [H] -> [.., H] of x's type."""
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, 2, -1, True)
    scale = norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).mul_(weight).to(x.dtype)


def norm_in_place_ref(x: Tensor, weight: Tensor, eps: float) -> None:
    """As torch operators."""
    x.copy_(rms_norm_ref(x, weight, eps))


@jit
def _rms_norm_kernel(y_ptr, x_ptr, weight_ptr, row_stride, eps, H: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * row_stride
    column = tl.arange(0, BLOCK)
    mask = column < H
    x = tl.load(x_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)

    y = x * tl.rsqrt(tl.sum(x * x, 0) / H + eps) * weight
    tl.store(y_ptr + start + column, y.to(y_ptr.dtype.element_ty), mask=mask)


def _launch(y: Tensor, x: Tensor, weight: Tensor, row_stride: int, eps: float) -> None:
    """y: may be x. Rows of both begin row_stride values apart."""
    width = x.shape[-1]
    num_warps = next(warps for limit, warps in NUM_WARPS if limit >= width)
    _rms_norm_kernel[(x.numel() // width,)](
        y, x, weight, row_stride, eps, H=width, BLOCK=next_power_of_2(width), **launch_options(num_warps)
    )


@with_fallback(rms_norm_ref)
def _launch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    _launch(y, x, weight, x.shape[-1], eps)
    return y


@with_fallback(norm_in_place_ref)
def _launch_norm_in_place(x: Tensor, weight: Tensor, eps: float) -> None:
    assert x.dim() == 2 and x.stride(1) == 1
    _launch(x, x, weight, x.stride(0), eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H], weight [H] -> [T, H] of x's type."""
    if runs_triton(x) and x.numel():
        return _launch_rms_norm(x, weight, eps)
    return rms_norm_ref(x, weight, eps)


def norm_in_place(x: Tensor, weight: Tensor, eps: float) -> None:
    """x [T, H], weight [H]. Rows of x may lie apart, as columns of a wider matrix."""
    op = _launch_norm_in_place if runs_triton(x) and x.numel() else norm_in_place_ref
    op(x, weight, eps)
