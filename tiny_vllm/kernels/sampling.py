"""Draw one token per row from logits: temperature, top_k, top_p, min_p, then an exponential race.

    greedy (temperature 0):   argmax(logits), the lowest id among equals
    else:                     argmax over the kept tokens of  (logit - max) / temperature - log(E)

E is the arrival time of `sampling_noise`. Tokens are ordered by larger logit, then lower id, and each filter
keeps a prefix of that order, so the kept tokens are the shortest of three prefixes:
    top_k   the first k tokens
    top_p   every token before which the mass is below top_p; mass 1 is that of the tokens top_k left
    min_p   tokens with at least min_p times the probability of the first
The first token always stays. Masks are logits of -inf: such a token never wins.

logits: [N, V] FP32, contiguous. Sums of probabilities are FP64, so that the border of top_p does not depend
on how a sum was split over threads or candidates. Every row's result depends on that row alone.
Roofline of the fused form: V x 4 bytes read per row, about 25 operations per token.

On a CPU the filters look at the few most likely tokens (torch.topk) and noise is made for them alone. Rows
whose border lies further out have their values sorted, without ids, by numpy: with the border's value known,
the kept tokens are those above it, and the lowest ids among its equals. Which way a row goes never changes
its token.
On a GPU `mask_filtered` takes what the filters drop out of the race, and `draw_tokens` runs it.
Rejected: torch.sort with ids, 8 ms per row of 49,152 where numpy's vectorised sort of values takes 0.1 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch

from tiny_vllm.kernels.draw_tokens import SlotAdvance, draw_tokens
from tiny_vllm.kernels.mask_filtered import count_kept, is_kept, mask_filtered
from tiny_vllm.kernels.sampling_noise import log_race_times
from tiny_vllm.kernels.top_tokens import top_tokens
from tiny_vllm.kernels.triton_support import runs_triton

NUM_CANDIDATES = 64
# Temporary tensors of so many rows stay in the processor's cache and in the allocator's.
ROWS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of N rows; "off" is a value, so that no row needs a branch.

    temperature: FP32, 0 for greedy. top_k: I64, from 1 to V (off). top_p: FP32, 1 is off. min_p: FP32, 0 is
    off. keys: [N, 2] I32 from `noise_keys`.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    keys: torch.Tensor

    def select(self, rows: torch.Tensor | slice) -> SamplingRows:
        """The given rows (I64, or a slice)."""
        return SamplingRows(*(getattr(self, field.name)[rows] for field in fields(self)))


def sample_ref(logits: torch.Tensor, params: SamplingRows) -> torch.Tensor:
    """The whole rule on the whole vocabulary. Shapes as in `sample`."""
    values, token_ids, _ = top_tokens(logits, logits.shape[-1])
    greedy = params.temperature == 0
    scaled = (values - values[:, :1]) / torch.where(greedy, 1.0, params.temperature)[:, None]
    num_kept = _count_kept(scaled, params, scaled.exp().sum(-1, dtype=torch.float64), logits.shape[-1])
    winners = _race(scaled, token_ids, torch.where(greedy, 1, num_kept), params.keys)
    return winners.masked_fill(~values[:, 0].isfinite(), -1)


def sample(logits: torch.Tensor, params: SamplingRows, *, has_filters: bool = True) -> torch.Tensor:
    """Token ids [N] I64, -1 where a row cannot be sampled.

    That is when its largest logit is not finite: it holds NaN or +inf, or every token is masked.
    has_filters: False if no row uses one; only a GPU gains by it. The logits may be overwritten.
    """
    if runs_triton(logits) or logits.device.type != "cpu":
        if has_filters:
            mask_filtered(logits, params.temperature, params.top_k, params.top_p, params.min_p)
        return draw_tokens(logits, params.temperature, params.keys)
    vocab_size = logits.shape[-1]
    best = logits.amax(-1)
    drawn = params.temperature > 0
    filtered = drawn & ((params.top_k < vocab_size) | (params.top_p < 1) | (params.min_p > 0))
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for is_member, draw in ((~drawn, _draw_greedy), (drawn & ~filtered, _draw_all), (filtered, _draw_kept)):
        for rows in _parts(is_member.nonzero().squeeze(-1), len(logits)):
            tokens[rows] = draw(logits[rows], best[rows], params.select(rows))
    return tokens.masked_fill_(~best.isfinite(), -1)


def sample_and_advance(
    logits: torch.Tensor,
    params: SamplingRows,
    temperature: torch.Tensor,
    advance: SlotAdvance,
    *,
    has_filters: bool = True,
) -> torch.Tensor:
    """`sample`, and leave the tokens with their slots, 0 for -1.

    temperature: [S], the column params.temperature was read from. advance: none of its slots is padding.
    """
    if runs_triton(logits):
        if has_filters:
            mask_filtered(logits, params.temperature, params.top_k, params.top_p, params.min_p)
        return draw_tokens(logits, temperature, params.keys, advance)
    tokens = sample(logits, params, has_filters=has_filters)
    advance.last_token.index_copy_(0, advance.slots, tokens.clamp(min=0))
    ones = torch.ones_like(advance.slots)
    advance.computed_len.index_add_(0, advance.slots, ones)
    advance.sample_position.index_add_(0, advance.slots, ones)
    return tokens


def _parts(rows: torch.Tensor, num_rows: int) -> Iterator[torch.Tensor | slice]:
    """Rows in groups of ROWS_AT_ONCE: as slices, which copy nothing, if all rows are meant."""
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(start, min(start + ROWS_AT_ONCE, num_rows))
        yield part if len(rows) == num_rows else rows[part]


def _draw_greedy(logits: torch.Tensor, best: torch.Tensor, params: SamplingRows) -> torch.Tensor:
    return logits.argmax(-1)


def _draw_all(
    logits: torch.Tensor, best: torch.Tensor, params: SamplingRows, kept: torch.Tensor | None = None
) -> torch.Tensor:
    token_ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    scores = _scale(logits, best, params).sub_(log_race_times(params.keys, token_ids))
    if kept is not None:
        scores.masked_fill_(~kept, -torch.inf)
    return scores.argmax(-1)


def _draw_kept(logits: torch.Tensor, best: torch.Tensor, params: SamplingRows) -> torch.Tensor:
    vocab_size = logits.shape[-1]
    width = min(NUM_CANDIDATES, vocab_size)
    total = best.double()
    if ((params.top_p < 1) & (params.top_k == vocab_size)).any():
        total = _scale(logits, best, params).exp_().sum(-1, dtype=torch.float64)
    values, token_ids, num_certain = top_tokens(logits, width)
    scaled = _scale(values, best, params)
    num_kept = _count_kept(scaled, params, total, vocab_size)
    tokens = _race(scaled, token_ids, num_kept, params.keys)
    is_settled = (num_kept <= num_certain) & ((params.top_k <= width) | (params.top_k == vocab_size))
    if not is_settled.all():
        rows = (~is_settled).nonzero().squeeze(-1)
        tokens[rows] = _draw_far(logits[rows], best[rows], params.select(rows), total[rows])
    return tokens


def _draw_far(
    logits: torch.Tensor, best: torch.Tensor, params: SamplingRows, total: torch.Tensor
) -> torch.Tensor:
    """Draw when the border between kept and dropped tokens may be anywhere."""
    values = _sort_values(logits)
    num_kept = _count_kept(_scale(values, best, params), params, total, logits.shape[-1])[:, None]
    kept = is_kept(logits, values.gather(-1, num_kept - 1), num_kept)
    return _draw_all(logits, best, params, kept)


def _sort_values(logits: torch.Tensor) -> torch.Tensor:
    """Every row's values in falling order, NaN first."""
    return torch.from_numpy(np.sort(logits.numpy(), axis=-1)).flip(-1)


def _scale(logits: torch.Tensor, best: torch.Tensor, params: SamplingRows) -> torch.Tensor:
    """Log-probabilities at the row's temperature, where the most likely token has 0: a new tensor."""
    return (logits - best[:, None]).div_(params.temperature[:, None])


def _count_kept(
    scaled: torch.Tensor, params: SamplingRows, total: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    return count_kept(scaled, params.top_k, params.top_p, params.min_p, total, vocab_size)


def _race(
    scaled: torch.Tensor, token_ids: torch.Tensor, num_kept: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """The winner among the first num_kept[N] of token_ids [N, W]; the lowest id among equals."""
    scores = scaled - log_race_times(keys, token_ids)
    scores[torch.arange(scaled.shape[-1], device=scaled.device) >= num_kept[:, None]] = -torch.inf
    is_winner = scores == scores.amax(-1, keepdim=True)
    return torch.where(is_winner, token_ids, token_ids.amax(-1, keepdim=True)).amin(-1)
