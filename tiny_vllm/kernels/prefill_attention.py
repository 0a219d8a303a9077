"""Prefill attention over pages: the last tokens of each sequence's context as queries, causal.

    out[t] = softmax(scale * q[t] K[:p+1]^T) V[:p+1]     p: the position of query t in its context

q [T, Hq, D], the chunks of S sequences one after another; k_cache, v_cache [num_pages, Hkv, page_size, D];
page_table [S, W], query_starts [S + 1] and context_lens [S] int64; out [T, Hq, D] of q's type. A chunk of n
tokens holds the last n of its context, whose keys are already in their pages: whole prompts, later chunks and
prefix hits are one case. Scores, softmax and sums are FP32; out is rounded once.
The variants are those of decode attention: window, softcap and sinks, see paged_decode_attention.py.
4 * Hq * D FLOPs per query and visible key: compute-bound from some hundred tokens on.
Source: tiles with online softmax, Dao et al. 2022, arXiv 2205.14135.

`prefill_attention_ref` tiles queries and keys. On a CPU the op gathers a sequence's context once, then takes
tiles of queries against all keys they see: whole BF16 products (see wide_product.py) or, for other types,
torch's flash attention. Two cores, 512 tokens, 9 heads on 3 of 64, BF16: 1.7 ms, flash attention 3.5.

On Hopper GPUs a kernel in CUDA C++ takes what it can, see `hopper_prefill`; one in Triton takes the rest.

The Triton kernel takes a program per KV head and tile of rows, a row being one query of one of the KV head's
query heads, so that a group of heads reads its keys once. Which sequence a tile belongs to, the program finds
itself from query_starts: the host need not know the lengths. Key tiles that all rows see need no mask; those
on the diagonal come last.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tiny_vllm.kernels.fp8_cache import Cache, cache_tensors, decode_rows
from tiny_vllm.kernels.hopper_prefill import launch as hopper
from tiny_vllm.kernels.paged_context import gather_pages, gather_tokens, page_rows, token_rows
from tiny_vllm.kernels.score_traits import LOG2_E, cap_scores, load_sinks
from tiny_vllm.kernels.triton_support import (
    dot,
    jit,
    launch_options,
    next_power_of_2,
    runs_triton,
    tl,
    with_fallback,
)
from tiny_vllm.kernels.wide_product import has_wide_bmm, wide_bmm

QUERY_TILE = 128
KEY_TILE = 1024
# On a CPU: the fewest queries of a tile, and the FP32 scores a tile may hold before it takes fewer queries.
MIN_QUERY_TILE = 16
MAX_TILE_SCORES = 1 << 22

# On a GPU: (largest padded head size, (rows, keys, warps, stages)) of a tile. Rows are 64 per warpgroup of 4
# warps, what a Hopper tensor-core instruction takes; FP32 outputs and scores of a row are BLOCK_DIM + keys
# registers over a row's threads, which bounds the keys as heads grow. Stages of K and V tiles in shared
# memory: 2 x (64 + 64) keys of 128 values are 64 KB, two programs per multiprocessor.
TILES_16_BIT = ((128, (64, 64, 4, 2)), (256, (64, 32, 8, 2)))
# FP32 products have no tensor cores: small tiles.
TILES_FP32 = ((64, (32, 32, 4, 1)), (128, (32, 32, 4, 1)), (256, (16, 16, 4, 1)))
# Sequences among which a program looks for its own at a time: one per thread of 4 warps.
BLOCK_SEQUENCES = 128


@dataclass(frozen=True, slots=True)
class GatheredChunk:
    """What all layers of one step share about one sequence's chunk on a CPU.

    queries: the chunk's rows of q. rows: [1, Hkv, W], see `page_rows`. context_len: tokens in those pages.
    """

    queries: slice
    rows: Tensor
    context_len: int


@dataclass(frozen=True, slots=True)
class PagedChunks:
    """The same for the kernel, about all chunks: the arguments of `prepare_prefill_attention`."""

    page_table: Tensor
    query_starts: Tensor
    context_lens: Tensor


PrefillContext = GatheredChunk | PagedChunks


def prepare_prefill_attention(
    page_table: Tensor, query_starts: Tensor, context_lens: Tensor, num_kv_heads: int, page_size: int
) -> list[PrefillContext]:
    """page_table [S, W], query_starts [S + 1], context_lens [S], all int64. Empty without sequences."""
    if runs_triton(page_table):
        return [PagedChunks(page_table, query_starts, context_lens)] if len(context_lens) else []
    starts = query_starts.tolist()
    contexts: list[PrefillContext] = []
    for index, context_len in enumerate(context_lens.tolist()):
        queries = slice(starts[index], starts[index + 1])
        if queries.start == queries.stop:
            continue
        pages = page_table[index : index + 1, : -(-context_len // page_size)]
        contexts.append(GatheredChunk(queries, page_rows(pages, num_kv_heads), context_len))
    return contexts


def prefill_attention_ref(
    q: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    page_table: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """q [T, Hq, D] -> [T, Hq, D], written to `output` if there is one."""
    num_kv_heads, page_size, head_dim = k_cache.shape[1:]
    starts = query_starts.tolist()
    output = torch.empty_like(q) if output is None else output
    for index, context_len in enumerate(context_lens.tolist()):
        one = slice(index, index + 1)
        # Everything before what the chunk's first query sees is left where it is.
        first = 0
        if window is not None:
            first = max(context_len - (starts[index + 1] - starts[index]) - window + 1, 0)
        rows = token_rows(
            page_table[one],
            context_lens[one],
            context_len - first,
            num_kv_heads,
            page_size,
            torch.full_like(context_lens[one], first),
        )
        keys, values = gather_tokens(k_cache, rows[0]), gather_tokens(v_cache, rows[0])
        keys, values = keys.float().unsqueeze(1), values.float().unsqueeze(1)
        for start in range(starts[index], starts[index + 1], QUERY_TILE):
            tile = slice(start, min(start + QUERY_TILE, starts[index + 1]))
            queries = q[tile].view(-1, num_kv_heads, q.shape[1] // num_kv_heads, head_dim)
            first_position = context_len - first - starts[index + 1] + start
            queries = queries.permute(1, 2, 0, 3).float()
            attended = _attend_tile(
                queries, keys, values, scale, first_position, window=window, softcap=softcap, sinks=sinks
            )
            output[tile] = attended.permute(2, 0, 1, 3).reshape(q[tile].shape)
    return output


def _attend_tile(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    first_position: int,
    *,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """queries [Hkv, G, n, D] at positions from first_position on; keys, values [Hkv, 1, L, D]; all FP32."""
    visible_len = first_position + queries.shape[2]
    positions = torch.arange(first_position, visible_len, device=queries.device).unsqueeze(1)

    # The first key tile holds a key that each query sees, because it is longer than a tile of queries: the
    # running maximum is finite from then on.
    maximum = queries.new_full((*queries.shape[:3], 1), -torch.inf)
    total = torch.zeros_like(maximum)
    if sinks is not None:
        maximum = sinks.float().view(queries.shape[0], -1, 1, 1).expand_as(maximum)
        total = torch.ones_like(total)
    output = torch.zeros_like(queries)
    begin = 0 if window is None else max(first_position - window + 1, 0)
    for start in range(begin, visible_len, KEY_TILE):
        end = min(start + KEY_TILE, visible_len)
        keys_at = torch.arange(start, end, device=queries.device)
        hidden = keys_at > positions
        if window is not None:
            hidden |= keys_at <= positions - window
        scores = queries @ keys[:, :, start:end].mT * scale
        if softcap is not None:
            scores = (scores / softcap).tanh_() * softcap
        scores.masked_fill_(hidden, -torch.inf)
        new_maximum = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        weights = (scores - new_maximum).exp_()
        shrink = (maximum - new_maximum).exp_()
        total = total * shrink + weights.sum(-1, keepdim=True)
        output = output * shrink + weights @ values[:, :, start:end]
        maximum = new_maximum
    return output / total


def prefill_attention(
    q: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    contexts: list[PrefillContext],
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """q [T, Hq, D] -> [T, Hq, D], written to the contiguous `output` if there is one. On a CPU the variants
    need PagedChunks."""
    output = torch.empty_like(q) if output is None else output
    first = contexts[0]
    if isinstance(first, PagedChunks):
        pages = first.page_table, first.query_starts, first.context_lens
        attend = attend_fast if runs_triton(q) else prefill_attention_ref
        return attend(
            q, k_cache, v_cache, *pages, scale, window=window, softcap=softcap, sinks=sinks, output=output
        )
    assert window is None and softcap is None and sinks is None, "gathered contexts are whole"
    for context in contexts:
        assert isinstance(context, GatheredChunk)
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


@jit
def _key_rows(
    page_table_ptr, kv_head, key, end,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Where the keys' values begin in a cache, [BLOCK_N] int64; keys from `end` on are taken from page 0."""
    page = tl.load(page_table_ptr + key // PAGE_SIZE, mask=key < end, other=0).to(tl.int64)
    return ((page * NUM_KV_HEADS + kv_head) * PAGE_SIZE + key % PAGE_SIZE) * HEAD_DIM


@jit
def _load_keys(
    cache_ptr, scales_ptr, rows, is_key,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, MASKED: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_DIM] of TYPE. Whole tiles of whole heads need no predicates."""
    dims = tl.arange(0, BLOCK_DIM)
    places = cache_ptr + rows[:, None] + dims[None, :]
    if MASKED:
        keys = tl.load(places, mask=is_key[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM < BLOCK_DIM:
        keys = tl.load(places, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        keys = tl.load(places)
    if scales_ptr is not None:
        keys = decode_rows(
            keys, tl.load(scales_ptr + rows // HEAD_DIM, mask=is_key, other=0.0)[:, None], TYPE
        )
    return keys


@jit
def _attend_keys(
    q, maximum, total, output,
    k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, page_table_ptr, kv_head, positions, start, end,
    scale,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DIM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax, in base 2, over keys start .. end; positions [BLOCK_M] are those of the rows of q.

    Without MASKED, all rows see all these keys, and they are whole tiles."""
    # Scores stay as the product left them; an exponent is then one multiply-add per score.
    factor = scale * LOG2_E
    key = start + tl.arange(0, BLOCK_N)
    rows = _key_rows(page_table_ptr, kv_head, key, end, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE)
    for _ in tl.range(start, end, BLOCK_N):
        keys = _load_keys(k_cache_ptr, k_scales_ptr, rows, key < end, HEAD_DIM, BLOCK_DIM, MASKED, q.dtype)
        values = _load_keys(v_cache_ptr, v_scales_ptr, rows, key < end, HEAD_DIM, BLOCK_DIM, MASKED, q.dtype)
        # The next tile's page numbers are asked for a tile ahead: its loads need not wait for them.
        next_key = key + BLOCK_N
        rows = _key_rows(page_table_ptr, kv_head, next_key, end, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE)

        scores = dot(q, tl.trans(keys), tl.zeros((q.shape[0], BLOCK_N), tl.float32))
        if SOFTCAP > 0:
            scores = cap_scores(scores * factor, SOFTCAP)
        if MASKED:
            is_visible = key[None, :] <= positions[:, None]
            if WINDOW > 0:
                is_visible = is_visible & (key[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(is_visible, scores, float("-inf"))
        if SOFTCAP == 0:
            new_maximum = tl.maximum(maximum, tl.max(scores, 1) * factor)
        else:
            new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        base = new_maximum
        if WINDOW > 0:
            # A window may hide a row's first tiles altogether; -inf - -inf would be NaN.
            base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        if SOFTCAP == 0:
            weights = tl.exp2(scores * factor - base[:, None])
        else:
            weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(maximum - base)
        total = total * shrink + tl.sum(weights, 1)
        output = dot(weights.to(values.dtype), values, output * shrink[:, None])
        maximum = new_maximum
        key = next_key
    return maximum, total, output


@jit(do_not_specialize=("query_starts_ptr", "context_lens_ptr", "num_sequences", "table_width"))
def _prefill_attention_kernel(
    output_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    page_table_ptr,
    query_starts_ptr,
    context_lens_ptr,
    sinks_ptr,
    k_scales_ptr,
    v_scales_ptr,
    num_sequences,
    table_width,
    scale,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SEQUENCES: tl.constexpr,
):
    """Grid (tiles * Hkv). BLOCK_M rows are BLOCK_M // GROUP queries of GROUP heads.

    sinks_ptr, and both scales, may be None.
    """
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    # The last tile of a sequence has the most keys. It comes first, all heads at the same time, so
    # that what the multiprocessors end with is short.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    # Sequence s has its tiles at starts[s] // QUERIES + s and after: never too few, and the spare ones are
    # empty.
    sequence = tl.full((), -1, tl.int32)
    for first in tl.range(0, num_sequences, BLOCK_SEQUENCES):
        index = first + tl.arange(0, BLOCK_SEQUENCES)
        is_sequence = index < num_sequences
        starts = tl.load(query_starts_ptr + index, mask=is_sequence, other=0).to(tl.int32)
        is_before = is_sequence & (starts // QUERIES + index <= tile)
        sequence += tl.sum(is_before.to(tl.int32), 0)
    query_start = tl.load(query_starts_ptr + sequence).to(tl.int32)
    query_end = tl.load(query_starts_ptr + sequence + 1).to(tl.int32)
    first_query = query_start + (tile - query_start // QUERIES - sequence) * QUERIES
    if first_query >= query_end:
        return
    context_len = tl.load(context_lens_ptr + sequence).to(tl.int32)
    page_table_ptr += sequence.to(tl.int64) * table_width

    row = tl.arange(0, BLOCK_M)
    query = first_query + row // GROUP
    is_row = (query < query_end) & (row < QUERIES * GROUP)
    # Spare rows see what the last one sees, so that no row is without keys.
    positions = context_len - query_end + tl.minimum(query, query_end - 1)
    dims = tl.arange(0, BLOCK_DIM)
    q_row = (query.to(tl.int64) * NUM_KV_HEADS + kv_head) * GROUP + row % GROUP
    q_places = q_row[:, None] * HEAD_DIM + dims[None, :]
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + q_places, mask=mask, other=0.0)

    # All rows see the keys from `shared_start` to `shared_end`, whole tiles; masks are for those before and
    # after.
    first_position = context_len - query_end + first_query
    last_position = tl.minimum(first_position + QUERIES, context_len) - 1
    begin = 0
    shared_start = 0
    shared_end = (first_position + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        shared_start = tl.maximum(last_position - WINDOW + BLOCK_N, 0) // BLOCK_N * BLOCK_N
        shared_start = tl.minimum(tl.maximum(shared_start, begin), last_position + 1)
        shared_end = tl.maximum(shared_start, shared_end)
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    output = tl.zeros((BLOCK_M, BLOCK_DIM), tl.float32)
    if sinks_ptr is not None:
        maximum = load_sinks(sinks_ptr, kv_head * GROUP + row % GROUP, row >= 0)
        total += 1.0
    if WINDOW > 0:
        maximum, total, output = _attend_keys(
            q, maximum, total, output, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, page_table_ptr,
            kv_head, positions, begin, shared_start, scale,
            NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, WINDOW, SOFTCAP, BLOCK_N, BLOCK_DIM, True,
        )  # fmt: skip
    maximum, total, output = _attend_keys(
        q, maximum, total, output, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, page_table_ptr,
        kv_head, positions, shared_start, shared_end, scale,
        NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, WINDOW, SOFTCAP, BLOCK_N, BLOCK_DIM, False,
    )  # fmt: skip
    maximum, total, output = _attend_keys(
        q, maximum, total, output, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, page_table_ptr,
        kv_head, positions, shared_end, last_position + 1, scale,
        NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, WINDOW, SOFTCAP, BLOCK_N, BLOCK_DIM, True,
    )  # fmt: skip
    output = output / total[:, None]
    tl.store(output_ptr + q_places, output.to(output_ptr.dtype.element_ty), mask=mask)


def _attend_chunks_ref(
    q: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    page_table: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    **variants: Any,
) -> Tensor:
    """Where the kernel does not compile."""
    return prefill_attention_ref(
        q, k_cache, v_cache, page_table.long(), query_starts, context_lens, scale, **variants
    )


@with_fallback(_attend_chunks_ref)
def attend_chunks(
    q: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    page_table: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """The kernel: q [T, Hq, D] -> [T, Hq, D], written to the contiguous `output` if there is one.

    page_table [S, W], query_starts [S + 1] and context_lens [S], int32 or int64. window: a query sees that
    many newest tokens, itself included. softcap: of the scores. sinks [Hq].
    """
    num_tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, page_size, _ = k_cache.shape
    num_sequences = context_lens.shape[0]
    group = num_heads // num_kv_heads
    q = q.contiguous()
    (k_values, k_scales), (v_values, v_scales) = cache_tensors(k_cache), cache_tensors(v_cache)
    block_dim = next_power_of_2(head_dim)
    tiles = TILES_FP32 if q.dtype == torch.float32 else TILES_16_BIT
    block_m, block_n, num_warps, num_stages = next(tile for limit, tile in tiles if limit >= block_dim)
    output = torch.empty_like(q) if output is None else output
    assert output.is_contiguous()
    grid = ((num_tokens // (block_m // group) + num_sequences) * num_kv_heads,)
    _prefill_attention_kernel[grid](
        output,
        q,
        k_values,
        v_values,
        page_table,
        query_starts,
        context_lens,
        sinks,
        k_scales,
        v_scales,
        num_sequences,
        page_table.stride(0),
        scale,
        GROUP=group,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        WINDOW=window or 0,
        SOFTCAP=softcap or 0.0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_DIM=block_dim,
        BLOCK_SEQUENCES=BLOCK_SEQUENCES,
        **launch_options(num_warps, num_stages=num_stages),
    )
    return output


def attend_fast(
    q: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    page_table: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """As `attend_chunks`: the kernel for Hopper where it can be had, the Triton kernel elsewhere."""
    pages = page_table, query_starts, context_lens
    if hopper.is_hopper(q.device):
        q = q.contiguous()
        if hopper.obstacle(q, k_cache, v_cache, scale, softcap) is None:
            attended = hopper.attend(
                q, k_cache, v_cache, *pages, scale, window=window, sinks=sinks, output=output
            )
            if attended is not None:
                return attended
    return attend_chunks(
        q, k_cache, v_cache, *pages, scale, window=window, softcap=softcap, sinks=sinks, output=output
    )
