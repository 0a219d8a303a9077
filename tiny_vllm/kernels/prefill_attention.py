"""Prefill attention over pages: the last tokens of each sequence's context as queries, causal.

    out[t] = softmax(scale * q[t] K[:p+1]^T) V[:p+1]     p: the position of query t in its context

q [T, Hq, D], the chunks of S sequences one after another; k_cache, v_cache [num_pages, Hkv, page_size, D];
page_table [S, W], query_starts [S + 1] and context_lens [S] int64; out [T, Hq, D] of q's type. A chunk of n
tokens holds the last n of its context, whose keys are already in their pages: whole prompts, later chunks and
prefix hits are one case. Scores, softmax and sums are FP32; out is rounded once.
4 * Hq * D FLOPs per query and visible key: compute-bound from some hundred tokens on.
Source: tiles with online softmax, Dao et al. 2022, arXiv 2205.14135.

`prefill_attention_ref` tiles queries and keys. On a CPU the op gathers a sequence's context once, then takes
tiles of queries against all keys they see: whole BF16 products (see wide_product.py) or, for other types,
torch's flash attention. Two cores, 512 tokens, 9 heads on 3 of 64, BF16: 1.7 ms, flash attention 3.5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tiny_vllm.kernels.paged_context import gather_pages, gather_tokens, page_rows, token_rows
from tiny_vllm.kernels.wide_product import has_wide_bmm, wide_bmm

QUERY_TILE = 128
KEY_TILE = 1024
# On a CPU: the fewest queries of a tile, and the FP32 scores a tile may hold before it takes fewer queries.
MIN_QUERY_TILE = 16
MAX_TILE_SCORES = 1 << 22


@dataclass(frozen=True, slots=True)
class PrefillContext:
    """What all layers of one step share about one sequence's chunk.

    queries: the chunk's rows of q. rows: [1, Hkv, W], see `page_rows`. context_len: tokens in those pages.
    """

    queries: slice
    rows: Tensor
    context_len: int


def prepare_prefill_attention(
    page_table: Tensor, query_starts: Tensor, context_lens: Tensor, num_kv_heads: int, page_size: int
) -> list[PrefillContext]:
    """page_table [S, W], query_starts [S + 1], context_lens [S], all int64: one entry per sequence."""
    starts = query_starts.tolist()
    contexts = []
    for index, context_len in enumerate(context_lens.tolist()):
        pages = page_table[index : index + 1, : -(-context_len // page_size)]
        queries = slice(starts[index], starts[index + 1])
        contexts.append(PrefillContext(queries, page_rows(pages, num_kv_heads), context_len))
    return contexts


def prefill_attention_ref(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    """q [T, Hq, D] -> [T, Hq, D]."""
    num_kv_heads, page_size, head_dim = k_cache.shape[1:]
    starts = query_starts.tolist()
    output = torch.empty_like(q)
    for index, context_len in enumerate(context_lens.tolist()):
        one = slice(index, index + 1)
        rows = token_rows(page_table[one], context_lens[one], context_len, num_kv_heads, page_size)
        keys, values = gather_tokens(k_cache, rows[0]), gather_tokens(v_cache, rows[0])
        keys, values = keys.float().unsqueeze(1), values.float().unsqueeze(1)
        for start in range(starts[index], starts[index + 1], QUERY_TILE):
            tile = slice(start, min(start + QUERY_TILE, starts[index + 1]))
            queries = q[tile].view(-1, num_kv_heads, q.shape[1] // num_kv_heads, head_dim)
            first_position = context_len - starts[index + 1] + start
            attended = _attend_tile(queries.permute(1, 2, 0, 3).float(), keys, values, scale, first_position)
            output[tile] = attended.permute(2, 0, 1, 3).reshape(q[tile].shape)
    return output


def _attend_tile(queries: Tensor, keys: Tensor, values: Tensor, scale: float, first_position: int) -> Tensor:
    """queries [Hkv, G, n, D] at positions from first_position on; keys, values [Hkv, 1, L, D]; all FP32."""
    visible_len = first_position + queries.shape[2]
    positions = torch.arange(first_position, visible_len, device=queries.device).unsqueeze(1)

    # The first key tile holds position 0, visible to every query: the running maximum is finite from then on.
    maximum = queries.new_full((*queries.shape[:3], 1), -torch.inf)
    total = torch.zeros_like(maximum)
    output = torch.zeros_like(queries)
    for start in range(0, visible_len, KEY_TILE):
        end = min(start + KEY_TILE, visible_len)
        future = torch.arange(start, end, device=queries.device) > positions
        scores = (queries @ keys[:, :, start:end].mT * scale).masked_fill_(future, -torch.inf)
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
        keys = gather_pages(k_cache, context.rows)[0, :, : context.context_len]
        values = gather_pages(v_cache, context.rows)[0, :, : context.context_len]
        _attend(q[context.queries], keys, values, scale, output[context.queries])
    return output


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, output: Tensor) -> None:
    """One sequence. q, output [n, Hq, D]; keys, values [Hkv, context_len, D]."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, context_len, _ = keys.shape
    grouped_shape = (num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    queries = q.view(grouped_shape).permute(1, 2, 0, 3)
    grouped_output = output.view(grouped_shape).permute(1, 2, 0, 3)
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
    """The queries [Hkv, G, n, D] belong to the last n of the keys [Hkv, L, D].

    future: FP32 [n or more, n or more], -inf above the diagonal.
    """
    num_queries = queries.shape[2]
    scores = wide_bmm(queries.flatten(1, 2), keys.mT).mul_(scale)
    last = scores.view(*queries.shape[:3], -1)[..., -num_queries:]
    last.add_(future[:num_queries, :num_queries])
    return torch.bmm(scores.softmax(-1).bfloat16(), values).view(queries.shape)


def _attend_by_flash(queries: Tensor, keys: Tensor, values: Tensor, scale: float, future: Tensor) -> Tensor:
    """As `_attend_by_products`, for any type."""
    num_queries = queries.shape[2]
    mask = queries.new_zeros(num_queries, keys.shape[1])
    mask[:, -num_queries:] = future[:num_queries, :num_queries]
    shape = (*queries.shape[:2], *keys.shape[1:])
    keys, values = keys.unsqueeze(1).expand(shape), values.unsqueeze(1).expand(shape)
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
