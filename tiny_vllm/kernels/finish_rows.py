"""Ends a product whose K was split among programs, and normalises for the next product, as one kernel.

    y = sum over s of parts[s] + b + residual         normed = rmsnorm(y) * norm_weight

parts [S, M, N] FP32, or of residual's type; residual, y, normed [M, N] of one type; b and norm_weight [N].
Some families norm the sum, or scale it, before they add it: y = m * rmsnorm(sum + b) * branch_norm +
residual. Those that norm nothing else have no norm_weight: y is what the next product takes.
FP32 arithmetic in a fixed order; y is rounded once, and normed is what RMSNorm makes of the rounded y. Moves
(4 * S + 6) * M * N bytes in BF16 for about (S + 5) * M * N FLOPs: bound by latency up to some hundred rows.

A program per row: whoever normalises a row must see all of it, so this is also where the parts of a product
meet, without atomics. In place of a kernel that adds the parts, one that adds the residual, and a norm.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
from torch import Tensor

from tiny_vllm.kernels.rms_norm import rms_norm_ref
from tiny_vllm.kernels.triton_support import (
    jit,
    launch_dependents,
    launch_options,
    next_power_of_2,
    runs_triton,
    tl,
    wait_for_predecessor,
    with_fallback,
)

# Rows of 2,048: 8 values per thread.
NUM_WARPS = 8


def finish_rows_ref(
    parts: Tensor,
    residual: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    bias: Tensor | None = None,
    pdl: bool = False,
    branch_norm: Tensor | None = None,
    multiplier: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """As torch operators. `pdl` is ignored."""
    total = parts.float().sum(0)
    if bias is not None:
        total = total + bias.float()
    if branch_norm is not None:
        total = rms_norm_ref(total, branch_norm, eps)
    total = total * multiplier
    y = (total + residual.float()).to(residual.dtype)
    return y, y if norm_weight is None else rms_norm_ref(y, norm_weight, eps)


@jit
def _finish_rows_kernel(
    y_ptr,
    normed_ptr,
    parts_ptr,
    bias_ptr,
    residual_ptr,
    norm_ptr,
    branch_norm_ptr,
    num_rows,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (M,): a row each. normed_ptr and norm_ptr, or branch_norm_ptr, may be None."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        launch_dependents()
    column = tl.arange(0, BLOCK)
    is_column = column < N
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        total = tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    if PDL:
        wait_for_predecessor()
    residual = tl.load(residual_ptr + row * N + column, mask=is_column, other=0.0).to(tl.float32)
    for split in tl.static_range(SPLITS):
        place = parts_ptr + (split * num_rows + row) * N + column
        total += tl.load(place, mask=is_column, other=0.0).to(tl.float32)
    if branch_norm_ptr is not None:
        branch_norm = tl.load(branch_norm_ptr + column, mask=is_column, other=0.0).to(tl.float32)
        total *= tl.rsqrt(tl.sum(total * total, 0) / N + eps) * branch_norm
    if MULTIPLIER != 1.0:
        total *= MULTIPLIER
    y = (total + residual).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * N + column, y, mask=is_column)
    if norm_ptr is not None:
        wide = y.to(tl.float32)
        normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / N + eps) * norm
        tl.store(normed_ptr + row * N + column, normed.to(normed_ptr.dtype.element_ty), mask=is_column)


@with_fallback(finish_rows_ref)
def _launch_finish_rows(
    parts: Tensor,
    residual: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    bias: Tensor | None = None,
    pdl: bool = False,
    branch_norm: Tensor | None = None,
    multiplier: float = 1.0,
) -> tuple[Tensor, Tensor]:
    num_rows, N = residual.shape
    assert parts.shape[1:] == residual.shape and parts.is_contiguous() and residual.is_contiguous()
    y = torch.empty_like(residual)
    normed = None if norm_weight is None else torch.empty_like(residual)
    _finish_rows_kernel[(num_rows,)](
        y,
        normed,
        parts,
        parts if bias is None else bias,
        residual,
        norm_weight,
        branch_norm,
        num_rows,
        eps,
        N=N,
        BLOCK=next_power_of_2(N),
        SPLITS=parts.shape[0],
        MULTIPLIER=multiplier,
        HAS_BIAS=bias is not None,
        PDL=pdl,
        **launch_options(NUM_WARPS, pdl),
    )
    return y, y if normed is None else normed


def finish_rows(
    parts: Tensor,
    residual: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    bias: Tensor | None = None,
    pdl: bool = False,
    branch_norm: Tensor | None = None,
    multiplier: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """y and normed [M, N], the same without norm_weight. pdl: see `triton_support`."""
    op = _launch_finish_rows if runs_triton(residual) else finish_rows_ref
    return op(parts, residual, norm_weight, eps, bias, pdl, branch_norm, multiplier)
