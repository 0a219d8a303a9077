"""Products of some dozen to some hundred rows: tiles through shared memory, K split among programs.

    parts[s] = x W^T over part s of K; their sum is the product                          `split_linear`
    y = act(x Wg^T + bg) * (x Wu^T + bu), or x W^T + b                                   `tiled_linear`

x [M, K], W [N, K] (gated: [2N, K], gate rows then up rows), b one value per row of W, y [M, N] of x's type or
FP32, parts [S, M, N] FP32 (of x's type where S is 1 and cuBLAS computes). FP32 accumulation. Moves 2 * N * K
bytes of BF16 weights for 2 * M * N * K FLOPs: memory-bound up to some two hundred rows, so the tiles are
chosen for bytes in flight, not for arithmetic.

Design. Rows of W are the operand of 64 and more rows that Hopper's tensor cores want, rows of x the other
one, so that few rows of x waste nothing. A matrix of 2,048 rows has 32 such tiles, a quarter of the
multiprocessors of a large GPU: K is split among programs, and the next kernel, which must see whole rows
anyway to normalise them, or whole heads to rotate them, adds the parts in a fixed order. Before the wait for
the preceding kernel the first columns of W are brought to the L2 cache: 0.2 to 0.4 us of each product. On
Hopper tiles come by TMA: up to 0.4 us. In `norm_linear` every program reads all of x, which outweighs the
matrix from some ten rows on.

Rejected: rows of x as the operand of 64 rows (equal at best, except where cuBLAS beats both).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_vllm.kernels.gated_activation import activate, gated_activation_ref
from tiny_vllm.kernels.triton_support import (
    IS_INTERPRETED,
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


@dataclass(frozen=True, slots=True)
class Tiles:
    """What a program computes and how: rows of W, values of K per step, steps whose tiles are loaded ahead,
    columns of W brought to L2 before the wait, warps; at most so many rows of x."""

    block_n: int
    block_k: int
    stages: int
    ahead: int
    num_warps: int
    max_block_m: int = 128

    def block_m(self, num_rows: int) -> int:
        """Rows of x of a program."""
        return min(max(next_power_of_2(num_rows), 16), self.max_block_m)


# (most rows of x, tiles); None: cuBLAS. Behind each, us on an H200 with cold weights in a chain of the same
# product, and cuBLAS's; benchmarks/results/2026-11-29-h200-chain-tiles.json has what else was measured.
Table = tuple[tuple[int, Tiles | None], ...]
# QKV, output and down of Llama-3.2-1B, without the kernel that adds the parts.
SPLIT_TILES: Table = (
    (16, Tiles(64, 128, 4, 128, 4)),  # 5.4, 3.8, 10.1; cuBLAS 6.6, 6.1, 13.8
    (32, Tiles(64, 128, 4, 128, 4)),  # 5.7, 4.1, 10.6; 6.7, 6.2, 14.1
    (64, Tiles(64, 128, 4, 128, 4)),  # 6.0, 4.4, 10.8; 6.9, 6.3, 14.4
    (128, Tiles(64, 128, 3, 128, 4)),  # 7.6, 5.6, 13.8; 7.3, 6.7, 17.2
)  # 256 rows: 10.8, 7.4, 23.2; 8.2, 6.9, 21.0
GATED_TILES: Table = (
    (64, Tiles(64, 128, 4, 128, 4)),  # 16 rows 17.3, 32 17.9, 64 18.5; cuBLAS without SiLU 18.7, 18.8, 19.4
    (128, Tiles(64, 64, 5, 128, 8)),  # 20.2; 21.2
    (256, Tiles(128, 64, 4, 0, 8)),  # 26.4; 25.9
)
# Matrices of many rows. (fewest, ...) as above; the LM head has 128,256 rows and a result in FP32.
MANY_WEIGHT_ROWS = 32768
TALL_TILES: Table = (
    (16, Tiles(128, 128, 3, 0, 8)),  # 123.8; cuBLAS, result in BF16, 125.7
    (32, Tiles(64, 64, 5, 0, 4)),  # 127.6; 130.3
    (64, Tiles(128, 64, 4, 128, 4)),  # 136.3; 140.0
)  # 128 rows 162, 256 rows 232; 142, 188
# K is split until there would be more programs than so many: the multiprocessors of an H200.
MOST_PROGRAMS = 132
MIN_TILES_PER_SPLIT = 2
# What a program may take of shared memory where the device does not say: an H200's limit.
SHARED_BYTES = 232448
# For what the compiler needs besides the tiles.
SPARE_SHARED_BYTES = 2048
FEWEST_STAGES = 3
SHORTEST_BLOCK_K = 32


def split_linear_ref(x: Tensor, weight: Tensor, pdl: bool = False) -> Tensor:
    """One part, of x's type. `pdl` is ignored."""
    return F.linear(x, weight).unsqueeze(0)


