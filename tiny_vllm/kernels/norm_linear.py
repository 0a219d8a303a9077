"""Products of few rows: RMSNorm, a matrix, and what follows it, as one kernel that reads the matrix once.

    y = f(rmsnorm(x) W^T + b) + residual        the norm, b, f = silu(gate) * up, and the residual are
    optional

x [M, K], W [N, K] (gated: [2N, K], gate rows then up rows), b one value per row of W, residual and y [M, N].
norm_weight [K] of any float type. FP32 accumulation, one rounding at the end. Moves 2 * N * K bytes of BF16
weights for 2 * M * N * K FLOPs: memory-bound for all M this is used with, so reading W is the whole cost.

Design. A program owns some rows of W and the whole of K, so sums have one fixed order and no atomics. Weights
go straight to registers, two tiles ahead, and are marked evict-first: they are used once, and what the L2
cache should keep is activations and keys. The first two tiles are loaded before the wait for the predecessor,
which takes the latency of memory out of the chain: 894 us per step of a Llama-3.2-1B shape became 714 (H200).
Every program computes the norm of x again, which costs less than a kernel that does it once.

One row is multiplied by FMA, with a tree sum over the lanes at the end. From two rows on, tensor cores take
the weights as their 16-row operand and the rows of x, padded to 8 or 16, as columns; the warps split K among
them (a batched product whose batch is the warps), so that few rows of W per program still occupy every warp.

Rejected: split-K over programs (needs atomics or another kernel), staging weights through shared memory with
one row (another trip, and a small matrix has no steady state that a pipeline could reach).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_vllm.kernels.rms_norm import rms_norm
from tiny_vllm.kernels.silu_and_mul import silu_and_mul
from tiny_vllm.kernels.triton_support import (
    ceil_div,
    dot,
    jit,
    launch_dependents,
    launch_options,
    next_power_of_2,
    runs_triton,
    tl,
    wait_for_predecessor,
    with_fallback,
)

# Beyond this many rows x, re-read by every program, outweighs the matrix, and cuBLAS is used.
MAX_SMALL_ROWS = 16

# One row. (longest K, (values of K per tile, warps)): a whole row of the matrix in one tile as long as the
# registers allow, so that all of a program's loads are in flight before the wait.
ONE_ROW_TILES = ((2048, (2048, 4)), (4096, (4096, 4)), (8192, (8192, 8)))
# 128 weights (64 registers) per thread and tile: with 4 warps, 16 KB per program in flight, and 6 to 8
# programs on a multiprocessor, which leaves room for the next kernel's programs to start early.
ONE_ROW_VALUES_PER_THREAD = 128
# (fewest rows of W, factor): the LM head streams for 100 us, so ramps matter less than in-flight bytes.
ONE_ROW_TALL_MATRIX = (32768, 2)
# At least this many programs if the matrix has the rows for them: about two per multiprocessor of an H200.
MIN_PROGRAMS = 256

# Several rows. 16 rows of W are one operand of the tensor cores; 8 warps split a tile of K. (most rows of x,
# values of K per tile), halved if there are two matrices: a thread holds two tiles of weights (2 x 32
# registers) and one of x (32 or 64 in FP32).
DOT_WARPS = 8
DOT_BLOCK_N = 16
DOT_TILES = ((8, 1024), (16, 512), (64, 256))
# A tall matrix takes 32 rows per program, which halves the traffic of x from L2.
DOT_TALL_MATRIX = 32768


def norm_linear_ref(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    pdl: bool = False,
) -> Tensor:
    """As separate operators, rounding after each: large M, and machines without Triton. `pdl` is ignored."""
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    y = F.linear(x, weight, bias)
    if gated:
        y = silu_and_mul(y)
    if residual is not None:
        y = y + residual
    return y.to(out_dtype or x.dtype)


@jit
def load_weights(
    weight_ptr, rows, is_row, first, K: tl.constexpr, BLOCK_K: tl.constexpr, NUM_SPLITS: tl.constexpr
):
    """Columns first .. first + BLOCK_K of the given rows: [rows, BLOCK_K], or split along K for several rows
    of x: [NUM_SPLITS, rows, BLOCK_K / NUM_SPLITS]."""
    if NUM_SPLITS == 1:
        columns = first + tl.arange(0, BLOCK_K)
        pointers = weight_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :]
        mask = is_row[:, None]
        if K % BLOCK_K != 0:
            mask = mask & (columns < K)[None, :]
    else:
        PART: tl.constexpr = BLOCK_K // NUM_SPLITS
        parts = first + tl.arange(0, NUM_SPLITS) * PART
        columns = parts[:, None] + tl.arange(0, PART)[None, :]
        pointers = weight_ptr + rows.to(tl.int64)[None, :, None] * K + columns[:, None, :]
        mask = is_row[None, :, None]
        if K % BLOCK_K != 0:
            mask = mask & (columns < K)[:, None, :]
    return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")


@jit
def load_inputs(
    x_ptr,
    num_rows,
    first,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """The same columns of all rows of x in FP32: [NUM_SPLITS, BLOCK_M, BLOCK_K / NUM_SPLITS]."""
    PART: tl.constexpr = BLOCK_K // NUM_SPLITS
    columns = first + (tl.arange(0, NUM_SPLITS) * PART)[:, None] + tl.arange(0, PART)[None, :]
    row = tl.arange(0, BLOCK_M)
    mask = (row < num_rows)[None, :, None] & (columns < K)[:, None, :]
    return tl.load(x_ptr + row[None, :, None] * K + columns[:, None, :], mask=mask, other=0.0).to(tl.float32)


@jit
def load_norm(norm_ptr, first, K: tl.constexpr, BLOCK_K: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """The norm's weights of the same columns in FP32: [NUM_SPLITS, BLOCK_K / NUM_SPLITS]."""
    PART: tl.constexpr = BLOCK_K // NUM_SPLITS
    columns = first + (tl.arange(0, NUM_SPLITS) * PART)[:, None] + tl.arange(0, PART)[None, :]
    return tl.load(norm_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)


