"""Draw a token per row from x W^T without writing the logits: the tiled product, each of whose tiles draws.

    logits = x W^T;    tokens as `draw_tokens` draws them from the logits

x [M, K], W [V, K]. The logits stay in the registers of the program that computes them, as FP32 sums; what it
writes is the winner of its tile, and the kernel that joins winners is `draw_tokens`'. Spares 8 * M * V bytes
of writing and reading logits, and one kernel; the noise is computed while other programs wait for weights.

Not for few rows, whose tiles are so small that there would be tens of thousands of winners to join, nor for
more than 32, where products that write their logits are faster, greedy or not. Those are what
`hopper_linear/draw_product.cu` is for, in CUDA C++ for Hopper.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

from tiny_vllm.kernels.draw_tokens import (
    SlotAdvance,
    TileWinners,
    draw_from_tile,
    draw_tokens,
    join_tiles,
)
from tiny_vllm.kernels.hopper_linear import draw_launch
from tiny_vllm.kernels.tiled_linear import (
    Table,
    Tiles,
    fit_tiles,
    has_tiles,
    look_up,
    multiply_tiles,
    product_operands,
    tiled_linear,
)
from tiny_vllm.kernels.triton_support import (
    ceil_div,
    jit,
    launch_dependents,
    launch_options,
    tl,
    with_fallback,
)

# (most rows, tiles), as in `tiled_linear`; None, and more rows: the logits are written. Behind each, us on an
# H200 for Llama-3.2-1B's LM head, greedy and at temperature 0.6, and with the logits written.
DRAW_TILES: Table = (
    (8, None),
    (16, Tiles(128, 128, 3, 0, 8)),  # 128.0, 130.7; 133.3, 140.5
    (32, Tiles(64, 64, 5, 0, 4)),  # 134.9, 142.9; 140.9, 152.2
)  # 64 rows, with the tiles of 32: 157.8, 185.9; 153.9, 174.8
# Rows that Hopper's kernel in CUDA C++ gets where it can take them (`draw_launch.obstacle`). Of the time
# without it, it takes, on an H200, greedy and at temperature 0.6, with 64 / 128 / 256 rows: of Llama-3.2-1B's
# LM head 0.87, 0.89 / 0.77, 0.83 / 0.79, 0.92; Qwen3-0.6B's 0.77, 0.81 / 0.70, 0.82 / 0.64, 0.80;
# Llama-3.1-8B's 0.93, 0.94 / 0.86, 0.89 / 0.97, 0.98. Up to 32 rows nothing is gained, and 192 are computed
# as 256: 0.96, 1.04; 0.73, 0.91; 1.06, 1.09.
HOPPER_ROWS: Container[int] = frozenset({*range(33, 129), *range(193, 257)})


def draw_from_linear_ref(
    x: Tensor,
    weight: Tensor,
    temperature: Tensor,
    keys: Tensor,
    advance: SlotAdvance | None = None,
    pdl: bool = False,
) -> Tensor:
    """With the logits written."""
    logits = tiled_linear(x, weight, out_dtype=torch.float32, pdl=pdl)
    return draw_tokens(logits, temperature, keys, advance, pdl)


@jit
def _draw_from_product_kernel(
    maxima_ptr,
    logits_won_ptr,
    winners_ptr,
    x_ptr,
    weight_ptr,
    weight_address,
    temperature_ptr,
    keys_ptr,
    slots_ptr,
    num_rows,
    num_slots,
    N,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    AHEAD: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of x's rows, of W's rows). TMA: x_ptr and weight_ptr are tensor descriptors."""
    if PDL:
        launch_dependents()
    first_m = tl.program_id(0) * BLOCK_M
    tile = tl.program_id(1)
    row = first_m + tl.arange(0, BLOCK_M)
    is_row = row < num_rows
    NUM_STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    logits, _ = multiply_tiles(
        x_ptr, weight_ptr, weight_address, first_m, tile * BLOCK_N, num_rows, N, 0, NUM_STEPS,
        K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, False, TMA, AHEAD, PDL,
    )  # fmt: skip

    entry = tl.load(slots_ptr + row, mask=is_row, other=0) if HAS_SLOTS else row.to(tl.int64)
    temperature = tl.load(temperature_ptr + entry, mask=is_row & (entry < num_slots), other=0.0)
    key_low = tl.load(keys_ptr + row * 2, mask=is_row, other=0)
    key_high = tl.load(keys_ptr + row * 2 + 1, mask=is_row, other=0)
    token = (tile * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    logits = tl.where(token < N, logits, float("-inf"))
    is_random = tl.max(temperature, 0) > 0
    maximum, winner = draw_from_tile(
        logits, token, N - 1, temperature[None, :], key_low[None, :], key_high[None, :], is_random
    )
    place = row * tl.num_programs(1) + tile
    tl.store(maxima_ptr + place, maximum, mask=is_row)
    logit_won = tl.max(tl.where(token == winner[None, :], logits, float("-inf")), 0)
    tl.store(logits_won_ptr + place, logit_won, mask=is_row)
    tl.store(winners_ptr + place, winner, mask=is_row)


def launch_draw(
    x: Tensor,
    weight: Tensor,
    temperature: Tensor,
    keys: Tensor,
    advance: SlotAdvance | None,
    tiles: Tiles,
    pdl: bool,
) -> Tensor:
    """As `draw_from_linear`, with these tiles."""
    num_rows, K = x.shape
    N = weight.shape[0]
    operands = product_operands(x, weight, tiles, pdl)
    grid = (ceil_div(num_rows, operands.block_m), ceil_div(N, tiles.block_n))
    found = TileWinners.empty(num_rows, grid[1], x.device)
    _draw_from_product_kernel[grid](
        found.maxima,
        found.logits,
        found.winners,
        operands.x,
        operands.weight,
        weight,
        temperature,
        keys,
        found.winners if advance is None else advance.slots,
        num_rows,
        temperature.shape[0],
        N,
        K=K,
        BLOCK_M=operands.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        STAGES=tiles.stages,
        TMA=operands.tma,
        AHEAD=tiles.ahead,
        HAS_SLOTS=advance is not None,
        PDL=pdl,
        **launch_options(tiles.num_warps, pdl),
    )
    return join_tiles(found, temperature, keys, advance, pdl)


@with_fallback(draw_from_linear_ref)
def _launch_draw_from_linear(
    x: Tensor,
    weight: Tensor,
    temperature: Tensor,
    keys: Tensor,
    advance: SlotAdvance | None = None,
    pdl: bool = False,
) -> Tensor:
    tiles = look_up(DRAW_TILES, x.shape[0])
    if tiles is None:
        return draw_from_linear_ref(x, weight, temperature, keys, advance, pdl)
    return launch_draw(x, weight, temperature, keys, advance, fit_tiles(tiles, x, weight), pdl)


def draw_from_linear(
    x: Tensor,
    weight: Tensor,
    temperature: Tensor,
    keys: Tensor,
    advance: SlotAdvance | None = None,
    pdl: bool = False,
) -> Tensor:
    """Token ids [M] int64, -1 where a row's logits are not finite; see `draw_tokens` for the arguments."""
    if x.shape[0] in HOPPER_ROWS:
        drawn = draw_launch.draw_product(x, weight, temperature, keys, advance, pdl)
        if drawn is not None:
            return drawn
    op: Any = _launch_draw_from_linear if has_tiles(x) else draw_from_linear_ref
    tokens: Tensor = op(x, weight, temperature, keys, advance, pdl)
    return tokens