def tiled_linear_ref(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    gated: bool = False,
    activation: str = "silu",
    out_dtype: torch.dtype | None = None,
    pdl: bool = False,
) -> Tensor:
    """As separate operators. `pdl` is ignored."""
    if out_dtype == torch.float32 and x.is_cuda and x.dtype != torch.float32 and not gated:
        # cuBLAS writes its FP32 sums as they are.
        y = torch.mm(x, weight.T, out_dtype=torch.float32)
        return y if bias is None else y.add_(bias)
    y = F.linear(x, weight, bias)
    return (gated_activation_ref(y, activation) if gated else y).to(out_dtype or x.dtype)


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
def multiply_tiles(
    x_ptr,
    weight_ptr,
    weight_address,
    first_m,
    first_n,
    num_rows,
    N,
    first_tile,
    num_tiles,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    TMA: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """FP32 [BLOCK_N, BLOCK_M] of W x^T over tiles first_tile ... of K, and the same of the rows of up.

    Brings the first columns of W to L2 and waits for the preceding kernel: exactly once.
    """
    row = first_m + tl.arange(0, BLOCK_M)
    column = first_n + tl.arange(0, BLOCK_N)
    if PDL:
        if AHEAD > 0:
            # A line is 128 bytes.
            lines = first_tile * BLOCK_K + tl.arange(0, AHEAD // 64) * 64
            address = weight_address + column.to(tl.int64)[:, None] * K + lines[None, :]
            mask = (column < N)[:, None] & (lines < K)[None, :]
            prefetch(address, mask)
            if GATED:
                prefetch(address + tl.cast(N, tl.int64) * K, mask)
        wait_for_predecessor()

    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    total_up = total
    NUM_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    for tile in tl.range(first_tile, tl.minimum(first_tile + num_tiles, NUM_TILES), num_stages=STAGES):
        k = tile * BLOCK_K
        columns = k + tl.arange(0, BLOCK_K)
        x = tl.trans(_load_tile(x_ptr, row, row < num_rows, first_m, columns, k, K, BLOCK_K, TMA))
        weights = _load_tile(weight_ptr, column, column < N, first_n, columns, k, K, BLOCK_K, TMA)
        total = dot(weights, x, total)
        if GATED:
            up = _load_tile(weight_ptr, column + N, column < N, first_n + N, columns, k, K, BLOCK_K, TMA)
            total_up = dot(up, x, total_up)
    return total, total_up


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
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TMA: tl.constexpr,
    AHEAD: tl.constexpr,
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
    PER_SPLIT: tl.constexpr = ((K + BLOCK_K - 1) // BLOCK_K + SPLITS - 1) // SPLITS
    total, total_up = multiply_tiles(
        x_ptr, weight_ptr, weight_address, first_m, first_n, num_rows, N, split * PER_SPLIT, PER_SPLIT,
        K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GATED, TMA, AHEAD, PDL,
    )  # fmt: skip

    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if HAS_BIAS:
            total_up += tl.load(bias_ptr + N + column, mask=column < N, other=0.0).to(tl.float32)[:, None]
        total = activate(total, total_up, ACTIVATION)
    mask = (row < num_rows)[:, None] & (column < N)[None, :]
    place = (split * num_rows + row).to(tl.int64)[:, None] * N + column[None, :]
    tl.store(y_ptr + place, tl.trans(total).to(y_ptr.dtype.element_ty), mask=mask)


def choose_split_tiles(num_rows: int) -> Tiles | None:
    """For `split_linear`; None where cuBLAS is faster."""
    return look_up(SPLIT_TILES, num_rows)


def choose_tiles(num_rows: int, num_weight_rows: int, gated: bool) -> Tiles | None:
    """For `tiled_linear`; None where cuBLAS is faster."""
    if gated:
        return look_up(GATED_TILES, num_rows)
    return look_up(TALL_TILES if num_weight_rows >= MANY_WEIGHT_ROWS else SPLIT_TILES, num_rows)


def look_up(table: Table, num_rows: int) -> Tiles | None:
    return next((tiles for most, tiles in table if most >= num_rows), None)


def count_splits(N: int, K: int, tiles: Tiles) -> int:
    """Into how many parts K is split, a power of two."""
    splits = 1
    num_tiles, steps = ceil_div(N, tiles.block_n), ceil_div(K, tiles.block_k)
    while 2 * splits * num_tiles <= MOST_PROGRAMS and steps >= 2 * splits * MIN_TILES_PER_SPLIT:
        splits *= 2
    return splits


def fit_stages(tiles: Tiles, block_m: int, num_programs: int, gated: bool, shared_bytes: int) -> Tiles:
    """With as many stages as fit into shared memory, of half as many values of K if only few would fit.

    More programs than multiprocessors: two share one, instead of a second round with most idle.
    """
    if num_programs > MOST_PROGRAMS:
        shared_bytes //= 2
    row_bytes = 2 * (block_m + tiles.block_n * (2 if gated else 1))
    block_k = tiles.block_k
    while True:
        stages = (shared_bytes - SPARE_SHARED_BYTES) // (row_bytes * block_k)
        if stages >= min(FEWEST_STAGES, tiles.stages) or block_k == SHORTEST_BLOCK_K:
            return replace(tiles, block_k=block_k, stages=max(min(stages, tiles.stages), 1))
        block_k //= 2


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """How much shared memory a program may take."""
    if device.type != "cuda":
        return SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


@dataclass(frozen=True, slots=True)
class Operands:
    """What the kernels take as x and weight: tensor descriptors with tma, else the tensors."""

    x: Any
    weight: Any
    block_m: int
    tma: bool


def product_operands(x: Tensor, weight: Tensor, tiles: Tiles, pdl: bool) -> Operands:
    """x [M, K], weight [N, K], contiguous."""
    num_rows, K = x.shape
    assert x.is_contiguous() and weight.is_contiguous()
    block_m = tiles.block_m(num_rows)
    # GPUs that start kernels early have TMA, which wants rows of whole 16 bytes.
    if not pdl or K * x.element_size() % 16:
        return Operands(x, weight, block_m, tma=False)
    from triton.tools.tensor_descriptor import TensorDescriptor

    return Operands(
        TensorDescriptor.from_tensor(x, [block_m, tiles.block_k]),
        TensorDescriptor.from_tensor(weight, [tiles.block_n, tiles.block_k]),
        block_m,
        tma=True,
    )


def launch_tiled_product(
    x: Tensor,
    weight: Tensor,
    tiles: Tiles,
    *,
    splits: int = 1,
    bias: Tensor | None = None,
    gated: bool = False,
    activation: str = "silu",
    out_dtype: torch.dtype | None = None,
    pdl: bool = False,
) -> Tensor:
    """[SPLITS, M, N]."""
    num_rows, K = x.shape
    N = weight.shape[0] // (2 if gated else 1)
    assert splits == 1 or not (gated or bias is not None), "parts are sums, nothing else"
    operands = product_operands(x, weight, tiles, pdl)
    grid = (ceil_div(num_rows, operands.block_m), ceil_div(N, tiles.block_n), splits)
    y = torch.empty(splits, num_rows, N, dtype=out_dtype or x.dtype, device=x.device)
    _tiled_product_kernel[grid](
        y,
        operands.x,
        operands.weight,
        weight,
        x if bias is None else bias,
        num_rows,
        N,
        K=K,
        BLOCK_M=operands.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        SPLITS=splits,
        STAGES=tiles.stages,
        GATED=gated,
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
        TMA=operands.tma,
        AHEAD=tiles.ahead,
        PDL=pdl,
        **launch_options(tiles.num_warps, pdl),
    )
    return y


@with_fallback(split_linear_ref)
def _launch_split_linear(x: Tensor, weight: Tensor, pdl: bool = False) -> Tensor:
    tiles = choose_split_tiles(x.shape[0])
    if tiles is None:
        return split_linear_ref(x, weight)
    splits = count_splits(weight.shape[0], weight.shape[1], tiles)
    tiles = fit_tiles(tiles, x, weight, splits=splits)
    return launch_tiled_product(x, weight, tiles, splits=splits, out_dtype=torch.float32, pdl=pdl)


@with_fallback(tiled_linear_ref)
def _launch_tiled_linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    gated: bool = False,
    activation: str = "silu",
    out_dtype: torch.dtype | None = None,
    pdl: bool = False,
) -> Tensor:
    tiles = choose_tiles(x.shape[0], weight.shape[0], gated)
    if tiles is None:
        return tiled_linear_ref(x, weight, bias=bias, gated=gated, activation=activation, out_dtype=out_dtype)
    tiles = fit_tiles(tiles, x, weight, gated=gated)
    return launch_tiled_product(
        x, weight, tiles, bias=bias, gated=gated, activation=activation, out_dtype=out_dtype, pdl=pdl
    ).squeeze(0)


def fit_tiles(tiles: Tiles, x: Tensor, weight: Tensor, *, splits: int = 1, gated: bool = False) -> Tiles:
    """The tiles as they fit the device."""
    block_m = tiles.block_m(x.shape[0])
    num_weight_rows = weight.shape[0] // (2 if gated else 1)
    num_programs = ceil_div(x.shape[0], block_m) * ceil_div(num_weight_rows, tiles.block_n) * splits
    return fit_stages(tiles, block_m, num_programs, gated, _shared_bytes(x.device))


def has_tiles(x: Tensor) -> bool:
    """FP32 is for exactness, where torch is as good."""
    return runs_triton(x) and x.dtype != torch.float32


def split_linear(x: Tensor, weight: Tensor, pdl: bool = False) -> Tensor:
    """x [M, K], weight [N, K] -> [S, M, N], to be summed over S. pdl: see `triton_support`."""
    op = _launch_split_linear if has_tiles(x) else split_linear_ref
    return op(x, weight, pdl)


def tiled_linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    gated: bool = False,
    activation: str = "silu",
    out_dtype: torch.dtype | None = None,
    pdl: bool = False,
) -> Tensor:
    """x [M, K], weight [N or 2N, K] -> [M, N] of out_dtype, by default x's. pdl: see `triton_support`."""
    op = _launch_tiled_linear if has_tiles(x) else tiled_linear_ref
    return op(x, weight, bias=bias, gated=gated, activation=activation, out_dtype=out_dtype, pdl=pdl)
