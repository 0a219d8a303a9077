"""top_k, top_p and min_p as masks: what they drop becomes -inf, so that any draw over the row leaves it out.

Per row, with x = (logit - max) / temperature and the order "larger logit first, then lower id":
    top_k   the first k tokens stay
    top_p   tokens stay before which the mass exp(x) is below top_p times that of the tokens top_k left
    min_p   tokens with x >= log(min_p) stay
The first token always stays. Rows of temperature 0, and rows whose largest logit is not finite, stay whole.

logits [N, V] FP32, changed in place; temperature, top_p, min_p [N] FP32; top_k [N] int64. Sums of masses are
FP64, so that the border does not depend on how a sum was split.

The kernel takes a program per row and never sorts: FP32 values map to integers of the same order, and the
lowest value that stays is found in up to 16 passes per filter, each of which counts or weighs what lies above
the quarters of the range that is left. Tokens equal to it stay in the order of their ids as far as the
filters allow. Moves V * 4 bytes per pass, from L2 after the first; rows run side by side, up to one per
multiprocessor. Rejected: sorting the values, which is what the reference does; four and more passes over keys
and ids that have to be written back each time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
from torch import Tensor

from tiny_vllm.kernels.triton_support import jit, launch_options, runs_triton, tl, with_fallback

# A pass is bound by the latency of its loads: a thread has LINE values in flight.
LINE = tl.constexpr(16)
LINES = 512
BLOCK = 4096
NUM_WARPS = 16
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
    logits_ptr, V, first, second, third, maximum, temperature, WEIGHED: tl.constexpr, LINES: tl.constexpr
):
    """Tokens whose keys are above each of three borders, FP64: their number or, WEIGHED, their mass."""
    place = tl.arange(0, LINES)[:, None] * LINE + tl.arange(0, LINE)[None, :]
    above_first = tl.zeros((LINES,), tl.float64)
    above_second = tl.zeros((LINES,), tl.float64)
    above_third = tl.zeros((LINES,), tl.float64)
    for start in range(0, V, LINES * LINE):
        token = start + place
        values = tl.load(logits_ptr + token, mask=token < V, other=float("-inf"))
        keys = tl.where(token < V, _key_of(values), LOWEST_KEY)
        if WEIGHED:
            weights = tl.exp((values - maximum) / temperature)
        else:
            weights = tl.full((LINES, LINE), 1.0, tl.float32)
        weights = weights.to(tl.float64)
        above_first += tl.sum(tl.where(keys > first, weights, 0.0), 1)
        above_second += tl.sum(tl.where(keys > second, weights, 0.0), 1)
        above_third += tl.sum(tl.where(keys > third, weights, 0.0), 1)
    return tl.sum(above_first, 0), tl.sum(above_second, 0), tl.sum(above_third, 0)


@jit
def _find_border(
    logits_ptr, V, low, high, limit, maximum, temperature, WEIGHED: tl.constexpr, LINES: tl.constexpr
):
    """The lowest key from low to high (int64) above which there is less than the limit, or high."""
    while low < high:
        quarter = (high - low) >> 2
        first = low + quarter
        second = low + 2 * quarter
        third = low + 3 * quarter
        above_first, above_second, above_third = _above(
            logits_ptr,
            V,
            first.to(tl.int32),
            second.to(tl.int32),
            third.to(tl.int32),
            maximum,
            temperature,
            WEIGHED,
            LINES,
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
def _mask_filtered_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    V,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * V
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    has_filter = (top_k < V) | (top_p < 1) | (min_p > 0)
    if (temperature > 0) & has_filter:
        maxima = tl.full((BLOCK,), float("-inf"), tl.float32)
        has_nan = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, V, BLOCK):
            token = start + tl.arange(0, BLOCK)
            values = tl.load(logits_ptr + token, mask=token < V, other=float("-inf"))
            maxima = tl.maximum(maxima, values)
            has_nan |= (values != values).to(tl.int32)
        maximum = tl.max(maxima, 0)
        is_sound = (maximum > float("-inf")) & (maximum < float("inf")) & (tl.max(has_nan, 0) == 0)
        if is_sound:
            top_key = _key_of(maximum)
            # Keys above the border stay, and as many of those equal to it as num_equal says.
            border = tl.full((), LOWEST_KEY, tl.int32)
            num_equal = tl.full((), 0, tl.int64)
            if top_k < V:
                found = _find_border(
                    logits_ptr,
                    V,
                    border.to(tl.int64),
                    top_key.to(tl.int64),
                    top_k.to(tl.float64),
                    maximum,
                    temperature,
                    False,
                    LINES,
                )
                border = found.to(tl.int32)
                count, _, _ = _above(
                    logits_ptr, V, border, border, border, maximum, temperature, False, LINES
                )
                num_equal = top_k - count.to(tl.int64)
            if top_p < 1:
                whole, _, _ = _above(logits_ptr, V, border, border, border, maximum, temperature, True, LINES)
                if top_k < V:
                    whole += num_equal.to(tl.float64) * _mass_of(border, maximum, temperature)
                share = top_p.to(tl.float64) * whole
                found = _find_border(
                    logits_ptr,
                    V,
                    border.to(tl.int64),
                    top_key.to(tl.int64),
                    share,
                    maximum,
                    temperature,
                    True,
                    LINES,
                )
                higher = found.to(tl.int32)
                mass, _, _ = _above(logits_ptr, V, higher, higher, higher, maximum, temperature, True, LINES)
                each = _mass_of(higher, maximum, temperature)
                # A mass of zero fits any number of times.
                fitting = tl.ceil((share - mass) / tl.where(each > 0, each, 1.0))
                fitting = tl.where(each > 0, tl.minimum(fitting, V * 1.0), V * 1.0).to(tl.int64)
                is_same = (higher == border) & (top_k < V)
                num_equal = tl.where(is_same, tl.minimum(num_equal, fitting), fitting)
                border = higher
            # Without this the most likely token would go where top_p is 0.
            num_equal = tl.where(border == top_key, tl.maximum(num_equal, 1), num_equal)
            least = tl.where(min_p > 0, tl.log(tl.where(min_p > 0, min_p, 1.0)), float("-inf"))
            num_before = tl.full((), 0, tl.int64)
            for start in range(0, V, BLOCK):
                token = start + tl.arange(0, BLOCK)
                values = tl.load(logits_ptr + token, mask=token < V, other=float("-inf"))
                keys = _key_of(values)
                is_equal = (keys == border) & (token < V)
                place = num_before + tl.cumsum(is_equal.to(tl.int32), 0)
                kept = (keys > border) | (is_equal & (place <= num_equal))
                kept = kept & ((values - maximum) / temperature >= least)
                tl.store(logits_ptr + token, float("-inf"), mask=(token < V) & (kept == 0))
                num_before += tl.sum(is_equal.to(tl.int32), 0)


@with_fallback(mask_filtered_ref)
def _launch_mask_filtered(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> None:
    num_rows, vocab_size = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32
    _mask_filtered_kernel[(num_rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        vocab_size,
        LINES=LINES,
        BLOCK=BLOCK,
        **launch_options(NUM_WARPS),
    )


def mask_filtered(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Shapes above."""
    op = _launch_mask_filtered if runs_triton(logits) else mask_filtered_ref
    op(logits, temperature, top_k, top_p, min_p)
