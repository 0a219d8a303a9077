"""Draw a token per row from whole logits, without filters, and move the slots on: two kernels, no host.

    temperature 0:  argmax(logits), the lowest id among equals
    else:           argmax of (logit - max) / temperature - log(E), the rule and the noise of `sampling`

logits [N, V] FP32; temperature [N or S] FP32; keys [N, 2] int32. Moves 4 * V bytes per row for about 30
operations per token: bound by memory, or with few rows by latency.

A program draws from a tile of the vocabulary relative to the tile's own largest logit; the second kernel
joins the tiles' winners, each moved by how far its tile's largest logit lies below the row's. That needs the
logits once where a search for the row's maximum first would need them twice. Rows are independent.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_vllm.kernels.sampling_noise import GOLDEN_32, MIX_32, UNIT, log_race_times
from tiny_vllm.kernels.triton_support import (
    ceil_div,
    jit,
    launch_dependents,
    launch_options,
    next_power_of_2,
    runs_triton,
    tl,
    wait_for_predecessor,
    with_fallback,
)

# 16 logits per thread; 128k tokens are 63 programs per row.
BLOCK = 2048
NUM_WARPS = 4
JOINED_PER_WARP = 512
GOLDEN = tl.constexpr(GOLDEN_32)
MIX_A = tl.constexpr(MIX_32[0])
MIX_B = tl.constexpr(MIX_32[1])
NOISE_UNIT = tl.constexpr(UNIT)


@dataclass(frozen=True, slots=True)
class SlotAdvance:
    """Where a decode step leaves its tokens. slots [N] int64; the others [S] int64.

    last_token[slot] becomes the token; computed_len[slot] and sample_position[slot] grow by one. A slot of S
    or more is padding and changes nothing.
    """

    slots: Tensor
    last_token: Tensor
    computed_len: Tensor
    sample_position: Tensor


def draw_tokens_ref(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    advance: SlotAdvance | None = None,
    pdl: bool = False,
) -> Tensor:
    """As torch operators. `pdl` is ignored."""
    if advance is not None:
        is_real = advance.slots < temperature.shape[0]
        temperature = temperature[torch.where(is_real, advance.slots, 0)] * is_real
    best = logits.amax(-1)
    token_ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    divisor = torch.where(temperature > 0, temperature, 1.0)[:, None]
    noise = torch.where(temperature[:, None] > 0, log_race_times(keys, token_ids), 0.0)
    tokens = ((logits - best[:, None]) / divisor - noise).argmax(-1)
    is_valid = best.isfinite()
    if advance is not None:
        slots = advance.slots[is_real]
        advance.last_token[slots] = torch.where(is_valid, tokens, 0)[is_real]
        advance.computed_len[slots] += 1
        advance.sample_position[slots] += 1
    return torch.where(is_valid, tokens, -1)


@jit
def log_race_time(key_low, key_high, token_ids):
    """log(E) as in `sampling_noise`: the same integers, FP32 logarithms."""
    x = (token_ids.to(tl.uint32) + GOLDEN) * (key_high.to(tl.uint32, bitcast=True) | 1)
    x = x ^ key_low.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * MIX_A
    x = (x ^ (x >> 15)) * tl.full((), MIX_B, tl.uint32)
    x = (x ^ (x >> 16)) & 0x7FFFFFFF
    u = x.to(tl.int32).to(tl.float32) * NOISE_UNIT + NOISE_UNIT / 2
    # log1p(-u) for all u: the logarithm of the rounded 1 - u, corrected by what the rounding lost.
    rest = 1.0 - u
    lost = tl.where(rest == 1.0, 1.0, u / tl.where(rest == 1.0, 1.0, 1.0 - rest))
    arrival = tl.where(rest == 1.0, u, -tl.log(rest) * lost)
    return tl.log(arrival)


@jit
def draw_from_tile(logits, tokens, last_token, temperature, key_low, key_high, is_random):
    """Of each row of a tile, tokens along the first dimension: its winner's score relative to the row's
    largest logit here, that logit (NaN if there is a NaN), and the winner.

    tokens: ids, of logits' rank. temperature and keys: one per row. is_random: whether a temperature is not
    0.
    """
    maximum = tl.max(logits, 0)
    base = tl.where((maximum > float("-inf")) & (maximum < float("inf")), maximum, 0.0)
    scores = logits - base
    if is_random:
        noise = log_race_time(key_low, key_high, tokens)
        drawn = scores / tl.where(temperature > 0, temperature, 1.0) - noise
        scores = tl.where(temperature > 0, drawn, scores)
    best = tl.max(scores, 0)
    winner = tl.min(tl.where(scores == best, tokens, last_token), 0)
    has_nan = tl.max((logits != logits).to(tl.int32), 0) > 0
    return best, tl.where(has_nan, float("nan"), maximum), winner


@jit
def _draw_tile_kernel(
    scores_ptr,
    maxima_ptr,
    winners_ptr,
    logits_ptr,
    temperature_ptr,
    keys_ptr,
    slots_ptr,
    num_slots,
    V,
    BLOCK: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (N, tiles)."""
    row = tl.program_id(0)
    tile = tl.program_id(1)
    if PDL:
        launch_dependents()
    entry = tl.load(slots_ptr + row) if HAS_SLOTS else row.to(tl.int64)
    temperature = tl.load(temperature_ptr + entry, mask=entry < num_slots, other=0.0)
    key_low = tl.load(keys_ptr + row * 2)
    key_high = tl.load(keys_ptr + row * 2 + 1)
    if PDL:
        wait_for_predecessor()
    token = tile * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row.to(tl.int64) * V + token, mask=token < V, other=float("-inf"))
    best, maximum, winner = draw_from_tile(
        logits, token, V - 1, temperature, key_low, key_high, temperature > 0
    )
    place = row * tl.num_programs(1) + tile
    tl.store(scores_ptr + place, best)
    tl.store(maxima_ptr + place, maximum)
    tl.store(winners_ptr + place, winner)


