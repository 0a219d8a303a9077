"""Sorts picked experts, on the device: which rows each expert has, cut into tiles of equal height.

experts [n] int32, one per row -> order [n], the rows sorted by expert, in their order within one; and, per
tile, its expert and where in `order` it begins and ends. Tiles hold up to `tile_rows` rows of one expert, and
those beyond the last are empty (begin = end). How many tiles there can be follows from the number of rows
alone, so the host needs to know nothing, and one CUDA graph serves all loads.

A program takes an expert and counts all of them itself, which is cheaper than another kernel: rows before
its own say where it begins, tiles before its own which are its tiles. The order is always the same.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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

# (most rows, rows counted at a time, warps)
BLOCKS = ((128, 128, 4), (1024, 1024, 4), (1 << 40, 4096, 8))


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """order [n]; experts, starts and ends [max_tiles]; all int32."""

    order: Tensor
    experts: Tensor
    starts: Tensor
    ends: Tensor
    tile_rows: int

    @staticmethod
    def empty(num_rows: int, num_experts: int, tile_rows: int, device: torch.device) -> ExpertTiles:
        """Memory for the tiles of any load."""
        # Each expert that has rows can end with a part of a tile.
        most_used = min(num_rows, num_experts)
        count = most_used + (num_rows - most_used) // tile_rows
        order = torch.empty(num_rows, dtype=torch.int32, device=device)
        experts, starts, ends = torch.empty(3, count, dtype=torch.int32, device=device)
        return ExpertTiles(order, experts, starts, ends, tile_rows)


def expert_tiles_ref(experts: Tensor, num_experts: int, tile_rows: int, pdl: bool = False) -> ExpertTiles:
    """By sorting, and on the host. `pdl` is ignored."""
    tiles = ExpertTiles.empty(len(experts), num_experts, tile_rows, experts.device)
    tiles.order.copy_(experts.sort(stable=True).indices)
    for column in (tiles.experts, tiles.starts, tiles.ends):
        column.zero_()
    start = tile = 0
    for expert, count in enumerate(experts.bincount(minlength=num_experts).tolist()):
        for first in range(start, start + count, tile_rows):
            tiles.experts[tile] = expert
            tiles.starts[tile] = first
            tiles.ends[tile] = min(first + tile_rows, start + count)
            tile += 1
        start += count
    return tiles


@jit
def _append_own(order_ptr, place, rows, is_own):
    """Store those of the rows that are the expert's, in order, from `place` on; return where they end."""
    flags = is_own.to(tl.int32)
    tl.store(order_ptr + place + tl.cumsum(flags, 0) - 1, rows, mask=is_own)
    return place + tl.sum(flags, 0)


@jit(do_not_specialize=("tile_starts_ptr", "tile_ends_ptr", "num_rows", "num_tiles", "tile_rows"))
def _expert_tiles_kernel(
    order_ptr,
    tile_experts_ptr,
    tile_starts_ptr,
    tile_ends_ptr,
    experts_ptr,
    num_rows,
    num_tiles,
    tile_rows,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (experts,)."""
    own = tl.program_id(0)
    if PDL:
        launch_dependents()
        wait_for_predecessor()
    index = tl.arange(0, BLOCK_EXPERTS)
    counts = tl.zeros((BLOCK_EXPERTS,), tl.int32)
    # Whole blocks need no mask, so that their loads have 16 bytes whatever the number of rows.
    rest = num_rows // BLOCK * BLOCK
    for first in tl.range(0, rest, BLOCK):
        expert = tl.load(experts_ptr + first + tl.arange(0, BLOCK))
        counts += tl.histogram(expert, BLOCK_EXPERTS)
    row = rest + tl.arange(0, BLOCK)
    is_row = row < num_rows
    last = tl.load(experts_ptr + row, mask=is_row, other=-1)
    counts += tl.histogram(tl.where(is_row, last, 0), BLOCK_EXPERTS, mask=is_row)
    tiles = (counts + tile_rows - 1) // tile_rows
    count = tl.sum(tl.where(index == own, counts, 0), 0)
    start = tl.sum(tl.where(index < own, counts, 0), 0)
    first_tile = tl.sum(tl.where(index < own, tiles, 0), 0)

    place = start
    for first in tl.range(0, rest, BLOCK):
        expert = tl.load(experts_ptr + first + tl.arange(0, BLOCK))
        place = _append_own(order_ptr, place, first + tl.arange(0, BLOCK), expert == own)
    _append_own(order_ptr, place, row, last == own)

    for first in tl.range(0, (count + tile_rows - 1) // tile_rows, 32):
        tile = first + tl.arange(0, 32)
        begin = start + tile * tile_rows
        is_tile = begin < start + count
        tl.store(tile_experts_ptr + first_tile + tile, own, mask=is_tile)
        tl.store(tile_starts_ptr + first_tile + tile, begin, mask=is_tile)
        tl.store(
            tile_ends_ptr + first_tile + tile, tl.minimum(begin + tile_rows, start + count), mask=is_tile
        )
    # The spare tiles: one program says so of all.
    if own == NUM_EXPERTS - 1:
        for first in tl.range(tl.sum(tiles, 0), num_tiles, 128):
            tile = first + tl.arange(0, 128)
            nothing = tl.zeros((128,), tl.int32)
            tl.store(tile_experts_ptr + tile, nothing, mask=tile < num_tiles)
            tl.store(tile_starts_ptr + tile, nothing, mask=tile < num_tiles)
            tl.store(tile_ends_ptr + tile, nothing, mask=tile < num_tiles)


@with_fallback(expert_tiles_ref)
def _launch_expert_tiles(experts: Tensor, num_experts: int, tile_rows: int, pdl: bool = False) -> ExpertTiles:
    tiles = ExpertTiles.empty(len(experts), num_experts, tile_rows, experts.device)
    block, num_warps = next((block, warps) for most, block, warps in BLOCKS if most >= len(experts))
    _expert_tiles_kernel[(num_experts,)](
        tiles.order,
        tiles.experts,
        tiles.starts,
        tiles.ends,
        experts,
        len(experts),
        len(tiles.experts),
        tile_rows,
        NUM_EXPERTS=num_experts,
        BLOCK=block,
        BLOCK_EXPERTS=max(next_power_of_2(num_experts), 2),
        PDL=pdl,
        **launch_options(num_warps, pdl),
    )
    return tiles


def expert_tiles(experts: Tensor, num_experts: int, tile_rows: int, pdl: bool = False) -> ExpertTiles:
    """experts [n] int32, n > 0. pdl: see `triton_support`."""
    op = _launch_expert_tiles if runs_triton(experts) else expert_tiles_ref
    return op(experts, num_experts, tile_rows, pdl)
