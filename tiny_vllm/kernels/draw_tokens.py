"""Draw a token per row from whole logits, without filters, and move the slots on: two kernels, no host.

    temperature 0:  argmax(logits), the lowest id among equals
    else:           argmax of (logit - max) / temperature - log(E), the rule and the noise of `sampling`

logits [N, V] FP32; temperature [N or S] FP32; keys [N, 2] int32. Moves 4 * V bytes per row for about 40
instructions per token with a temperature: bound by memory or integer units; with few rows by latency.

A program finds the winner of a tile of the vocabulary; the second kernel scores the tiles' winners anew,
relative to the row's largest logit, and joins them. That needs the logits once where a search for the row's
maximum first would need them twice. Rows are independent.

Two exact logarithms are 70 instructions. A tile's race is therefore run with rough ones, of 8, whose error
has a bound. Only tiles where that leaves the winner open, one in some 6,000, run it exactly.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_vllm.kernels.sampling_noise import GOLDEN_32, MIX_32, UNIT, log_race_times
from tiny_vllm.kernels.triton_support import (
    IS_INTERPRETED,
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
# Else the exact race, which hardly ever runs, takes so many that fewer programs fit a multiprocessor.
MAX_REGISTERS = 64
JOINED_PER_WARP = 128
GOLDEN = tl.constexpr(GOLDEN_32)
MIX_A = tl.constexpr(MIX_32[0])
MIX_B = tl.constexpr(MIX_32[1])
NOISE_UNIT = tl.constexpr(UNIT)
INVERSE_LOG_2 = tl.constexpr(1.4426950408889634)
# Of -log2(1 - u) in a rough time: twice the error of the hardware's logarithm.
ROUGH_LOSS = tl.constexpr(2.0**-21)
# How far apart, in bits, rough scores must be for the larger one to be the larger exact one: twice what each
# may be off by, which is half due to times (see `rough_log2_of_time`), half to logits and exact scores. Those
# count within 37 bits of the largest logit, and lose beyond.
ROUGHNESS = tl.constexpr(2.0**-12)
# Keeps the inverse of the smallest temperatures finite.
MAX_SHARPNESS = tl.constexpr(3e38)


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
def uniform(key_low, key_high, token_ids):
    """u in (0, 1) as in `sampling_noise`: the same bits."""
    x = (token_ids.to(tl.uint32) + GOLDEN) * (key_high.to(tl.uint32, bitcast=True) | 1)
    x = x ^ key_low.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * MIX_A
    x = (x ^ (x >> 15)) * tl.full((), MIX_B, tl.uint32)
    x = (x ^ (x >> 16)) & 0x7FFFFFFF
    return x.to(tl.int32).to(tl.float32) * NOISE_UNIT + NOISE_UNIT / 2


@jit
def log_of_time(u):
    """log(E) for E = -log1p(-u)."""
    # log1p(-u) for all u: the logarithm of the rounded 1 - u, corrected by what the rounding lost.
    rest = 1.0 - u
    lost = tl.where(rest == 1.0, 1.0, u / tl.where(rest == 1.0, 1.0, 1.0 - rest))
    arrival = tl.where(rest == 1.0, u, -tl.log(rest) * lost)
    return tl.log(arrival)


@jit
def _rough_log2(x):
    """Off by at most 2^-22, or 2^-22 of the result where x is not within (1/2, 2)."""
    if IS_INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@jit
def rough_log2_of_time(u):
    """log2(E / log(2)), off by less than ROUGHNESS / 4.

    -log2(1 - u) is good where u is large, the first terms of its series where u is small. Both are too small,
    the one by what is subtracted, the other by the terms it lacks, so the larger one is the better one.
    """
    series = u * (INVERSE_LOG_2 + u * (INVERSE_LOG_2 / 2 + u * (INVERSE_LOG_2 / 3)))
    return _rough_log2(tl.maximum(series, -ROUGH_LOSS - _rough_log2(1.0 - u)))


@jit
def draw_from_tile(logits, tokens, last_token, temperature, key_low, key_high, is_random):
    """Of each row of a tile, tokens along the first dimension: the largest logit, NaN if there is a NaN, and
    the winner.

    tokens: ids, of logits' rank. temperature and keys: one per row. is_random: whether a temperature is not
    0. The race is run roughly first. Exact times are needed only if two come in close together, which is
    also where a NaN would be found.
    """
    maximum = tl.max(logits, 0)
    base = tl.where((maximum > float("-inf")) & (maximum < float("inf")), maximum, 0.0)
    divisor = tl.where(temperature > 0, temperature, 1.0)
    # Filters leave many tiles without a token.
    is_random = is_random & (_largest(maximum) > float("-inf"))
    scores = logits - base
    rough = scores
    if is_random:
        sharpness = tl.minimum(INVERSE_LOG_2 / divisor, MAX_SHARPNESS)
        drawn = scores * sharpness - rough_log2_of_time(uniform(key_low, key_high, tokens))
        rough = tl.where(temperature > 0, drawn, scores)
    close = tl.max(rough, 0) - tl.where(temperature > 0, ROUGHNESS, 0.0)
    is_close = ~(rough < close)
    winner = tl.min(tl.where(is_close, tokens, 0x7FFFFFFF), 0)
    is_contested = winner < tl.max(tl.where(is_close, tokens, -1), 0)
    if _largest(is_contested.to(tl.int32)) > 0:
        if is_random:
            drawn = scores / divisor - log_of_time(uniform(key_low, key_high, tokens))
            scores = tl.where(temperature > 0, drawn, scores)
        winner = tl.min(tl.where(scores == tl.max(scores, 0), tokens, last_token), 0)
        has_nan = tl.max((logits != logits).to(tl.int32), 0) > 0
        maximum = tl.where(has_nan, float("nan"), maximum)
    return maximum, winner


@jit
def _largest(values):
    """Of one value per row, or of a single row's."""
    if len(values.shape) > 0:
        return tl.max(values, 0)
    else:
        return values


