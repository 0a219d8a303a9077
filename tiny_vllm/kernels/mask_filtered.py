"""top_k, top_p and min_p as masks: what they drop becomes -inf, so that any draw over the row leaves it out.

Per row, with x = (logit - max) / temperature and the order "larger logit first, then lower id":
    top_k   the first k tokens stay
    top_p   tokens stay before which the mass exp(x) is below top_p times that of the tokens top_k left
    min_p   tokens with x >= log(min_p) stay
The first token always stays. Rows of temperature 0, and rows whose largest logit is not finite, stay whole.

logits [N, V] FP32, changed in place; temperature, top_p, min_p [N] FP32; top_k [N] int64. Sums of masses are
FP64, so that the border does not depend on how a sum was split.

Five kernels, none of which sorts. FP32 values map to integers of the same order, their keys:
    1  tiles       the largest value of every line of LINE tokens; largest value and mass of every tile
    2  bound       from these few values, one that the border cannot lie below: if k lines, or lines with
                   enough mass, reach a value, then at least as many tokens do
    3  candidates  the tokens from the bound on, usually little more than what stays
    4  border      the lowest key that stays, by quartering its range: each pass counts or weighs the
                   candidates above three keys; over the whole row where they were too many
    5  mask        what is below the border; of several tokens at the border, the last ones if not all fit
Reads the row's V * 4 bytes three times, twice from L2. Rejected: sorting the values, which is what the
reference does; searching the whole row in one program, 17 passes per filter, each bound by latency.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
from torch import Tensor

from tiny_vllm.kernels.triton_support import (
    ceil_div,
    jit,
    launch_options,
    next_power_of_2,
    runs_triton,
    tl,
    with_fallback,
)

TILE = 2048
LINE = 64
TILE_WARPS = 4
# Candidates of a row that are kept; a pass over them is one step of a program.
MAX_CANDIDATES = 4096
# A program searching for the border: (values a thread has in flight, threads).
VALUES = tl.constexpr(16)
THREADS = 512
SEARCH_WARPS = 16
# Below the key of every FP32 value.
LOWEST_KEY = tl.constexpr(-(2**31))


def count_kept(
    scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, total: Tensor, vocab_size: int
) -> Tensor:
    """How many leading tokens stay, at least 1: [N] int64.

    scaled: [N, W] FP32, x of the first W tokens in the order above, the first being 0. total: [N] FP64, mass
    of the vocabulary; it matters only in rows with top_p and without top_k (V or more).
    """
    width = scaled.shape[-1]
    mass = scaled.double().exp()
    mass_through = mass.cumsum(-1)
    mass_of_top_k = mass_through.gather(-1, top_k.clamp(max=width)[:, None] - 1).squeeze(-1)
    whole = torch.where(top_k < vocab_size, mass_of_top_k, total)[:, None]
    top_p = top_p[:, None]
    kept = torch.arange(width, device=scaled.device) < top_k[:, None]
    kept &= (top_p >= 1) | (mass_through - mass < top_p * whole)
    kept &= scaled >= min_p.log()[:, None]
    return kept.sum(-1).clamp(min=1)


def is_kept(logits: Tensor, border: Tensor, num_kept: Tensor) -> Tensor:
    """Mask [N, V] of the first num_kept [N, 1] tokens of every row. border: [N, 1], the last one's value."""
    is_above, is_equal = logits > border, logits == border
    num_equal = num_kept - is_above.sum(-1, keepdim=True)
    return is_above | (is_equal & (is_equal.cumsum(-1) <= num_equal))


