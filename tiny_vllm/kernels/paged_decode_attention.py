"""Decode attention over pages: one query per sequence against that sequence's whole context.

    out = softmax(scale * q K^T) V          per sequence and query head; query head h reads KV head h / (Hq / Hkv)

q [B, Hq, D]; k_cache, v_cache [num_pages, Hkv, page_size, D]; page_table [B, W] and context_lens [B] int64;
out [B, Hq, D] of q's type. Scores, softmax and sums are FP32; out is rounded once.
Moves 2 * sum(context_lens) * Hkv * D values for 4 * sum(context_lens) * Hq * D FLOPs: memory-bound.
Sources: online softmax, Milakov & Gimelshein 2018, arXiv 1805.02867; pages, Kwon et al. 2023, arXiv 2309.06180.

`paged_decode_attention_ref` is the algorithm in view: one pass over tiles of keys with a running maximum and
sum. On a CPU the op gathers the context once, and the query heads of one KV head are the rows of one product:
torch's flash attention for small steps, whole BF16 products (see wide_product.py) for large ones, where the
gathered context outgrows the first cache levels. Two cores, 3 KV heads of 64, BF16: 1 x 512 tokens 47 us against
79; 4 x 512 123 against 127; 16 x 512 472 against 329.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tiny_vllm.kernels.paged_context import context_rows, gather_rows
from tiny_vllm.kernels.wide_product import has_wide_bmm, wide_bmm

KEY_TILE = 256
# Gathered K values from which on whole products are faster than flash attention.
MIN_VALUES_FOR_PRODUCTS = 1 << 18


@dataclass(frozen=True, slots=True)
class DecodeContext:
    """What all layers of one step share: L is the longest context.

    rows: [B, Hkv, L], see `context_rows`. mask: [B, 1, 1, L], 0 or -inf; None when all lengths are equal.
    """

    rows: Tensor
    mask: Tensor | None


def prepare_decode_attention(
    page_table: Tensor, context_lens: Tensor, num_kv_heads: int, page_size: int, dtype: torch.dtype
) -> DecodeContext:
    """page_table [B, W], context_lens [B]; dtype: of q and the caches."""
    shortest, longest = (int(length) for length in context_lens.aminmax())
    rows = context_rows(page_table, context_lens, longest, num_kv_heads, page_size)
    if shortest == longest:
        return DecodeContext(rows, None)
    outside = torch.arange(longest, device=page_table.device) >= context_lens.unsqueeze(1)
    mask = torch.zeros(outside.shape, dtype=dtype, device=page_table.device).masked_fill_(outside, -torch.inf)
    return DecodeContext(rows, mask[:, None, None, :])


def paged_decode_attention_ref(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, context_lens: Tensor, scale: float
) -> Tensor:
    """q [B, Hq, D] -> [B, Hq, D]."""
    batch_size, num_heads, head_dim = q.shape
    num_kv_heads, page_size = k_cache.shape[1:3]
    longest = int(context_lens.max())
    rows = context_rows(page_table, context_lens, longest, num_kv_heads, page_size)
    outside = torch.arange(longest, device=q.device) >= context_lens.view(-1, 1, 1, 1)
    queries = q.view(batch_size, num_kv_heads, -1, head_dim).float()

    # The first tile holds a token of every sequence, so the running maximum is finite from then on.
    maximum = queries.new_full((*queries.shape[:3], 1), -torch.inf)
    total = torch.zeros_like(maximum)
    output = torch.zeros_like(queries)
    for start in range(0, longest, KEY_TILE):
        tile = slice(start, start + KEY_TILE)
        keys = gather_rows(k_cache, rows[..., tile]).float()
        values = gather_rows(v_cache, rows[..., tile]).float()
        scores = (queries @ keys.mT * scale).masked_fill_(outside[..., tile], -torch.inf)
        new_maximum = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        weights = (scores - new_maximum).exp_()
        shrink = (maximum - new_maximum).exp_()
        total = total * shrink + weights.sum(-1, keepdim=True)
        output = output * shrink + weights @ values
        maximum = new_maximum
    return (output / total).to(q.dtype).view_as(q)


def paged_decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, context: DecodeContext, scale: float
) -> Tensor:
    """q [B, Hq, D] -> [B, Hq, D]."""
    batch_size, num_heads, head_dim = q.shape
    queries = q.reshape(batch_size, k_cache.shape[1], -1, head_dim)
    keys, values = gather_rows(k_cache, context.rows), gather_rows(v_cache, context.rows)
    if q.dtype == torch.bfloat16 and keys.numel() > MIN_VALUES_FOR_PRODUCTS and has_wide_bmm():
        output = _attend_by_products(queries, keys, values, context.mask, scale)
    else:
        output = scaled_dot_product_attention(queries, keys, values, attn_mask=context.mask, scale=scale)
    return output.reshape(batch_size, num_heads, head_dim)


def _attend_by_products(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """queries [B, Hkv, G, D]; keys, values [B, Hkv, L, D]; mask [B, 1, 1, L]: BF16 -> [B * Hkv, G, D]."""
    scores = wide_bmm(queries.flatten(0, 1), keys.flatten(0, 1).mT).mul_(scale)
    if mask is not None:
        scores.view(*queries.shape[:3], -1).add_(mask)
    return torch.bmm(scores.softmax(-1).bfloat16(), values.flatten(0, 1))
