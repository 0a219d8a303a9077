"""Prefill attention over pages: the last tokens of each sequence's context as queries, causal.

    out[t] = softmax(scale * q[t] K[:p+1]^T) V[:p+1]     p: the position of query t in its context

q [T, Hq, D], the chunks of S sequences one after another; k_cache, v_cache [num_pages, Hkv, page_size, D];
page_table [S, W]; query_starts [S + 1]; context_lens [S]; out [T, Hq, D] of q's type. A chunk of n tokens
holds the last n of its context, whose keys are already in their pages: whole prompts, later chunks and prefix
hits are one case. Scores, softmax and sums are FP32; out is rounded once.
4 * Hq * D FLOPs per query and visible key: compute-bound from some hundred tokens on.
Source: tiles with online softmax, Dao et al. 2022, arXiv 2205.14135.

`prefill_attention_ref` tiles queries and keys. On a CPU the op gathers a sequence's context once, then takes
tiles of queries against all keys they see: whole BF16 products (see wide_product.py) or, for other types, torch's
flash attention. Two cores, 512 tokens, 9 heads on 3 of 64, BF16: 1.7 ms, flash attention 3.5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tiny_vllm.kernels.paged_context import context_rows, gather_rows
from tiny_vllm.kernels.wide_product import has_wide_bmm, wide_bmm

QUERY_TILE = 128
KEY_TILE = 1024
# On a CPU: the fewest queries of a tile, and the FP32 scores a tile may hold before it takes fewer queries.
MIN_QUERY_TILE = 16
MAX_TILE_SCORES = 1 << 22


@dataclass(frozen=True, slots=True)
class PrefillContext:
    """What all layers of one step share about one sequence's chunk.

    queries: the chunk's rows of q. rows: [Hkv, context_len], see `context_rows`.
    """

    queries: slice
    rows: Tensor


def prepare_prefill_attention(
    page_table: Tensor, query_starts: Tensor, context_lens: Tensor, num_kv_heads: int, page_size: int
) -> list[PrefillContext]:
    """page_table [S, W], query_starts [S + 1], context_lens [S]: one entry per sequence."""
    starts = query_starts.tolist()
    contexts = []
    for index, context_len in enumerate(context_lens.tolist()):
        one = slice(index, index + 1)
        rows = context_rows(page_table[one], context_lens[one], context_len, num_kv_heads, page_size)
        contexts.append(PrefillContext(slice(starts[index], starts[index + 1]), rows[0]))
    return contexts


def prefill_attention_ref(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, contexts: list[PrefillContext], scale: float
) -> Tensor:
    """q [T, Hq, D] -> [T, Hq, D]."""
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for context in contexts:
        keys, values = gather_rows(k_cache, context.rows), gather_rows(v_cache, context.rows)
        _attend(q[context.queries], keys, values, scale, output[context.queries])
    return output


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, output: Tensor) -> None:
    """One sequence. q, output [n, Hq, D]; keys, values [Hkv, context_len, D]."""
    num_queries, _, head_dim = q.shape
    num_kv_heads, context_len, _ = keys.shape
    queries = q.view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    grouped_output = output.view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    keys, values = keys.float().unsqueeze(1), values.float().unsqueeze(1)
    for start in range(0, num_queries, QUERY_TILE):
        tile = queries[:, :, start : start + QUERY_TILE].float()
        first_position = context_len - num_queries + start
        grouped_output[:, :, start : start + QUERY_TILE] = _attend_tile(
            tile, keys, values, scale, first_position
        )


def _attend_tile(queries: Tensor, keys: Tensor, values: Tensor, scale: float, first_position: int) -> Tensor:
    """queries [Hkv, G, n, D] at positions from first_position on; keys, values [Hkv, 1, L, D]; all FP32."""
    num_queries = queries.shape[2]
    positions = torch.arange(first_position, first_position + num_queries, device=queries.device)
    visible_len = first_position + num_queries

    # The first key tile holds position 0, visible to every query: the running maximum is finite from then on.
    maximum = queries.new_full((*queries.shape[:3], 1), -torch.inf)
    total = torch.zeros_like(maximum)
    output = torch.zeros_like(queries)
    for start in range(0, visible_len, KEY_TILE):
        end = min(start + KEY_TILE, visible_len)
        scores = queries @ keys[:, :, start:end].mT * scale
        if end > first_position + 1:
            hidden = torch.arange(start, end, device=queries.device) > positions.unsqueeze(1)
            scores.masked_fill_(hidden, -torch.inf)
        new_maximum = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        weights = (scores - new_maximum).exp_()
        shrink = (maximum - new_maximum).exp_()
        total = total * shrink + weights.sum(-1, keepdim=True)
        output = output * shrink + weights @ values[:, :, start:end]
        maximum = new_maximum
    return output / total


def prefill_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, contexts: list[PrefillContext], scale: float
) -> Tensor:
    """q [T, Hq, D] -> [T, Hq, D]."""
    output = torch.empty_like(q)
    for context in contexts:
        keys, values = gather_rows(k_cache, context.rows), gather_rows(v_cache, context.rows)
        _attend_cpu(q[context.queries], keys, values, scale, output[context.queries])
    return output


def _attend_cpu(q: Tensor, keys: Tensor, values: Tensor, scale: float, output: Tensor) -> None:
    """One sequence. q, output [n, Hq, D]; keys, values [Hkv, context_len, D]."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, context_len, _ = keys.shape
    queries = q.view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    grouped_output = output.view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    attend = _attend_by_products if q.dtype == torch.bfloat16 and has_wide_bmm() else _attend_by_flash
    tile_len = min(max(MAX_TILE_SCORES // (num_heads * context_len), MIN_QUERY_TILE), QUERY_TILE, num_queries)
    future = torch.full((tile_len, tile_len), -torch.inf, dtype=torch.float32).triu_(1)
    for start in range(0, num_queries, tile_len):
        tile = queries[:, :, start : start + tile_len]
        visible_len = context_len - num_queries + start + tile.shape[2]
        grouped_output[:, :, start : start + tile_len] = attend(
            tile, keys[:, :visible_len], values[:, :visible_len], scale, future
        )


def _attend_by_products(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, future: Tensor
) -> Tensor:
    """queries [Hkv, G, n, D], the last n of the L keys [Hkv, L, D]; future [>= n, >= n], -inf above the diagonal."""
    num_queries = queries.shape[2]
    scores = wide_bmm(queries.flatten(1, 2), keys.mT).mul_(scale)
    last = scores.view(*queries.shape[:3], -1)[..., -num_queries:]
    last.add_(future[:num_queries, :num_queries])
    return torch.bmm(scores.softmax(-1).bfloat16(), values).view_as(queries)


def _attend_by_flash(queries: Tensor, keys: Tensor, values: Tensor, scale: float, future: Tensor) -> Tensor:
    """As `_attend_by_products`, any type."""
    num_queries = queries.shape[2]
    mask = queries.new_zeros(num_queries, keys.shape[1])
    mask[:, -num_queries:] = future[:num_queries, :num_queries]
    shape = (*queries.shape[:2], *keys.shape[1:])
    keys, values = keys.unsqueeze(1).expand(shape), values.unsqueeze(1).expand(shape)
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