@jit
def _join_tiles_kernel(
    tokens_ptr,
    scores_ptr,
    maxima_ptr,
    winners_ptr,
    temperature_ptr,
    slots_ptr,
    last_token_ptr,
    computed_len_ptr,
    sample_position_ptr,
    num_slots,
    num_tiles,
    BLOCK_TILES: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    if PDL:
        launch_dependents()
    entry = tl.load(slots_ptr + row) if HAS_SLOTS else row.to(tl.int64)
    temperature = tl.load(temperature_ptr + entry, mask=entry < num_slots, other=0.0)
    if PDL:
        wait_for_predecessor()
    tile = tl.arange(0, BLOCK_TILES)
    place = row * num_tiles + tile
    is_tile = tile < num_tiles
    maxima = tl.load(maxima_ptr + place, mask=is_tile, other=float("-inf"))
    scores = tl.load(scores_ptr + place, mask=is_tile, other=float("-inf"))
    winners = tl.load(winners_ptr + place, mask=is_tile, other=0x7FFFFFFF)

    maximum = tl.max(maxima, 0)
    has_nan = tl.max((maxima != maxima).to(tl.int32), 0) > 0
    is_valid = (maximum > float("-inf")) & (maximum < float("inf")) & (has_nan == 0)
    base = tl.where(is_valid, maximum, 0.0)
    divisor = tl.where(temperature > 0, temperature, 1.0)
    scores = tl.where(temperature > 0, scores + (maxima - base) / divisor, maxima)
    best = tl.max(scores, 0)
    token = tl.min(tl.where((scores == best) & is_tile, winners, 0x7FFFFFFF), 0)
    token = token.to(tl.int64)
    tl.store(tokens_ptr + row, tl.where(is_valid, token, -1))
    if HAS_SLOTS:
        is_real = entry < num_slots
        tl.store(last_token_ptr + entry, tl.where(is_valid, token, 0), mask=is_real)
        computed_len = tl.load(computed_len_ptr + entry, mask=is_real, other=0)
        tl.store(computed_len_ptr + entry, computed_len + 1, mask=is_real)
        sample_position = tl.load(sample_position_ptr + entry, mask=is_real, other=0)
        tl.store(sample_position_ptr + entry, sample_position + 1, mask=is_real)


@dataclass(frozen=True, slots=True)
class TileWinners:
    """What `draw_from_tile` found. scores, maxima [N, tiles] FP32; winners [N, tiles] int32."""

    scores: Tensor
    maxima: Tensor
    winners: Tensor

    @classmethod
    def empty(cls, num_rows: int, num_tiles: int, device: torch.device) -> TileWinners:
        scores, maxima = torch.empty(2, num_rows, num_tiles, dtype=torch.float32, device=device)
        return cls(scores, maxima, torch.empty(num_rows, num_tiles, dtype=torch.int32, device=device))


def join_tiles(found: TileWinners, temperature: Tensor, advance: SlotAdvance | None, pdl: bool) -> Tensor:
    """The second kernel: as `draw_tokens`."""
    num_rows, num_tiles = found.winners.shape
    device = found.winners.device
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    block_tiles = next_power_of_2(num_tiles)
    _join_tiles_kernel[(num_rows,)](
        tokens,
        found.scores,
        found.maxima,
        found.winners,
        temperature,
        tokens if advance is None else advance.slots,
        tokens if advance is None else advance.last_token,
        tokens if advance is None else advance.computed_len,
        tokens if advance is None else advance.sample_position,
        temperature.shape[0],
        num_tiles,
        BLOCK_TILES=block_tiles,
        HAS_SLOTS=advance is not None,
        PDL=pdl,
        **launch_options(max(min(block_tiles // JOINED_PER_WARP, 8), 1), pdl),
    )
    return tokens


def launch_draw_tokens(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    advance: SlotAdvance | None,
    pdl: bool,
    block: int,
    num_warps: int,
) -> Tensor:
    """As `draw_tokens`, from tiles of `block` tokens."""
    num_rows, vocab_size = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32
    num_tiles = ceil_div(vocab_size, block)
    found = TileWinners.empty(num_rows, num_tiles, logits.device)
    _draw_tile_kernel[(num_rows, num_tiles)](
        found.scores,
        found.maxima,
        found.winners,
        logits,
        temperature,
        keys,
        found.winners if advance is None else advance.slots,
        temperature.shape[0],
        vocab_size,
        BLOCK=block,
        HAS_SLOTS=advance is not None,
        PDL=pdl,
        **launch_options(num_warps, pdl),
    )
    return join_tiles(found, temperature, advance, pdl)


@with_fallback(draw_tokens_ref)
def _launch_draw_tokens(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    advance: SlotAdvance | None = None,
    pdl: bool = False,
) -> Tensor:
    return launch_draw_tokens(logits, temperature, keys, advance, pdl, BLOCK, NUM_WARPS)


def draw_tokens(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    advance: SlotAdvance | None = None,
    pdl: bool = False,
) -> Tensor:
    """Token ids [N] int64, -1 where a row's largest logit is not finite.

    temperature: [N], or [S] and indexed by advance.slots. Where the token is -1, its slot gets 0.
    pdl: see `triton_support`; keys and temperature must then be complete before the preceding kernel starts.
    """
    op = _launch_draw_tokens if runs_triton(logits) else draw_tokens_ref
    return op(logits, temperature, keys, advance, pdl)
