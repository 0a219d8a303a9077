"""Decode attention over pages: one query per sequence against that sequence's whole context.

    out = softmax(scale * q K^T) V      per sequence and query head; head h reads KV head h / (Hq / Hkv)

q [B, Hq, D]; k_cache, v_cache [num_pages, Hkv, page_size, D]; page_table [B, W] and context_lens [B] int64;
out [B, Hq, D] of q's type. Scores, softmax and sums are FP32; out is rounded once.
Moves 2 * sum(context_lens) * Hkv * D values for 4 * sum(context_lens) * Hq * D FLOPs: memory-bound.
Sources: online softmax, Milakov and Gimelshein 2018, arXiv 1805.02867; pages, Kwon et al. 2023,
arXiv 2309.06180.

`paged_decode_attention_ref` is the algorithm in view: one pass over tiles of keys with a running maximum and
sum. On a CPU the op gathers the context once, and the query heads of one KV head are the rows of one product:
torch's flash attention for small steps, whole BF16 products (see wide_product.py) for large ones, where the
gathered context outgrows the first cache levels. Two cores, 3 KV heads of 64, BF16: 1 x 512 tokens 47 us
against 79; 4 x 512 123 against 127; 16 x 512 472 against 329. Padding all sequences to the longest would let
one long context slow down every short one, so lengths far apart are attended in groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tiny_vllm.kernels.paged_context import gather_pages, gather_tokens, page_rows, token_rows
from tiny_vllm.kernels.wide_product import has_wide_bmm, wide_bmm

KEY_TILE = 256
# Gathered K values from which on whole products are faster than flash attention.
MIN_VALUES_FOR_PRODUCTS = 1 << 18
# A group's longest context is at most this many times its shortest, or this long: another group costs some
# fifty microseconds per layer, what reading a few hundred padding tokens of a small model costs.
MAX_LENGTH_RATIO = 4
MIN_GROUP_LEN = 512


@dataclass(frozen=True, slots=True)
class DecodeContext:
    """What all layers of one step share about one group of B sequences.

    sequences: [B] their indices in the batch; None when they are the whole batch.
    rows: [B, Hkv, W], see `page_rows`. max_len: the longest context, L.
    mask: [B, 1, 1, L], 0 or -inf; None when all contexts are equally long.
    outside: rows of the gathered pages, seen as [B * Hkv * W * page_size, D], that `mask` hides. They are
        zeroed: hiding alone is not enough, as 0 * NaN is NaN.
    """

    sequences: Tensor | None
    rows: Tensor
    max_len: int
    mask: Tensor | None
    outside: Tensor | None


def prepare_decode_attention(
    page_table: Tensor, context_lens: Tensor, num_kv_heads: int, page_size: int, dtype: torch.dtype
) -> list[DecodeContext]:
    """page_table [B, W], context_lens [B], both int64; dtype: of q and the caches."""
    lens = context_lens.tolist()
    groups = _group_by_length(lens)
    contexts = []
    for group in groups:
        sequences = None if len(groups) == 1 else torch.tensor(group, device=page_table.device)
        pages, group_lens = page_table, context_lens
        if sequences is not None:
            pages, group_lens = page_table[sequences], context_lens[sequences]
        min_len, max_len = lens[group[0]], lens[group[-1]]
        rows = page_rows(pages[:, : -(-max_len // page_size)], num_kv_heads)
        mask = outside = None
        if min_len < max_len:
            hidden = torch.arange(max_len, device=rows.device) >= group_lens[:, None, None]
            mask = torch.zeros(hidden.shape, dtype=dtype, device=rows.device)
            mask = mask.masked_fill_(hidden, -torch.inf).unsqueeze(1)
            gathered = torch.arange(rows.numel() * page_size, device=rows.device).view(*rows.shape[:2], -1)
            outside = gathered[:, :, :max_len].masked_select(hidden)
        contexts.append(DecodeContext(sequences, rows, max_len, mask, outside))
    return contexts


def _group_by_length(lens: list[int]) -> list[list[int]]:
    """Indices of the sequences, each group and all groups from the shortest context to the longest."""
    groups: list[list[int]] = []
    limit = 0
    for index in sorted(range(len(lens)), key=lens.__getitem__):
        if lens[index] > limit:
            groups.append([])
            limit = max(MAX_LENGTH_RATIO * lens[index], MIN_GROUP_LEN)
        groups[-1].append(index)
    return groups


def paged_decode_attention_ref(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, context_lens: Tensor, scale: float
) -> Tensor:
    """q [B, Hq, D] -> [B, Hq, D]."""
    num_kv_heads, page_size, head_dim = k_cache.shape[1:]
    max_len = int(context_lens.max())
    rows = token_rows(page_table, context_lens, max_len, num_kv_heads, page_size)
    hidden = torch.arange(max_len, device=q.device) >= context_lens.view(-1, 1, 1, 1)
    queries = q.reshape(q.shape[0], num_kv_heads, -1, head_dim).float()

    # The first tile holds a token of every sequence, so the running maximum is finite from then on.
    maximum = queries.new_full((*queries.shape[:3], 1), -torch.inf)
    total = torch.zeros_like(maximum)
    output = torch.zeros_like(queries)
    for start in range(0, max_len, KEY_TILE):
        tile = slice(start, start + KEY_TILE)
        keys = gather_tokens(k_cache, rows[..., tile]).float()
        values = gather_tokens(v_cache, rows[..., tile]).float()
        scores = (queries @ keys.mT * scale).masked_fill_(hidden[..., tile], -torch.inf)
        new_maximum = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        weights = (scores - new_maximum).exp_()
        shrink = (maximum - new_maximum).exp_()
        total = total * shrink + weights.sum(-1, keepdim=True)
        output = output * shrink + weights @ values
        maximum = new_maximum
    return (output / total).to(q.dtype).view(q.shape)


def paged_decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, contexts: list[DecodeContext], scale: float
) -> Tensor:
    """q [B, Hq, D] -> [B, Hq, D]."""
    if len(contexts) == 1:
        return _attend(q, k_cache, v_cache, contexts[0], scale)
    output = torch.empty_like(q)
    for context in contexts:
        output[context.sequences] = _attend(q[context.sequences], k_cache, v_cache, context, scale)
    return output


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, context: DecodeContext, scale: float) -> Tensor:
    """One group: q [B, Hq, D] -> [B, Hq, D]."""
    queries = q.reshape(q.shape[0], k_cache.shape[1], -1, q.shape[2])
    keys, values = _gather(k_cache, context), _gather(v_cache, context)
    if q.dtype == torch.bfloat16 and keys.numel() > MIN_VALUES_FOR_PRODUCTS and has_wide_bmm():
        output = _attend_by_products(queries, keys, values, context.mask, scale)
    else:
        output = scaled_dot_product_attention(queries, keys, values, attn_mask=context.mask, scale=scale)
    return output.reshape(q.shape)


def _gather(cache: Tensor, context: DecodeContext) -> Tensor:
    """[B, Hkv, L, D], zero where the mask hides it."""
    gathered = gather_pages(cache, context.rows)
    if context.outside is not None:
        gathered.view(-1, gathered.shape[-1]).index_fill_(0, context.outside, 0)
    return gathered[:, :, : context.max_len]


def _attend_by_products(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """queries [B, Hkv, G, D]; keys, values [B, Hkv, L, D]; mask [B, 1, 1, L]: BF16 -> [B * Hkv, G, D]."""
    scores = wide_bmm(queries.flatten(0, 1), keys.flatten(0, 1).mT).mul_(scale)
    if mask is not None:
        scores.view(*queries.shape[:3], -1).add_(mask)
    return torch.bmm(scores.softmax(-1).bfloat16(), values.flatten(0, 1))