@jit
def multiply_tile(total, weights, inputs, NUM_SPLITS: tl.constexpr):
    """Add one tile's products to total: [rows] for one row of x, else [NUM_SPLITS, rows, BLOCK_M]."""
    if NUM_SPLITS == 1:
        total += tl.sum(weights.to(tl.float32) * tl.reshape(inputs, (1, inputs.shape[2])), 1)
    else:
        columns = tl.permute(inputs.to(weights.dtype), (0, 2, 1))
        total = dot(weights, columns, total)
    return total


@jit
def small_products(
    x_ptr,
    weight_ptr,
    norm_ptr,
    rows_a,
    rows_b,
    is_row,
    num_rows,
    eps,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    IS_PAIR: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows a and, if IS_PAIR, rows b of the matrix times rmsnorm(x): two FP32 tiles [BLOCK_N, BLOCK_M].

    Asks for the next kernel, loads the first tiles, and waits for the preceding one: exactly once.
    """
    if PDL:
        launch_dependents()
    NUM_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    a = load_weights(weight_ptr, rows_a, is_row, 0, K, BLOCK_K, NUM_SPLITS)
    b = a
    if IS_PAIR:
        b = load_weights(weight_ptr, rows_b, is_row, 0, K, BLOCK_K, NUM_SPLITS)
    next_a = a
    next_b = b
    if NUM_TILES > 1:
        next_a = load_weights(weight_ptr, rows_a, is_row, BLOCK_K, K, BLOCK_K, NUM_SPLITS)
        if IS_PAIR:
            next_b = load_weights(weight_ptr, rows_b, is_row, BLOCK_K, K, BLOCK_K, NUM_SPLITS)
    if HAS_NORM:
        norm = load_norm(norm_ptr, 0, K, BLOCK_K, NUM_SPLITS)
    if PDL:
        wait_for_predecessor()

    # FP16 cannot hold x times the norm's weight before it is scaled; BF16 and FP32 can, and scale the sums.
    SCALE_FIRST: tl.constexpr = HAS_NORM and NUM_SPLITS > 1 and x_ptr.dtype.element_ty == tl.float16
    squares = tl.zeros((BLOCK_M,), tl.float32)
    scale = squares
    if SCALE_FIRST:
        for tile in tl.range(NUM_TILES):
            inputs = load_inputs(x_ptr, num_rows, tile * BLOCK_K, K, BLOCK_M, BLOCK_K, NUM_SPLITS)
            squares += tl.sum(tl.sum(inputs * inputs, 2), 0)
        scale = tl.rsqrt(squares / K + eps)

    if NUM_SPLITS == 1:
        total_a = tl.zeros((BLOCK_N,), tl.float32)
    else:
        total_a = tl.zeros((NUM_SPLITS, BLOCK_N, BLOCK_M), tl.float32)
    total_b = total_a
    for tile in tl.static_range(NUM_TILES):
        inputs = load_inputs(x_ptr, num_rows, tile * BLOCK_K, K, BLOCK_M, BLOCK_K, NUM_SPLITS)
        if HAS_NORM:
            if tile > 0:
                norm = load_norm(norm_ptr, tile * BLOCK_K, K, BLOCK_K, NUM_SPLITS)
            if SCALE_FIRST:
                inputs = inputs * scale[None, :, None]
            else:
                squares += tl.sum(tl.sum(inputs * inputs, 2), 0)
            inputs = inputs * norm[:, None, :]
        total_a = multiply_tile(total_a, a, inputs, NUM_SPLITS)
        if IS_PAIR:
            total_b = multiply_tile(total_b, b, inputs, NUM_SPLITS)
        a = next_a
        b = next_b
        if tile + 2 < NUM_TILES:
            next_a = load_weights(weight_ptr, rows_a, is_row, (tile + 2) * BLOCK_K, K, BLOCK_K, NUM_SPLITS)
            if IS_PAIR:
                next_b = load_weights(
                    weight_ptr, rows_b, is_row, (tile + 2) * BLOCK_K, K, BLOCK_K, NUM_SPLITS
                )

    if NUM_SPLITS == 1:
        result_a = tl.reshape(total_a, (BLOCK_N, 1))
        result_b = tl.reshape(total_b, (BLOCK_N, 1))
    else:
        result_a = tl.sum(total_a, 0)
        result_b = tl.sum(total_b, 0) if IS_PAIR else result_a
    if HAS_NORM and not SCALE_FIRST:
        scale = tl.rsqrt(squares / K + eps)
        result_a = result_a * scale[None, :]
        result_b = result_b * scale[None, :]
    return result_a, result_b


@jit
def _norm_linear_kernel(
    y_ptr,
    x_ptr,
    weight_ptr,
    norm_ptr,
    bias_ptr,
    residual_ptr,
    num_rows,
    N,
    eps,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < N
    y, up = small_products(
        x_ptr, weight_ptr, norm_ptr, column, column + N, is_column, num_rows, eps,
        K, BLOCK_M, BLOCK_N, BLOCK_K, NUM_SPLITS, GATED, HAS_NORM, PDL,
    )  # fmt: skip

    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if HAS_BIAS:
            up += tl.load(bias_ptr + N + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
        y = y / (1.0 + tl.exp(-y)) * up
    row = tl.arange(0, BLOCK_M)
    places = row[None, :] * N + column[:, None]
    mask = is_column[:, None] & (row < num_rows)[None, :]
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=mask)


def choose_tiles(num_rows: int, num_columns: int, K: int, num_matrices: int) -> dict[str, int]:
    """BLOCK_M, BLOCK_N, BLOCK_K, NUM_SPLITS and num_warps. num_columns: what programs share."""
    if num_rows == 1:
        limit, num_warps = next((value for top, value in ONE_ROW_TILES if top >= K), ONE_ROW_TILES[0][1])
        block_k = _fit(K, limit)
        values = ONE_ROW_VALUES_PER_THREAD * 32 * num_warps
        if num_columns >= ONE_ROW_TALL_MATRIX[0]:
            values *= ONE_ROW_TALL_MATRIX[1]
        most = max(num_columns // MIN_PROGRAMS, 1)
        block_n = min(values // (block_k * num_matrices), 1 << (most.bit_length() - 1))
        return dict(BLOCK_M=1, BLOCK_N=max(block_n, 1), BLOCK_K=block_k, NUM_SPLITS=1, num_warps=num_warps)
    limit = next(value for top, value in DOT_TILES if top >= num_rows) // num_matrices
    block_n = DOT_BLOCK_N
    if num_columns >= DOT_TALL_MATRIX:
        block_n, limit = 2 * block_n, limit // 2
    block_k = max(_fit(K, limit), 16 * DOT_WARPS)
    return dict(
        BLOCK_M=max(next_power_of_2(num_rows), 8),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        NUM_SPLITS=DOT_WARPS,
        num_warps=DOT_WARPS,
    )


def _fit(K: int, limit: int) -> int:
    """A tile length up to the limit: one tile if it holds K, else the longest padding K by an eighth."""
    if limit >= K:
        return max(next_power_of_2(K), 16)
    length = limit
    while length > 128 and ceil_div(K, length) * length > K + K // 8:
        length //= 2
    return length


@with_fallback(norm_linear_ref)
def _launch_norm_linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    pdl: bool = False,
) -> Tensor:
    num_rows, K = x.shape
    N = weight.shape[0] // (2 if gated else 1)
    assert x.is_contiguous() and weight.is_contiguous() and (residual is None or residual.is_contiguous())
    y = torch.empty(num_rows, N, dtype=out_dtype or x.dtype, device=x.device)
    tiles = choose_tiles(num_rows, N, K, 2 if gated else 1)
    num_warps = tiles.pop("num_warps")
    _norm_linear_kernel[(ceil_div(N, tiles["BLOCK_N"]),)](
        y,
        x,
        weight,
        x if norm_weight is None else norm_weight,
        x if bias is None else bias,
        x if residual is None else residual,
        num_rows,
        N,
        eps,
        K=K,
        **tiles,
        GATED=gated,
        HAS_NORM=norm_weight is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        PDL=pdl,
        **launch_options(num_warps, pdl),
    )
    return y


def norm_linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    pdl: bool = False,
) -> Tensor:
    """x [M, K] -> [M, N] of out_dtype, by default x's. Shapes as above.

    pdl: launch as part of a chain of dependent kernels, see `triton_support`; only where `has_pdl`.
    """
    op = _launch_norm_linear if x.shape[0] <= MAX_SMALL_ROWS and runs_triton(x) else norm_linear_ref
    return op(
        x, weight, norm_weight=norm_weight, eps=eps, bias=bias, residual=residual, gated=gated,
        out_dtype=out_dtype, pdl=pdl,
    )  # fmt: skip
