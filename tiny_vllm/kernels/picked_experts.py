"""The experts of few tokens as two products that read the matrices of each pick, without sorting picks.

    parts[j, t] = w[t, j] * (act(x[t] Wg_e^T, x[t] Wu_e^T) Wd_e^T + b_e)        e = experts[t, j]

Shapes as in expert_products.py, which is for more tokens; inner values [T * A, I] are in the order of picks.
Moves 3 * H * I values for each expert that was picked, for 6 * T * A * H * I FLOPs: memory-bound.

A program takes a pick and some rows of its expert's matrix. Warps take rows of their own, lanes 16 bytes of
each at a time, so that sums cross lanes once and warps never; products are FMA. A program's weights go
straight to registers and are all in flight at once, up to a dozen tiles per row. Where a matrix is longer,
the rest follows in as large steps. If several tokens picked an expert, the program of the first of them
multiplies all their rows with the weights that it holds, and those of the others leave.

Dependent launch: the first product asks for its successor after its own wait, not before as other kernels
do. Then the picks are complete before a program of the second product starts, and it may load its weights
while programs of the first still run.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_vllm.kernels.gated_activation import activate
from tiny_vllm.kernels.triton_support import (
    IS_INTERPRETED,
    ceil_div,
    jit,
    launch_dependents,
    launch_options,
    tl,
    wait_for_predecessor,
)

# With more picks per expert, several tokens share one so often that tensor cores pay.
MIN_EXPERTS_PER_PICK = 4
MAX_PICKS = 64
NUM_WARPS = 4
# Loads of 16 bytes that a thread has in flight; those of one row at most.
LOADS_PER_THREAD = 16
MAX_TILES = 12
MIN_TILES = 6


@dataclass(frozen=True, slots=True)
class PickTiles:
    """Rows of a matrix per program, values of K per tile, tiles of a row in flight."""

    block_n: int
    block_k: int
    num_tiles: int
    num_warps: int


def takes_picks(num_tokens: int, num_active: int, num_experts: int) -> bool:
    """Whether the products of so few picks are for this file."""
    num_picks = num_tokens * num_active
    if num_picks > MAX_PICKS:
        return False
    return num_tokens == 1 or num_picks * MIN_EXPERTS_PER_PICK <= num_experts


def choose_pick_tiles(K: int, dtype: torch.dtype, is_gated: bool) -> PickTiles:
    """is_gated: a program reads each row of the gate with one of up."""
    block_k = 32 * 16 // dtype.itemsize
    tiles = ceil_div(K, block_k)
    divisors = [count for count in range(MIN_TILES, MAX_TILES + 1) if tiles % count == 0]
    num_tiles = tiles if tiles <= MAX_TILES else max(divisors, default=MAX_TILES)
    rows_per_warp = max(LOADS_PER_THREAD // (num_tiles * (2 if is_gated else 1)), 1)
    rows_per_warp = 1 << (rows_per_warp.bit_length() - 1)
    return PickTiles(rows_per_warp * NUM_WARPS, block_k, num_tiles, NUM_WARPS)


@jit
def _columns(first, BLOCK_K: tl.constexpr, NUM_WARPS: tl.constexpr):
    """first .. first + BLOCK_K, for each warp: [NUM_WARPS, 1, BLOCK_K]. What all warps need has such a shape,
    too, so that it is loaded where it is used, and not spread by way of shared memory."""
    return first + tl.arange(0, BLOCK_K)[None, None, :] + tl.zeros((NUM_WARPS, 1, 1), tl.int32)


@jit
def _load_tiles(
    matrix_ptr, rows, is_row, first,
    K: tl.constexpr, BLOCK_K: tl.constexpr, NUM_TILES: tl.constexpr,
):  # fmt: skip
    """Columns from `first` on of the given rows [warps, R, 1]: a tuple of [warps, R, BLOCK_K]."""
    tiles = ()
    for tile in tl.static_range(NUM_TILES):
        columns = _columns(first + tile * BLOCK_K, BLOCK_K, rows.shape[0])
        mask = is_row
        if K % (BLOCK_K * NUM_TILES) != 0:
            mask = mask & (columns < K)
        values = tl.load(matrix_ptr + rows * K + columns, mask=mask, other=0.0, eviction_policy="evict_first")
        tiles = tiles + (values,)  # type: ignore[assignment]
    return tiles


@jit
def _load_x(
    x_ptr, first,
    K: tl.constexpr, BLOCK_K: tl.constexpr, NUM_TILES: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """The same columns of one row: a tuple of [warps, 1, BLOCK_K]."""
    tiles = ()
    for tile in tl.static_range(NUM_TILES):
        columns = _columns(first + tile * BLOCK_K, BLOCK_K, NUM_WARPS)
        tiles = tiles + (tl.load(x_ptr + columns, mask=columns < K, other=0.0),)  # type: ignore[assignment]
    return tiles


@jit
def _as_loaded(values):
    """The same values, of which the compiler then keeps the 16 bits that were loaded, and not what several
    tokens need them converted to."""
    if IS_INTERPRETED or values.dtype == tl.float32:
        return values
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [values], dtype=values.dtype, is_pure=False, pack=2
        )


@jit
def _add_tiles(total, tiles, x, NUM_TILES: tl.constexpr, IS_SHARED: tl.constexpr):
    """total [warps, R, BLOCK_K] + tiles x, column by column."""
    for tile in tl.static_range(NUM_TILES):
        values = tiles[tile]
        if IS_SHARED:
            values = _as_loaded(values)
        total += values.to(tl.float32) * x[tile].to(tl.float32)
    return total


@jit
def _finish_pick(
    y_ptr, x_ptr, matrix_ptr, weights_ptr, rows, column, is_column, tiles, tiles_up, bias, bias_up, pick,
    num_tokens, N,
    K: tl.constexpr, NUM_ACTIVE: tl.constexpr, IS_SHARED: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_TILES: tl.constexpr, ACTIVATION: tl.constexpr, IS_FIRST: tl.constexpr,
):  # fmt: skip
    """What is left of a pick when its expert's first tiles are on their way."""
    if IS_FIRST:
        x_row = x_ptr + pick // NUM_ACTIVE * K
        y_row = y_ptr + pick * N
    else:
        x_row = x_ptr + pick * K
        y_row = y_ptr + (pick % NUM_ACTIVE * num_tokens + pick // NUM_ACTIVE) * N
        share = tl.load(weights_ptr + pick)
    SHAPE: tl.constexpr = (rows.shape[0], rows.shape[1], BLOCK_K)
    STEP: tl.constexpr = BLOCK_K * NUM_TILES
    x = _load_x(x_row, 0, K, BLOCK_K, NUM_TILES, rows.shape[0])
    # No arithmetic may move above this: it would wait for the first weights before the last are asked for.
    tl.debug_barrier()
    total = _add_tiles(tl.zeros(SHAPE, tl.float32), tiles, x, NUM_TILES, IS_SHARED)
    total_up = total
    if IS_FIRST:
        total_up = _add_tiles(tl.zeros(SHAPE, tl.float32), tiles_up, x, NUM_TILES, IS_SHARED)
    if K > STEP:
        for first in tl.range(STEP, K, STEP):
            more = _load_tiles(matrix_ptr, rows, is_column, first, K, BLOCK_K, NUM_TILES)
            if IS_FIRST:
                more_up = _load_tiles(matrix_ptr, rows + N, is_column, first, K, BLOCK_K, NUM_TILES)
            x = _load_x(x_row, first, K, BLOCK_K, NUM_TILES, rows.shape[0])
            total = _add_tiles(total, more, x, NUM_TILES, False)
            if IS_FIRST:
                total_up = _add_tiles(total_up, more_up, x, NUM_TILES, False)
    result = tl.sum(total, 2, keep_dims=True) + bias
    if IS_FIRST:
        result = activate(result, tl.sum(total_up, 2, keep_dims=True) + bias_up, ACTIVATION)
    else:
        result *= share
    tl.store(y_row + column, result.to(y_ptr.dtype.element_ty), mask=is_column)


@jit(do_not_specialize=("num_tokens",))
def _picked_product_kernel(
    y_ptr,
    x_ptr,
    matrix_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    num_tokens,
    N,
    K: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    BLOCK_PICKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_TILES: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (picks, tiles of N). bias_ptr may be None. BLOCK_PICKS: 1 if there is one token.

    IS_FIRST: x are tokens, y [n, N] is in the order of picks; otherwise that is x, and y are the parts.
    """
    if PDL:
        if IS_FIRST:
            wait_for_predecessor()
        launch_dependents()
    pick = tl.program_id(0)
    expert = tl.load(experts_ptr + pick).to(tl.int64)
    others = tl.arange(0, BLOCK_PICKS)
    is_same = others == 0
    if BLOCK_PICKS > 1:
        is_pick = others < num_tokens * NUM_ACTIVE
        picked = tl.load(experts_ptr + others, mask=is_pick, other=-1)
        is_same = picked == expert
        if tl.min(tl.where(is_same, others, BLOCK_PICKS), 0) < pick:
            return
    ROWS_PER_WARP: tl.constexpr = BLOCK_N // NUM_WARPS
    row_of_warp = tl.arange(0, ROWS_PER_WARP)[None, :, None]
    first = tl.program_id(1) * BLOCK_N
    column = first + tl.arange(0, NUM_WARPS)[:, None, None] * ROWS_PER_WARP + row_of_warp
    is_column = column < N
    NUM_ROWS = N * 2 if IS_FIRST else N
    rows = expert * NUM_ROWS + column
    tiles = _load_tiles(matrix_ptr, rows, is_column, 0, K, BLOCK_K, NUM_TILES)
    tiles_up = tiles
    if IS_FIRST:
        tiles_up = _load_tiles(matrix_ptr, rows + N, is_column, 0, K, BLOCK_K, NUM_TILES)
    bias = tl.zeros(column.shape, tl.float32)
    bias_up = bias
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + rows, mask=is_column, other=0.0).to(tl.float32)
        if IS_FIRST:
            bias_up = tl.load(bias_ptr + rows + N, mask=is_column, other=0.0).to(tl.float32)
    if PDL and not IS_FIRST:
        wait_for_predecessor()
    if BLOCK_PICKS == 1:
        _finish_pick(
            y_ptr, x_ptr, matrix_ptr, weights_ptr, rows, column, is_column, tiles, tiles_up, bias, bias_up,
            pick, num_tokens, N,
            K, NUM_ACTIVE, False, BLOCK_K, NUM_TILES, ACTIVATION, IS_FIRST,
        )  # fmt: skip
    else:
        while pick < BLOCK_PICKS:
            following = tl.min(tl.where(is_same & (others > pick), others, BLOCK_PICKS), 0)
            _finish_pick(
                y_ptr, x_ptr, matrix_ptr, weights_ptr, rows, column, is_column, tiles, tiles_up, bias,
                bias_up, pick, num_tokens, N,
                K, NUM_ACTIVE, True, BLOCK_K, NUM_TILES, ACTIVATION, IS_FIRST,
            )  # fmt: skip
            pick = following


def _launch_product(
    y: Tensor,
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    experts: Tensor,
    weights: Tensor,
    activation: str | None,
    pdl: bool,
) -> None:
    """activation: of the first product, None for the second."""
    N, K = y.shape[-1], x.shape[-1]
    num_tokens, num_active = weights.shape
    tiles = choose_pick_tiles(K, x.dtype, activation is not None)
    assert x.is_contiguous() and matrix.is_contiguous() and (bias is None or bias.is_contiguous())
    _picked_product_kernel[(experts.numel(), ceil_div(N, tiles.block_n))](
        y,
        x,
        matrix,
        bias,
        weights,
        experts,
        num_tokens,
        N,
        K=K,
        NUM_ACTIVE=num_active,
        BLOCK_PICKS=1 if num_tokens == 1 else MAX_PICKS,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        NUM_TILES=tiles.num_tiles,
        NUM_WARPS=tiles.num_warps,
        ACTIVATION=activation,
        IS_FIRST=activation is not None,
        PDL=pdl,
        **launch_options(tiles.num_warps, pdl),
    )


def picked_parts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    pdl: bool,
) -> Tensor:
    """x [T, H], experts [T, A] int32, weights [T, A] FP32 -> parts [A, T, H] FP32; T * A <= MAX_PICKS."""
    num_tokens, num_active = experts.shape
    hidden_size, inner_size = down.shape[1:]
    x, experts, weights = x.contiguous(), experts.contiguous(), weights.contiguous()
    inner = torch.empty(experts.numel(), inner_size, dtype=x.dtype, device=x.device)
    _launch_product(inner, x, gate_up, gate_up_bias, experts, weights, activation, pdl)
    parts = torch.empty(num_active, num_tokens, hidden_size, dtype=torch.float32, device=x.device)
    _launch_product(parts, inner, down, down_bias, experts, weights, None, pdl)
    return parts
