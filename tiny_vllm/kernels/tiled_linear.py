"""Products of some dozen to some hundred rows: tiles through shared memory, K split among programs.

    partial[s, m, n] = sum over part s of K of x[m, k] W[n, k]            `split_product`
    y = sum over s of partial[s] + b + residual;  normed = rmsnorm(y)     `finish_rows`
    y = silu(x Wg^T + bg) * (x Wu^T + bu), or x W^T + b                   `tiled_linear`

x [M, K], W [N, K] (gated: [2N, K], gate rows then up rows), residual, y, normed [M, N], partial FP32. FP32
accumulation. Moves 2 * N * K bytes of BF16 weights for 2 * M * N * K FLOPs: memory-bound up to some two
hundred rows, so the tiles are chosen for bytes in flight, not for arithmetic.

Design. Rows of W are the operand of 64 and more rows that Hopper's tensor cores want, rows of x the other
one, so that few rows of x waste nothing. A matrix of 2,048 rows has 32 such tiles, a quarter of the
multiprocessors of a large GPU: K is split among programs, and the next kernel, which must see whole rows
anyway to normalise them, adds the parts in a fixed order. In `norm_linear` every program reads all of x,
which outweighs the matrix from some twenty rows on.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiny_vllm.kernels.triton_support import (
    IS_INTERPRETED,
    ceil_div,
    dot,
    jit,
    launch_dependents,
    launch_options,
    next_power_of_2,
    tl,
    wait_for_predecessor,
)

FINISH_WARPS = 4


@jit
def prefetch(pointers, mask):
    """Bring the lines at these addresses into the L2 cache; nothing waits for them."""
    if not IS_INTERPRETED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
            "=r,l,r",
            [pointers, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@jit
def _load_tile(matrix, rows, is_row, first_row, columns, first_column, K: tl.constexpr, BLOCK_K: tl.constexpr,
               TMA: tl.constexpr):  # fmt: skip
    if TMA:
        return matrix.load([first_row, first_column])
    else:
        mask = is_row[:, None]
        if K % BLOCK_K != 0:
            mask = mask & (columns < K)[None, :]
        return tl.load(matrix + rows.to(tl.int64)[:, None] * K + columns[None, :], mask=mask, other=0.0)


@jit
def _tiled_product_kernel(
    y_ptr,
    x_ptr,
    weight_ptr,
    weight_address,
    bias_ptr,
    num_rows,
    N,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TMA: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of x's rows, of W's rows, splits). TMA: x_ptr and weight_ptr are tensor descriptors."""
    if PDL:
        launch_dependents()
    first_m = tl.program_id(0) * BLOCK_M
    first_n = tl.program_id(1) * BLOCK_N
    split = tl.program_id(2)
    row = first_m + tl.arange(0, BLOCK_M)
    column = first_n + tl.arange(0, BLOCK_N)
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PER_SPLIT: tl.constexpr = (TILES + SPLITS - 1) // SPLITS
    first_tile = split * PER_SPLIT
    if PREFETCH > 0:
        lines = first_tile * BLOCK_K + tl.arange(0, PREFETCH // 64) * 64
        address = weight_address + column.to(tl.int64)[:, None] * K + lines[None, :]
        mask = (column < N)[:, None] & (lines < K)[None, :]
        prefetch(address, mask)
        if GATED:
            prefetch(address + tl.cast(N, tl.int64) * K, mask)
    if PDL:
        wait_for_predecessor()

    if WEIGHTS_FIRST:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total_up = total
    for tile in tl.range(first_tile, tl.minimum(first_tile + PER_SPLIT, TILES), num_stages=STAGES):
        k = tile * BLOCK_K
        columns = k + tl.arange(0, BLOCK_K)
        x = _load_tile(x_ptr, row, row < num_rows, first_m, columns, k, K, BLOCK_K, TMA)
        w = _load_tile(weight_ptr, column, column < N, first_n, columns, k, K, BLOCK_K, TMA)
        total = dot(w, tl.trans(x), total) if WEIGHTS_FIRST else dot(x, tl.trans(w), total)
        if GATED:
            up = _load_tile(weight_ptr, column + N, column < N, first_n + N, columns, k, K, BLOCK_K, TMA)
            total_up = dot(up, tl.trans(x), total_up) if WEIGHTS_FIRST else dot(x, tl.trans(up), total_up)

    if WEIGHTS_FIRST:
        total = tl.trans(total)
        total_up = tl.trans(total_up)
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if HAS_BIAS:
            total_up += tl.load(bias_ptr + N + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
        total = total / (1.0 + tl.exp(-total)) * total_up
    mask = (row < num_rows)[:, None] & (column < N)[None, :]
    place = (split * num_rows + row).to(tl.int64)[:, None] * N + column[None, :]
    tl.store(y_ptr + place, total.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _finish_rows_kernel(
    y_ptr,
    normed_ptr,
    partial_ptr,
    bias_ptr,
    residual_ptr,
    norm_ptr,
    num_rows,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (M,): a row each."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        launch_dependents()
    column = tl.arange(0, BLOCK)
    is_column = column < N
    norm = tl.load(norm_ptr + column, mask=is_column, other=0.0)
    if PDL:
        wait_for_predecessor()
    total = tl.load(residual_ptr + row * N + column, mask=is_column, other=0.0).to(tl.float32)
    product = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        product += tl.load(partial_ptr + (split * num_rows + row) * N + column, mask=is_column, other=0.0)
    if HAS_BIAS:
        product += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    y = (total + product).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * N + column, y, mask=is_column)
    wide = y.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / N + eps)
    normed = wide * scale * norm.to(tl.float32)
    tl.store(normed_ptr + row * N + column, normed.to(normed_ptr.dtype.element_ty), mask=is_column)


def launch_tiled_product(
    x: Tensor, weight: Tensor, tiles: dict[str, Any], *, bias: Tensor | None = None, gated: bool = False,
    out_dtype: torch.dtype | None = None, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """[M, N], or FP32 [SPLITS, M, N] with more than one split."""
    num_rows, K = x.shape
    N = weight.shape[0] // (2 if gated else 1)
    tiles = dict(tiles)
    num_warps, splits, tma = tiles.pop("num_warps"), tiles["SPLITS"], tiles["TMA"]
    assert not (splits > 1 and (gated or bias is not None))
    shape = (num_rows, N) if splits == 1 else (splits, num_rows, N)
    dtype = (out_dtype or x.dtype) if splits == 1 else torch.float32
    y = torch.empty(shape, dtype=dtype, device=x.device)
    x_source: Any = x
    weight_source: Any = weight
    if tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        x_source = TensorDescriptor.from_tensor(x, [tiles["BLOCK_M"], tiles["BLOCK_K"]])
        weight_source = TensorDescriptor.from_tensor(weight, [tiles["BLOCK_N"], tiles["BLOCK_K"]])
    grid = (ceil_div(num_rows, tiles["BLOCK_M"]), ceil_div(N, tiles["BLOCK_N"]), splits)
    _tiled_product_kernel[grid](
        y, x_source, weight_source, weight, x if bias is None else bias, num_rows, N,
        K=K, **tiles, GATED=gated, HAS_BIAS=bias is not None, PDL=pdl, **launch_options(num_warps, pdl),
    )  # fmt: skip
    return y


def launch_finish_rows(
    partial: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, *, bias: Tensor | None = None,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_rows, N = residual.shape
    y, normed = torch.empty_like(residual), torch.empty_like(residual)
    _finish_rows_kernel[(num_rows,)](
        y, normed, partial, partial if bias is None else bias, residual, norm_weight, num_rows, eps,
        N=N, BLOCK=next_power_of_2(N), SPLITS=partial.shape[0] if partial.dim() == 3 else 1,
        HAS_BIAS=bias is not None, PDL=pdl, **launch_options(FINISH_WARPS, pdl),
    )  # fmt: skip
    return y, normed