@jit(do_not_specialize=("logits_won_ptr", "slots_ptr", "num_slots"))
def _draw_tile_kernel(
    maxima_ptr,
    logits_won_ptr,
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
    maximum, winner = draw_from_tile(logits, token, V - 1, temperature, key_low, key_high, temperature > 0)
    place = row * tl.num_programs(1) + tile
    tl.store(maxima_ptr + place, maximum)
    tl.store(logits_won_ptr + place, tl.load(logits_ptr + row.to(tl.int64) * V + winner))
    tl.store(winners_ptr + place, winner)


@jit(do_not_specialize=("logits_won_ptr", "slots_ptr", "num_slots"))
def _join_tiles_kernel(
    tokens_ptr,
    maxima_ptr,
    logits_won_ptr,
    winners_ptr,
    temperature_ptr,
    keys_ptr,
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
    key_low = tl.load(keys_ptr + row * 2)
    key_high = tl.load(keys_ptr + row * 2 + 1)
    if PDL:
        wait_for_predecessor()
    tile = tl.arange(0, BLOCK_TILES)
    place = row * num_tiles + tile
    is_tile = tile < num_tiles
    maxima = tl.load(maxima_ptr + place, mask=is_tile, other=float("-inf"))
    logits = tl.load(logits_won_ptr + place, mask=is_tile, other=float("-inf"))
    winners = tl.load(winners_ptr + place, mask=is_tile, other=0x7FFFFFFF)

    maximum = tl.max(maxima, 0)
    has_nan = tl.max((maxima != maxima).to(tl.int32), 0) > 0
    is_valid = (maximum > float("-inf")) & (maximum < float("inf")) & (has_nan == 0)
    scores = logits - tl.where(is_valid, maximum, 0.0)
    if temperature > 0:
        scores = scores / temperature - log_of_time(uniform(key_low, key_high, winners))
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
    """What tiles found. maxima, logits (the winners') [N, tiles] FP32; winners [N, tiles] int32."""

    maxima: Tensor
    logits: Tensor
    winners: Tensor

    @classmethod
    def empty(cls, num_rows: int, num_tiles: int, device: torch.device) -> TileWinners:
        maxima, logits = torch.empty(2, num_rows, num_tiles, dtype=torch.float32, device=device)
        return cls(maxima, logits, torch.empty(num_rows, num_tiles, dtype=torch.int32, device=device))


def join_tiles(
    found: TileWinners, temperature: Tensor, keys: Tensor, advance: SlotAdvance | None, pdl: bool
) -> Tensor:
    """The second kernel: as `draw_tokens`."""
    num_rows, num_tiles = found.winners.shape
    device = found.winners.device
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    block_tiles = next_power_of_2(num_tiles)
    _join_tiles_kernel[(num_rows,)](
        tokens,
        found.maxima,
        found.logits,
        found.winners,
        temperature,
        keys,
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
        found.maxima,
        found.logits,
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
        **launch_options(num_warps, pdl, max_registers=MAX_REGISTERS),
    )
    return join_tiles(found, temperature, keys, advance, pdl)


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