def mask_filtered_ref(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> None:
    """By sorting. Does not wait for the device either."""
    values = logits.sort(dim=-1, descending=True).values
    best = values[:, :1]
    scaled = (values - best) / torch.where(temperature > 0, temperature, 1.0)[:, None]
    total = scaled.exp().sum(-1, dtype=torch.float64)
    num_kept = count_kept(scaled, top_k, top_p, min_p, total, logits.shape[-1])[:, None]
    kept = is_kept(logits, values.gather(-1, num_kept - 1), num_kept)
    is_filtered = (temperature > 0)[:, None] & best.isfinite()
    logits.masked_fill_(~kept & is_filtered, -torch.inf)


@jit
def _key_of(values):
    """int32 in the order of the values; the two zeros are equal."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def _mass_of(key, maximum, temperature):
    """Of a token with this key; the largest logit has mass 1."""
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    return tl.exp((bits.to(tl.float32, bitcast=True) - maximum) / temperature).to(tl.float64)


@jit
def _above(
    values_ptr,
    count,
    first,
    second,
    third,
    maximum,
    temperature,
    WEIGHED: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Values whose keys are above each of three borders, FP64: their number or, WEIGHED, their mass."""
    place = tl.arange(0, THREADS)[:, None] * VALUES + tl.arange(0, VALUES)[None, :]
    above_first = tl.zeros((THREADS,), tl.float64)
    above_second = tl.zeros((THREADS,), tl.float64)
    above_third = tl.zeros((THREADS,), tl.float64)
    for start in range(0, count, THREADS * VALUES):
        token = start + place
        values = tl.load(values_ptr + token, mask=token < count, other=float("-inf"))
        keys = tl.where(token < count, _key_of(values), LOWEST_KEY)
        if WEIGHED:
            weights = tl.exp((values - maximum) / temperature)
        else:
            weights = tl.full((THREADS, VALUES), 1.0, tl.float32)
        weights = weights.to(tl.float64)
        above_first += tl.sum(tl.where(keys > first, weights, 0.0), 1)
        above_second += tl.sum(tl.where(keys > second, weights, 0.0), 1)
        above_third += tl.sum(tl.where(keys > third, weights, 0.0), 1)
    return tl.sum(above_first, 0), tl.sum(above_second, 0), tl.sum(above_third, 0)


@jit
def _find_border(
    values_ptr, count, low, high, limit, maximum, temperature, WEIGHED: tl.constexpr, THREADS: tl.constexpr
):
    """The lowest key from low to high (int64) above which there is less than the limit, or high."""
    while low < high:
        quarter = (high - low) >> 2
        first = low + quarter
        second = low + 2 * quarter
        third = low + 3 * quarter
        above_first, above_second, above_third = _above(
            values_ptr,
            count,
            first.to(tl.int32),
            second.to(tl.int32),
            third.to(tl.int32),
            maximum,
            temperature,
            WEIGHED,
            THREADS,
        )
        # What is above falls from border to border.
        if above_first < limit:
            high = first
        elif above_second < limit:
            low = first + 1
            high = second
        elif above_third < limit:
            low = second + 1
            high = third
        else:
            low = third + 1
    return high


@jit
def _tiles_kernel(
    line_maxima_ptr,
    tile_maxima_ptr,
    tile_masses_ptr,
    logits_ptr,
    temperature_ptr,
    V,
    TILE: tl.constexpr,
    LINE: tl.constexpr,
):
    """Grid (N, tiles). The maximum of a tile that holds NaN is NaN; masses are relative to its maximum."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        lines = tl.arange(0, TILE // LINE)
        token = tile * TILE + lines[:, None] * LINE + tl.arange(0, LINE)[None, :]
        values = tl.load(logits_ptr + row * V + token, mask=token < V, other=float("-inf"))
        line_maxima = tl.max(values, 1)
        maximum = tl.max(line_maxima, 0)
        base = tl.where((maximum > float("-inf")) & (maximum < float("inf")), maximum, 0.0)
        mass = tl.sum(tl.sum(tl.exp((values - base) / temperature).to(tl.float64), 1), 0)
        has_nan = tl.max(tl.max((values != values).to(tl.int32), 1), 0) > 0
        place = row * tl.num_programs(1) + tile
        tl.store(line_maxima_ptr + place * (TILE // LINE) + lines, line_maxima)
        tl.store(tile_maxima_ptr + place, tl.where(has_nan, float("nan"), maximum))
        tl.store(tile_masses_ptr + place, mass)


@jit(do_not_specialize=("num_candidates_ptr", "top_p_ptr", "min_p_ptr"))
def _bound_kernel(
    maximum_ptr,
    total_ptr,
    bound_ptr,
    num_candidates_ptr,
    line_maxima_ptr,
    tile_maxima_ptr,
    tile_masses_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    V,
    num_tiles,
    num_lines,
    BLOCK_TILES: tl.constexpr,
    BLOCK_LINES: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
):
    """Grid (N,). The row's maximum, NaN if it stays whole; its mass; the lowest key of a candidate, the
    lowest there is if all tokens are. num_candidates: zero, or too many where all tokens are."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    bound = tl.full((), LOWEST_KEY, tl.int64)
    maximum = tl.full((), float("nan"), tl.float32)
    total = tl.full((), 0.0, tl.float64)
    if (temperature > 0) & ((top_k < V) | (top_p < 1) | (min_p > 0)):
        tile = tl.arange(0, BLOCK_TILES)
        is_tile = tile < num_tiles
        maxima = tl.load(tile_maxima_ptr + row * num_tiles + tile, mask=is_tile, other=float("-inf"))
        masses = tl.load(tile_masses_ptr + row * num_tiles + tile, mask=is_tile, other=0.0)
        has_nan = tl.max((maxima != maxima).to(tl.int32), 0) > 0
        largest = tl.max(tl.where(maxima != maxima, float("-inf"), maxima), 0)
        if (largest > float("-inf")) & (largest < float("inf")) & (has_nan == 0):
            maximum = largest
            total = tl.sum(masses * tl.exp((maxima - maximum) / temperature).to(tl.float64), 0)
            if (top_k < V) | (top_p < 1):
                line = tl.arange(0, BLOCK_LINES)
                is_line = line < num_lines
                lines = tl.load(line_maxima_ptr + row * num_lines + line, mask=is_line, other=float("-inf"))
                keys = tl.where(is_line, _key_of(lines), LOWEST_KEY)
                weights = tl.exp((lines - maximum) / temperature).to(tl.float64)
                limit = top_p.to(tl.float64) * total
                if top_k < V:
                    weights = tl.full((BLOCK_LINES,), 1.0, tl.float64)
                    limit = top_k.to(tl.float64)
                high = _key_of(maximum).to(tl.int64)
                while bound < high:
                    middle = (bound + high) >> 1
                    if tl.sum(tl.where(keys > middle.to(tl.int32), weights, 0.0), 0) < limit:
                        high = middle
                    else:
                        bound = middle + 1
    tl.store(maximum_ptr + row, maximum)
    tl.store(total_ptr + row, total)
    tl.store(bound_ptr + row, bound.to(tl.int32))
    tl.store(num_candidates_ptr + row, tl.where(bound > LOWEST_KEY, 0, MAX_CANDIDATES + 1))


@jit(do_not_specialize=("num_candidates_ptr",))
def _candidates_kernel(
    candidates_ptr,
    num_candidates_ptr,
    bound_ptr,
    logits_ptr,
    V,
    TILE: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
):
    """Grid (N, tiles). Counts on where there is no more room; their order does not matter."""
    row = tl.program_id(0).to(tl.int64)
    bound = tl.load(bound_ptr + row)
    if bound > LOWEST_KEY:
        token = tl.program_id(1) * TILE + tl.arange(0, TILE)
        values = tl.load(logits_ptr + row * V + token, mask=token < V, other=float("-inf"))
        is_member = ((_key_of(values) >= bound) & (token < V)).to(tl.int32)
        count = tl.sum(is_member, 0)
        if count > 0:
            first = tl.atomic_add(num_candidates_ptr + row, count)
            place = first + tl.cumsum(is_member, 0) - 1
            has_room = (is_member > 0) & (place < MAX_CANDIDATES)
            tl.store(candidates_ptr + row * MAX_CANDIDATES + place, values, mask=has_room)


@jit(do_not_specialize=("border_ptr", "num_candidates_ptr", "top_p_ptr"))
def _border_kernel(
    border_ptr,
    num_equal_ptr,
    candidates_ptr,
    num_candidates_ptr,
    logits_ptr,
    maximum_ptr,
    total_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    V,
    MAX_CANDIDATES: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Grid (N,). Keys above the border stay, and num_equal of those equal to it: all if that is -1."""
    row = tl.program_id(0).to(tl.int64)
    maximum = tl.load(maximum_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    border = tl.full((), LOWEST_KEY, tl.int32)
    num_equal = tl.full((), -1, tl.int64)
    if (maximum == maximum) & ((top_k < V) | (top_p < 1)):
        temperature = tl.load(temperature_ptr + row)
        count = tl.load(num_candidates_ptr + row)
        values_ptr = candidates_ptr + row * MAX_CANDIDATES
        if count > MAX_CANDIDATES:
            values_ptr = logits_ptr + row * V
            count = V
        top_key = _key_of(maximum)
        whole = tl.load(total_ptr + row)
        if top_k < V:
            found = _find_border(
                values_ptr,
                count,
                border.to(tl.int64),
                top_key.to(tl.int64),
                top_k.to(tl.float64),
                maximum,
                temperature,
                False,
                THREADS,
            )
            border = found.to(tl.int32)
            above, _, _ = _above(
                values_ptr, count, border, border, border, maximum, temperature, False, THREADS
            )
            num_equal = top_k - above.to(tl.int64)
            whole, _, _ = _above(
                values_ptr, count, border, border, border, maximum, temperature, True, THREADS
            )
            whole += num_equal.to(tl.float64) * _mass_of(border, maximum, temperature)
        if top_p < 1:
            share = top_p.to(tl.float64) * whole
            found = _find_border(
                values_ptr,
                count,
                border.to(tl.int64),
                top_key.to(tl.int64),
                share,
                maximum,
                temperature,
                True,
                THREADS,
            )
            higher = found.to(tl.int32)
            mass, _, _ = _above(
                values_ptr, count, higher, higher, higher, maximum, temperature, True, THREADS
            )
            each = _mass_of(higher, maximum, temperature)
            # A mass of zero fits any number of times.
            fitting = tl.ceil((share - mass) / tl.where(each > 0, each, 1.0))
            fitting = tl.where(each > 0, tl.minimum(fitting, V * 1.0), V * 1.0).to(tl.int64)
            is_same = (higher == border) & (top_k < V)
            num_equal = tl.where(is_same, tl.minimum(num_equal, fitting), fitting)
            border = higher
        # Without this the most likely token would go where top_p is 0.
        num_equal = tl.where(border == top_key, tl.maximum(num_equal, 1), num_equal)
        above, with_equal, _ = _above(
            values_ptr, count, border, border - 1, border, maximum, temperature, False, THREADS
        )
        num_equal = tl.where(num_equal.to(tl.float64) >= with_equal - above, -1, num_equal)
    tl.store(border_ptr + row, border)
    tl.store(num_equal_ptr + row, num_equal)


@jit(do_not_specialize=("border_ptr", "min_p_ptr"))
def _mask_kernel(
    logits_ptr, border_ptr, num_equal_ptr, maximum_ptr, temperature_ptr, min_p_ptr, V, TILE: tl.constexpr
):
    """Grid (N, tiles)."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    maximum = tl.load(maximum_ptr + row)
    if maximum == maximum:
        logits_ptr += row * V
        temperature = tl.load(temperature_ptr + row)
        border = tl.load(border_ptr + row)
        num_equal = tl.load(num_equal_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        token = tile * TILE + tl.arange(0, TILE)
        values = tl.load(logits_ptr + token, mask=token < V, other=float("-inf"))
        keys = _key_of(values)
        is_equal = (keys == border) & (token < V)
        kept = keys >= border
        if num_equal >= 0:
            # Some of those equal to the border must go: this program's share depends on the tiles before.
            # A tile that is masked already has lost only tokens that do not count any more: its number of
            # equal ones is at least num_equal then.
            before = tl.zeros((TILE,), tl.int32)
            for start in range(0, tile * TILE, TILE):
                earlier = tl.load(logits_ptr + start + tl.arange(0, TILE))
                before += (_key_of(earlier) == border).to(tl.int32)
            place = tl.sum(before, 0) + tl.cumsum(is_equal.to(tl.int32), 0)
            kept = (keys > border) | (is_equal & (place <= num_equal))
        least = tl.where(min_p > 0, tl.log(tl.where(min_p > 0, min_p, 1.0)), float("-inf"))
        kept = kept & ((values - maximum) / temperature >= least)
        tl.store(logits_ptr + token, float("-inf"), mask=(token < V) & (kept == 0))


@with_fallback(mask_filtered_ref)
def _launch_mask_filtered(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> None:
    num_rows, vocab_size = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32
    assert all(column.is_contiguous() for column in (temperature, top_k, top_p, min_p))
    num_tiles = ceil_div(vocab_size, TILE)
    num_lines = num_tiles * (TILE // LINE)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    line_maxima, tile_maxima = empty(num_rows, num_lines), empty(num_rows, num_tiles)
    tile_masses, total = empty(num_rows, num_tiles, dtype=torch.float64), empty(num_rows, dtype=torch.float64)
    maximum, candidates = empty(num_rows), empty(num_rows, MAX_CANDIDATES)
    bound, num_candidates, border = empty(3, num_rows, dtype=torch.int32)
    num_equal = empty(num_rows, dtype=torch.int64)
    tiles = (num_rows, num_tiles)
    _tiles_kernel[tiles](
        line_maxima,
        tile_maxima,
        tile_masses,
        logits,
        temperature,
        vocab_size,
        TILE=TILE,
        LINE=LINE,
        **launch_options(TILE_WARPS),
    )
    _bound_kernel[(num_rows,)](
        maximum,
        total,
        bound,
        num_candidates,
        line_maxima,
        tile_maxima,
        tile_masses,
        temperature,
        top_k,
        top_p,
        min_p,
        vocab_size,
        num_tiles,
        num_lines,
        BLOCK_TILES=next_power_of_2(num_tiles),
        BLOCK_LINES=next_power_of_2(num_lines),
        MAX_CANDIDATES=MAX_CANDIDATES,
        **launch_options(TILE_WARPS),
    )
    _candidates_kernel[tiles](
        candidates,
        num_candidates,
        bound,
        logits,
        vocab_size,
        TILE=TILE,
        MAX_CANDIDATES=MAX_CANDIDATES,
        **launch_options(TILE_WARPS),
    )
    _border_kernel[(num_rows,)](
        border,
        num_equal,
        candidates,
        num_candidates,
        logits,
        maximum,
        total,
        temperature,
        top_k,
        top_p,
        vocab_size,
        MAX_CANDIDATES=MAX_CANDIDATES,
        THREADS=THREADS,
        **launch_options(SEARCH_WARPS),
    )
    _mask_kernel[tiles](
        logits,
        border,
        num_equal,
        maximum,
        temperature,
        min_p,
        vocab_size,
        TILE=TILE,
        **launch_options(TILE_WARPS),
    )


def mask_filtered(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Shapes above."""
    op = _launch_mask_filtered if runs_triton(logits) else mask_filtered_ref
    op(logits, temperature, top_k, top_p, min_p)
