"""Products of few rows: RMSNorm, a matrix, and what follows it, as one kernel that reads the matrix once.

    y = f(rmsnorm(x) W^T + b) + residual        the norm, b, f = act(gate) * up, and the residual are
    optional

x [M, K], W [N, K] (gated: [2N, K], gate rows then up rows), b one value per row of W, residual and y [M, N].
norm_weight [K] of any float type. FP32 accumulation, one rounding at the end. Moves 2 * N * K bytes of BF16
weights for 2 * M * N * K FLOPs: memory-bound for all M this is used with, so reading W is the whole cost.

Design. A program owns some rows of W and the whole of K, so sums have one fixed order and no atomics. Weights
go straight to registers, some tiles ahead, and are marked evict-first: they are used once, and what the L2
cache should keep is activations and keys. The first tiles are loaded before the wait for the predecessor,
which takes the latency of memory out of the chain: 894 us per step of a Llama-3.2-1B shape became 714 (H200).
Every program computes the norm of x again, which costs less than a kernel that does it once.

One row is multiplied by FMA, with a tree sum over the lanes at the end. From two rows on, tensor cores take
the weights as their 16-row operand and the rows of x, padded to 8, as columns; the warps split K among
them (a batched product whose batch is the warps), so that few rows of W per program still occupy every warp.

Rejected: split-K over programs (needs atomics or another kernel), staging weights through shared memory with
one row (another trip, and a small matrix has no steady state that a pipeline could reach).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_vllm.kernels.gated_activation import activate, gated_activation_ref
from tiny_vllm.kernels.rms_norm import rms_norm
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

# With more rows x, re-read by every program, outweighs the matrix, see `tiled_linear`. 16 rows of
# Llama-3.2-1B on an H200, us: QKV 6.3 here and 5.4 there, output 4.7 and 3.8, gate and up 21.1 and 17.3, down
# 13.3 and 10.1, LM head 146 and 124; there, two kernels of 1.7 more.
MAX_SMALL_ROWS = 8

# One row. (longest K, (rows of W, values of K per tile, tiles ahead, warps)): whole rows of the matrix in one
# tile, so that all of a program's loads are in flight before the wait. In us on an H200 with cold weights
# (QKV, output, gate and up, LM head): 4 rows by 2 warps 4.1, 3.1, 16.8, 115; 8 by 4 4.2, 3.6, 17.0, 115.
# Down: 2 rows by 8 warps 9.1, 4 by 8 10.1, 2 by 4 9.5. More in
# benchmarks/results/2026-11-29-h200-chain-tiles.json.
ONE_ROW_TILES = (
    (1024, (8, 1024, 1, 4)),
    (2048, (4, 2048, 1, 2)),
    (4096, (4, 4096, 1, 4)),
    (8192, (2, 8192, 1, 8)),
    (1 << 40, (8, 2048, 2, 4)),
)

# Several rows, for tensor cores, likewise; 2 and 8 rows of x, us. A thread of 128 holds 32 registers of
# weights per tile of 16 x 512.
DOT_TILES = (
    (4096, (16, 512, 4, 4)),  # QKV 4.9, 5.1; output 3.5, 3.8. 3 tiles ahead 5.3, 5.5; 3.7, 4.0
    (1 << 40, (16, 512, 8, 8)),  # down 10.1, 10.9. 4 tiles ahead 10.2, 11.5
)
# From so many rows of W on: gate and up 18.8, 19.5 (32 x 512, 2 ahead, 4 warps: 18.5, 19.0); LM head 120,
# 122.
DOT_TALL_MATRIX = (8192, (16, 256, 4, 2))


def norm_linear_ref(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    activation: str = "silu",
    out_dtype: torch.dtype | None = None,
    pdl: bool = False,
) -> Tensor:
    """As separate operators, rounding after each: large M, and machines without Triton. `pdl` is ignored."""
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    y = F.linear(x, weight, bias)
    if gated:
        y = gated_activation_ref(y, activation)
    if residual is not None:
        y = y + residual
    return y.to(out_dtype or x.dtype)


@jit
def columns_of_tile(first, BLOCK_K: tl.constexpr):
    """first .. first + BLOCK_K as [1, BLOCK_K / 32, 1, 32]. Not a reshape: behind one the compiler does not
    see that neighbours are contiguous in memory."""
    return (
        first + tl.arange(0, BLOCK_K // 32)[None, :, None, None] * 32 + tl.arange(0, 32)[None, None, None, :]
    )


@jit
def load_operand(
    matrix_ptr,
    rows,
    is_row,
    first,
    K: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ONCE: tl.constexpr,
):
    """Columns first .. first + BLOCK_K of the given rows: [8, BLOCK_K / 32, NUM_ROWS / 8, 32].

    ONCE: the values are used once, so they need no place in a cache.
    """
    row = tl.trans(tl.reshape(rows, (NUM_ROWS // 8, 8)))[:, None, :, None]
    columns = columns_of_tile(first, BLOCK_K)
    mask = tl.trans(tl.reshape(is_row, (NUM_ROWS // 8, 8)))[:, None, :, None]
    if K % BLOCK_K != 0:
        mask = mask & (columns < K)
    pointers = matrix_ptr + row.to(tl.int64) * K + columns
    if ONCE:
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(pointers, mask=mask, other=0.0)


@jit
def as_operand(values, NUM_ROWS: tl.constexpr, BLOCK_K: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """[8, BLOCK_K / 32, NUM_ROWS / 8, 32] -> [NUM_SPLITS, NUM_ROWS, BLOCK_K / NUM_SPLITS], columns permuted.

    The order in which a product sums is free if both operands have the same, and this is the one in which the
    16 bytes that a thread loads at a time are already the values that it feeds to the tensor cores.
    """
    values = tl.reshape(values, (8, BLOCK_K // 32 // NUM_SPLITS, NUM_SPLITS, NUM_ROWS // 8, 4, 2, 2, 2))
    values = tl.permute(values, (2, 3, 0, 1, 5, 6, 4, 7))
    return tl.reshape(values, (NUM_SPLITS, NUM_ROWS, BLOCK_K // NUM_SPLITS))


@jit
def sum_squares(x, NUM_ROWS: tl.constexpr, BLOCK_K: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """Of FP32 [8, BLOCK_K / 32, NUM_ROWS / 8, 32], as far as one thread holds them: [8, NUM_SPLITS,
    NUM_ROWS / 8, 4]."""
    squares = tl.reshape(x * x, (8, BLOCK_K // 32 // NUM_SPLITS, NUM_SPLITS, NUM_ROWS // 8, 4, 8))
    return tl.sum(tl.sum(squares, 5), 1)


@jit
def scale_of_rows(squares, eps, K: tl.constexpr, NUM_ROWS: tl.constexpr):
    """What RMSNorm multiplies each row with: [NUM_ROWS]."""
    total = tl.sum(tl.sum(squares, 3), 1)
    return tl.rsqrt(tl.reshape(tl.trans(total), (NUM_ROWS,)) / K + eps)


@jit
def load_norm(norm_ptr, first, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The norm's weights of the same columns: [8, BLOCK_K / 32, 1, 32], in the layout of the rows of x."""
    columns = columns_of_tile(first, BLOCK_K) + tl.zeros((8, 1, 1, 1), tl.int32)
    return tl.load(norm_ptr + columns, mask=columns < K, other=0.0)


