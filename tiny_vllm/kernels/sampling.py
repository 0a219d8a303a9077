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

On a CPU the filters look at a few candidates (torch.topk) and only rows whose border lies further out are
sorted in full; noise is made for candidates only. Rejected: sorting every row, 25 ms for 16 rows of 49,152.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

from tiny_vllm.kernels.sampling_noise import log_race_times
from tiny_vllm.kernels.top_tokens import top_tokens

CANDIDATE_WIDTHS = (128, 1024)


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

    def select(self, rows: torch.Tensor) -> SamplingRows:
        """The given rows (I64)."""
        return SamplingRows(*(getattr(self, field.name)[rows] for field in fields(self)))


def sample_ref(logits: torch.Tensor, params: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole rule on the whole vocabulary. Shapes as in `sample`."""
    values, token_ids, _ = top_tokens(logits, logits.shape[-1])
    greedy = params.temperature == 0
    scaled = (values - values[:, :1]) / torch.where(greedy, 1.0, params.temperature)[:, None]
    num_kept = _count_kept(scaled, params, scaled.exp().sum(-1, dtype=torch.float64), logits.shape[-1])
    winners = _race(scaled, token_ids, torch.where(greedy, 1, num_kept), params.keys)
    return winners, values[:, 0].isfinite()


def sample(logits: torch.Tensor, params: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [N] I64, and [N] bool: whether the row could be sampled.

    A row is invalid, and its token meaningless, when its largest logit is not finite: it holds NaN or +inf,
    or every token is masked.
    """
    vocab_size = logits.shape[-1]
    best = logits.amax(-1)
    drawn = params.temperature > 0
    filtered = drawn & ((params.top_k < vocab_size) | (params.top_p < 1) | (params.min_p > 0))
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for is_member, draw in ((~drawn, _draw_greedy), (drawn & ~filtered, _draw_all), (filtered, _draw_kept)):
        rows = is_member.nonzero().squeeze(-1)
        if len(rows) == len(logits):
            tokens = draw(logits, best, params)
        elif len(rows):
            tokens[rows] = draw(logits[rows], best[rows], params.select(rows))
    return tokens, best.isfinite()


def _draw_greedy(logits: torch.Tensor, best: torch.Tensor, params: SamplingRows) -> torch.Tensor:
    return logits.argmax(-1)


def _draw_all(logits: torch.Tensor, best: torch.Tensor, params: SamplingRows) -> torch.Tensor:
    scaled = (logits - best[:, None]).div_(params.temperature[:, None])
    token_ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    return scaled.sub_(log_race_times(params.keys, token_ids)).argmax(-1)


def _draw_kept(logits: torch.Tensor, best: torch.Tensor, params: SamplingRows) -> torch.Tensor:
    """Draw among candidates, with more candidates for the rows that turn out to need them."""
    vocab_size = logits.shape[-1]
    total = best.double()
    if ((params.top_p < 1) & (params.top_k == vocab_size)).any():
        total = (logits - best[:, None]).div_(params.temperature[:, None]).exp_().sum(-1, dtype=torch.float64)
    tokens = torch.empty_like(params.top_k)
    pending = torch.arange(len(logits), device=logits.device)
    for width in _candidate_widths(vocab_size):
        values, token_ids, num_certain = top_tokens(logits, width)
        scaled = (values - best[:, None]) / params.temperature[:, None]
        num_kept = _count_kept(scaled, params, total, vocab_size)
        winners = _race(scaled, token_ids, num_kept, params.keys)
        is_settled = (num_kept <= num_certain) & ((params.top_k <= width) | (params.top_k == vocab_size))
        if width == vocab_size or is_settled.all():
            tokens[pending] = winners
            break
        tokens[pending[is_settled]] = winners[is_settled]
        rest = (~is_settled).nonzero().squeeze(-1)
        pending, logits, best, total = pending[rest], logits[rest], best[rest], total[rest]
        params = params.select(rest)
    return tokens


def _candidate_widths(vocab_size: int) -> Iterator[int]:
    yield from (width for width in CANDIDATE_WIDTHS if width < vocab_size)
    yield vocab_size


def _count_kept(
    scaled: torch.Tensor, params: SamplingRows, total: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Length of the kept prefix, at least 1.

    scaled: [N, W] FP32, sorted, the first being 0. total: [N] FP64, mass of the vocabulary where the first
    token has mass 1; it matters only in rows with top_p and without top_k.
    """
    width = scaled.shape[-1]
    mass = scaled.double().exp()
    mass_through = mass.cumsum(-1)
    mass_of_top_k = mass_through.gather(-1, params.top_k.clamp(max=width)[:, None] - 1).squeeze(-1)
    whole = torch.where(params.top_k < vocab_size, mass_of_top_k, total)[:, None]
    top_p = params.top_p[:, None]
    kept = torch.arange(width, device=scaled.device) < params.top_k[:, None]
    kept &= (top_p >= 1) | (mass_through - mass < top_p * whole)
    kept &= scaled >= params.min_p.log()[:, None]
    return kept.sum(-1).clamp(min=1)


def _race(
    scaled: torch.Tensor, token_ids: torch.Tensor, num_kept: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """The winner among the first num_kept[N] of token_ids [N, W]."""
    scores = scaled - log_race_times(keys, token_ids)
    scores[torch.arange(scaled.shape[-1], device=scaled.device) >= num_kept[:, None]] = -torch.inf
    return token_ids.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)