@jit
def load_rows(weight_ptr, rows, is_row, first, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns first .. first + BLOCK_K of the given rows: [rows, BLOCK_K]."""
    columns = first + tl.arange(0, BLOCK_K)
    mask = is_row[:, None]
    if K % BLOCK_K != 0:
        mask = mask & (columns < K)[None, :]
    pointers = weight_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :]
    return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")


@jit
def load_weights(
    weight_ptr,
    rows,
    is_row,
    first,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of the matrix, as one row of x or several need it."""
    if BLOCK_M == 1:
        return load_rows(weight_ptr, rows, is_row, first, K, BLOCK_K)
    else:
        return load_operand(weight_ptr, rows, is_row, first, K, BLOCK_N, BLOCK_K, True)


@jit
def first_tiles(
    weight_ptr,
    rows,
    is_row,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A tuple of the first DEPTH tiles of the matrix, or as many as there are."""
    queue = (load_weights(weight_ptr, rows, is_row, 0, K, BLOCK_M, BLOCK_N, BLOCK_K),)
    for tile in tl.static_range(1, min(DEPTH, (K + BLOCK_K - 1) // BLOCK_K)):
        queue = queue + (  # type: ignore[assignment]
            load_weights(weight_ptr, rows, is_row, tile * BLOCK_K, K, BLOCK_M, BLOCK_N, BLOCK_K),
        )
    return queue


@jit
def several_rows(
    x_ptr,
    weight_ptr,
    norm_ptr,
    rows,
    is_row,
    num_rows,
    eps,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """`small_products` on tensor cores; the warps split every tile of K among them."""
    NUM_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    queue = first_tiles(weight_ptr, rows, is_row, K, BLOCK_M, BLOCK_N, BLOCK_K, DEPTH)
    if PDL:
        wait_for_predecessor()

    row = tl.arange(0, BLOCK_M)
    is_input = row < num_rows
    # FP16 cannot hold x times the norm's weight before it is scaled; BF16 and FP32 can, and scale the sums.
    SCALE_FIRST: tl.constexpr = HAS_NORM and x_ptr.dtype.element_ty == tl.float16
    squares = tl.zeros((8, NUM_SPLITS, BLOCK_M // 8, 4), tl.float32)
    scale = tl.zeros((BLOCK_M,), tl.float32)
    if SCALE_FIRST:
        for tile in tl.range(NUM_TILES):
            x = load_operand(x_ptr, row, is_input, tile * BLOCK_K, K, BLOCK_M, BLOCK_K, False)
            squares += sum_squares(x.to(tl.float32), BLOCK_M, BLOCK_K, NUM_SPLITS)
        scale = scale_of_rows(squares, eps, K, BLOCK_M)

    total = tl.zeros((NUM_SPLITS, BLOCK_N, BLOCK_M), tl.float32)
    for tile in tl.static_range(NUM_TILES):
        weights = queue[0]
        x = load_operand(x_ptr, row, is_input, tile * BLOCK_K, K, BLOCK_M, BLOCK_K, False)
        if HAS_NORM:
            wide = x.to(tl.float32)
            if SCALE_FIRST:
                wide *= tl.trans(tl.reshape(scale, (BLOCK_M // 8, 8)))[:, None, :, None]
            else:
                squares += sum_squares(wide, BLOCK_M, BLOCK_K, NUM_SPLITS)
            x = (wide * load_norm(norm_ptr, tile * BLOCK_K, K, BLOCK_K).to(tl.float32)).to(x.dtype)
        columns = tl.permute(as_operand(x, BLOCK_M, BLOCK_K, NUM_SPLITS), (0, 2, 1))
        total = dot(as_operand(weights, BLOCK_N, BLOCK_K, NUM_SPLITS), columns, total)
        if tile + DEPTH < NUM_TILES:
            first = (tile + DEPTH) * BLOCK_K
            queue = queue + (load_weights(weight_ptr, rows, is_row, first, K, BLOCK_M, BLOCK_N, BLOCK_K),)
        queue = queue[1:]

    result = tl.sum(total, 0)
    if HAS_NORM and not SCALE_FIRST:
        result = result * scale_of_rows(squares, eps, K, BLOCK_M)[None, :]
    return result


@jit
def one_row(
    x_ptr,
    weight_ptr,
    norm_ptr,
    rows,
    is_row,
    eps,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """`small_products` of a single row by FMA: [BLOCK_N, 1]."""
    NUM_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    column = tl.arange(0, BLOCK_K)
    queue = first_tiles(weight_ptr, rows, is_row, K, 1, BLOCK_N, BLOCK_K, DEPTH)
    norm = column
    if HAS_NORM:
        norm = tl.load(norm_ptr + column, mask=column < K, other=0.0)
    if PDL:
        wait_for_predecessor()

    squares = 0.0
    total = tl.zeros((BLOCK_N,), tl.float32)
    for tile in tl.static_range(NUM_TILES):
        place = tile * BLOCK_K + column
        x = tl.load(x_ptr + place, mask=place < K, other=0.0).to(tl.float32)
        if HAS_NORM:
            if tile > 0:
                norm = tl.load(norm_ptr + place, mask=place < K, other=0.0)
            squares += tl.sum(x * x, 0)
            x = x * norm.to(tl.float32)
        total += tl.sum(queue[0].to(tl.float32) * x[None, :], 1)
        if tile + DEPTH < NUM_TILES:
            first = (tile + DEPTH) * BLOCK_K
            queue = queue + (load_weights(weight_ptr, rows, is_row, first, K, 1, BLOCK_N, BLOCK_K),)
        queue = queue[1:]
    if HAS_NORM:
        total = total * tl.rsqrt(squares / K + eps)
    return total[:, None]


@jit
def small_products(
    x_ptr,
    weight_ptr,
    norm_ptr,
    rows,
    is_row,
    num_rows,
    eps,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """The given rows of the matrix [BLOCK_N] times rmsnorm(x): FP32 [BLOCK_N, BLOCK_M].

    Loads the first DEPTH tiles of weights and waits for the preceding kernel: exactly once.
    """
    if BLOCK_M == 1:
        return one_row(
            x_ptr, weight_ptr, norm_ptr, rows, is_row, eps, K, BLOCK_N, BLOCK_K, DEPTH, HAS_NORM, PDL
        )
    else:
        return several_rows(
            x_ptr, weight_ptr, norm_ptr, rows, is_row, num_rows, eps,
            K, BLOCK_M, BLOCK_N, BLOCK_K, DEPTH, NUM_SPLITS, HAS_NORM, PDL,
        )  # fmt: skip


@jit
def halves(values, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """The upper and the lower half of the rows of [BLOCK_N, BLOCK_M]."""
    return tl.split(tl.permute(tl.reshape(values, (2, BLOCK_N // 2, BLOCK_M)), (1, 2, 0)))


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
    DEPTH: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
    NUM_COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    first = tl.program_id(0) * NUM_COLUMNS
    rows = first + tl.arange(0, BLOCK_N)
    is_row = rows < N
    if GATED:
        # The gate's rows, then the same rows of up.
        index = tl.arange(0, BLOCK_N) % NUM_COLUMNS
        is_row = first + index < N
        rows = first + index + tl.where(tl.arange(0, BLOCK_N) < NUM_COLUMNS, 0, N)
    y = small_products(
        x_ptr, weight_ptr, norm_ptr, rows, is_row, num_rows, eps,
        K, BLOCK_M, BLOCK_N, BLOCK_K, DEPTH, NUM_SPLITS, HAS_NORM, PDL,
    )  # fmt: skip

    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate, up = halves(y, BLOCK_N, BLOCK_M)
        y = activate(gate, up, ACTIVATION)
    row = tl.arange(0, BLOCK_M)
    column = first + tl.arange(0, NUM_COLUMNS)
    places = row[None, :] * N + column[:, None]
    mask = (column < N)[:, None] & (row < num_rows)[None, :]
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=mask)


def choose_tiles(num_rows: int, num_weight_rows: int, K: int) -> dict[str, int]:
    """BLOCK_M, BLOCK_N, BLOCK_K, DEPTH, NUM_SPLITS and num_warps."""
    if num_rows == 1:
        block_n, limit, depth, num_warps = _look_up(ONE_ROW_TILES, K)
        return dict(
            BLOCK_M=1, BLOCK_N=block_n, BLOCK_K=_fit(K, limit), DEPTH=depth, NUM_SPLITS=1, num_warps=num_warps
        )
    tall = num_weight_rows >= DOT_TALL_MATRIX[0]
    block_n, limit, depth, num_warps = DOT_TALL_MATRIX[1] if tall else _look_up(DOT_TILES, K)
    return dict(
        BLOCK_M=max(next_power_of_2(num_rows), 8),
        BLOCK_N=block_n,
        BLOCK_K=max(_fit(K, limit), 32 * num_warps),
        DEPTH=depth,
        NUM_SPLITS=num_warps,
        num_warps=num_warps,
    )


def _look_up(table: tuple[tuple[int, tuple[int, int, int, int]], ...], K: int) -> tuple[int, int, int, int]:
    return next(tiles for longest, tiles in table if longest >= K)


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
    activation: str = "silu",
    out_dtype: torch.dtype | None = None,
    pdl: bool = False,
) -> Tensor:
    num_rows, K = x.shape
    N = weight.shape[0] // (2 if gated else 1)
    assert x.is_contiguous() and weight.is_contiguous() and (residual is None or residual.is_contiguous())
    y = torch.empty(num_rows, N, dtype=out_dtype or x.dtype, device=x.device)
    tiles = choose_tiles(num_rows, weight.shape[0], K)
    num_warps = tiles.pop("num_warps")
    _norm_linear_kernel[(ceil_div(weight.shape[0], tiles["BLOCK_N"]),)](
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
        ACTIVATION=activation,
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
    activation: str = "silu",
    out_dtype: torch.dtype | None = None,
    pdl: bool = False,
) -> Tensor:
    """x [M, K] -> [M, N] of out_dtype, by default x's. Shapes as above.

    gated: see `activate` for the activation.
    pdl: launch as part of a chain of dependent kernels, see `triton_support`; only where `has_pdl`.
    """
    op = _launch_norm_linear if x.shape[0] <= MAX_SMALL_ROWS and runs_triton(x) else norm_linear_ref
    return op(
        x, weight, norm_weight=norm_weight, eps=eps, bias=bias, residual=residual, gated=gated,
        activation=activation, out_dtype=out_dtype, pdl=pdl,
    )  # fmt: skip
