"""Decode attention over pages: one query per sequence against that sequence's whole context.

    out = softmax(scale * q K^T) V      per sequence and query head; head h reads KV head h / (Hq / Hkv)

q [B, Hq, D]; k_cache, v_cache [num_pages, Hkv, page_size, D]; page_table [B, W] and context_lens [B] int64;
out [B, Hq, D] of q's type. Scores, softmax and sums are FP32; out is rounded once.
Variants: a window lets a query see that many newest tokens, itself included; a softcap
c bends each scaled score s to c * tanh(s / c); sinks [Hq] FP32 are one more score per head, without a value.
Moves 2 * sum(context_lens) * Hkv * D values for 4 * sum(context_lens) * Hq * D FLOPs: memory-bound.

The Triton kernel takes a program per sequence, KV head and part of the context, and a second kernel joins the
parts. The query heads of a KV head are rows of one tensor-core product, so keys are read once. Into how many
parts contexts are split depends on the numbers of sequences and heads and on the longest context that a
launch allows for, never on the contexts themselves (programs without work leave at once), so one CUDA graph
serves all lengths. Keys and values of earlier steps are loaded before the wait for the preceding kernel; the
newest token's start the online softmax, as its first step, by themselves. Joining in the last program to
arrive instead of a second kernel was 45 us slower per step (16 layers, H200): a serial tail behind an atomic.
On Hopper GPUs a kernel in CUDA C++ may take large batches, see `hopper_decode`.
Sources: online softmax, Milakov and Gimelshein 2018, arXiv 1805.02867; pages, Kwon et al. 2023, arXiv
2309.06180.

`paged_decode_attention_ref` is the algorithm in view: one pass over tiles of keys with a running maximum and
sum. On a CPU the op gathers the context once, and the query heads of one KV head are the rows of one product:
torch's flash attention for small steps, whole BF16 products (see wide_product.py) for large ones, where the
gathered context outgrows the first cache levels. Two cores, 3 KV heads of 64, BF16: 1 x 512 tokens 47 us
against 79; 4 x 512 123 against 127; 16 x 512 472 against 329. Padding all sequences to the longest would let
one long context slow down every short one, so lengths far apart are attended in groups.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tiny_vllm.kernels.fp8_cache import Cache, cache_tensors, decode_rows
from tiny_vllm.kernels.hopper_decode import launch as hopper
from tiny_vllm.kernels.paged_context import gather_pages, gather_tokens, page_rows, token_rows
from tiny_vllm.kernels.score_traits import LOG2_E, cap_scores, load_sinks
from tiny_vllm.kernels.triton_support import (
    ceil_div,
    dot,
    jit,
    launch_dependents,
    launch_options,
    next_power_of_2,
    runs_triton,
    tl,
    wait_for_predecessor,
    with_fallback,
)
from tiny_vllm.kernels.wide_product import has_wide_bmm, wide_bmm

KEY_TILE = 256
# Gathered K values from which on whole products are faster than flash attention.
MIN_VALUES_FOR_PRODUCTS = 1 << 18
# A group's longest context is at most this many times its shortest, or this long: another group costs some
# fifty microseconds per layer, what reading a few hundred padding tokens of a small model costs.
MAX_LENGTH_RATIO = 4
MIN_GROUP_LEN = 512

# On a GPU. 64 keys of 64 values are 8 KB, 16 KB with their values: 4 warps hold them in 32 registers per
# thread each. (largest padded head size, warps)
TILE_LEN = 64
TILE_WARPS = ((64, 4), (128, 4), (256, 8))
# (longest context, stages): 64 sequences of 384 tokens 16.7 us with 2 stages, 17.4 with 3; of 1100, 43.6 with
# 3.
TILE_STAGES = ((1024, 2), (1 << 40, 3))
# A context is split until there are so many programs, four per multiprocessor of an H200, but never into
# parts shorter than a tile; and always into parts of at most so many tokens, so that one long context among
# short ones is not the last to finish by far. 8 sequences of 4096 tokens:
# 8 parts 23.7 us, 16 26.0, 32 29.1. 16 of 640: 2 parts 13.2, 4 parts 11.4, 8 parts 11.0. 64 of 384:
# 1 part 16.7, 2 parts 20.4.
MIN_PROGRAMS = 512
MAX_PART_LEN = 4096
MAX_PARTS = 64
JOIN_WARPS = 2
# Parts that a program joins at most: two kernels to compile, of which the one for few parts takes fewer
# registers.
JOIN_BLOCKS = (16, MAX_PARTS)


@dataclass(frozen=True, slots=True)
class GatheredContext:
    """What all layers of one step share about one group of B sequences on a CPU.

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


@dataclass(frozen=True, slots=True)
class PagedContext:
    """The same for the kernel: the arguments of `prepare_decode_attention`."""

    page_table: Tensor
    context_lens: Tensor


DecodeContext = GatheredContext | PagedContext


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Keys per tile, and into how many parts at most a context is split (a power of two)."""

    tile_len: int
    max_parts: int
    num_warps: int
    num_stages: int


def choose_tiles(num_programs: int, longest: int, block_dim: int) -> AttentionTiles:
    """num_programs: without splitting."""
    wanted = max(ceil_div(MIN_PROGRAMS, num_programs), ceil_div(longest, MAX_PART_LEN))
    parts = min(wanted, ceil_div(longest, TILE_LEN), MAX_PARTS)
    num_warps = next(warps for limit, warps in TILE_WARPS if limit >= block_dim)
    num_stages = next(stages for limit, stages in TILE_STAGES if limit >= longest)
    return AttentionTiles(TILE_LEN, next_power_of_2(parts), num_warps, num_stages)


def prepare_decode_attention(
    page_table: Tensor, context_lens: Tensor, num_kv_heads: int, page_size: int, dtype: torch.dtype
) -> list[DecodeContext]:
    """page_table [B, W], context_lens [B], both int64; dtype: of q and caches. Empty without sequences."""
    if runs_triton(page_table):
        return [PagedContext(page_table, context_lens)] if len(context_lens) else []
    lens = context_lens.tolist()
    groups = _group_by_length(lens)
    contexts: list[DecodeContext] = []
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
        contexts.append(GatheredContext(sequences, rows, max_len, mask, outside))
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
    q: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    page_table: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """q [B, Hq, D] -> [B, Hq, D], written to `output` if there is one."""
    num_kv_heads, page_size, head_dim = k_cache.shape[1:]
    first = torch.zeros_like(context_lens) if window is None else (context_lens - window).clamp_(min=0)
    visible_lens = context_lens - first
    max_len = int(visible_lens.max())
    rows = token_rows(page_table, context_lens, max_len, num_kv_heads, page_size, first)
    hidden = torch.arange(max_len, device=q.device) >= visible_lens.view(-1, 1, 1, 1)
    queries = q.reshape(q.shape[0], num_kv_heads, -1, head_dim).float()

    # The first tile holds a token of every sequence, so the running maximum is finite from then on.
    maximum = queries.new_full((*queries.shape[:3], 1), -torch.inf)
    total = torch.zeros_like(maximum)
    if sinks is not None:
        maximum = sinks.float().view(num_kv_heads, -1, 1).expand_as(maximum)
        total = torch.ones_like(total)
    weighted = torch.zeros_like(queries)
    for start in range(0, max_len, KEY_TILE):
        tile = slice(start, start + KEY_TILE)
        keys = gather_tokens(k_cache, rows[..., tile]).float()
        values = gather_tokens(v_cache, rows[..., tile]).float()
        scores = queries @ keys.mT * scale
        if softcap is not None:
            scores = (scores / softcap).tanh_() * softcap
        scores.masked_fill_(hidden[..., tile], -torch.inf)
        new_maximum = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        weights = (scores - new_maximum).exp_()
        shrink = (maximum - new_maximum).exp_()
        total = total * shrink + weights.sum(-1, keepdim=True)
        weighted = weighted * shrink + weights @ values
        maximum = new_maximum
    attended = (weighted / total).to(q.dtype).view(q.shape)
    return attended if output is None else output.copy_(attended)


def paged_decode_attention(
    q: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    contexts: list[DecodeContext],
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """q [B, Hq, D] -> [B, Hq, D], written to the contiguous `output` if there is one. On a CPU the variants
    need a PagedContext."""
    first = contexts[0]
    if isinstance(first, PagedContext):
        pages = first.page_table, first.context_lens
        attend = attend_pages if runs_triton(q) else paged_decode_attention_ref
        return attend(
            q, k_cache, v_cache, *pages, scale, window=window, softcap=softcap, sinks=sinks, output=output
        )
    assert window is None and softcap is None and sinks is None, "gathered contexts are whole"
    if len(contexts) == 1:
        attended = _attend(q, k_cache, v_cache, first, scale)
        return attended if output is None else output.copy_(attended)
    output = torch.empty_like(q) if output is None else output
    for context in contexts:
        assert isinstance(context, GatheredContext)
        output[context.sequences] = _attend(q[context.sequences], k_cache, v_cache, context, scale)
    return output


def _attend(q: Tensor, k_cache: Cache, v_cache: Cache, context: GatheredContext, scale: float) -> Tensor:
    """One group: q [B, Hq, D] -> [B, Hq, D]."""
    queries = q.reshape(q.shape[0], k_cache.shape[1], -1, q.shape[2])
    keys, values = _gather(k_cache, context), _gather(v_cache, context)
    if q.dtype == torch.bfloat16 and keys.numel() > MIN_VALUES_FOR_PRODUCTS and has_wide_bmm():
        output = _attend_by_products(queries, keys, values, context.mask, scale)
    else:
        output = scaled_dot_product_attention(queries, keys, values, attn_mask=context.mask, scale=scale)
    return output.reshape(q.shape)


def _gather(cache: Cache, context: GatheredContext) -> Tensor:
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


@jit
def part_of_context(context_len, part, max_parts, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """First token and length of the visible context, and first and end token of one part of it."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context_len - WINDOW, 0)
    tiles = (context_len - begin + TILE - 1) // TILE
    part_len = (tiles + max_parts - 1) // max_parts * TILE
    start = begin + part * part_len
    return start, tl.minimum(start + part_len, context_len)


@jit
def _load_tile(
    cache_ptr, scales_ptr, page_table_ptr, positions, end, kv_head, dims,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Rows of the given positions [TILE], zeros from `end` on: [TILE, dims] of TYPE."""
    is_token = positions < end
    page = tl.load(page_table_ptr + positions // PAGE_SIZE, mask=is_token, other=0).to(tl.int64)
    row = (page * NUM_KV_HEADS + kv_head) * PAGE_SIZE + positions % PAGE_SIZE
    mask = is_token[:, None] & (dims < HEAD_DIM)[None, :]
    values = tl.load(cache_ptr + row[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    if scales_ptr is not None:
        values = decode_rows(values, tl.load(scales_ptr + row, mask=is_token, other=0.0)[:, None], TYPE)
    return values


@jit
def _add_tile(q, keys, values, is_visible, maximum, total, output, scale, SOFTCAP: tl.constexpr):
    """One step of the online softmax, in base 2: q [G, D], keys and values [TILE, D], is_visible [TILE]."""
    scores = dot(q, tl.trans(keys), tl.zeros((q.shape[0], keys.shape[0]), tl.float32)) * scale
    scores = cap_scores(scores, SOFTCAP)
    scores = tl.where(is_visible[None, :], scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    weights = tl.exp2(scores - new_maximum[:, None])
    shrink = tl.exp2(maximum - new_maximum)
    total = total * shrink + tl.sum(weights, 1)
    output = dot(weights.to(values.dtype), values, output * shrink[:, None])
    return new_maximum, total, output


@jit
def first_keys_and_values(
    k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, page_table_ptr, start, before, kv_head,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr,
    BLOCK_DIM: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """A part's first tile, as far as earlier steps wrote it, so that it may be loaded before the wait."""
    dims = tl.arange(0, BLOCK_DIM)
    positions = start + tl.arange(0, TILE)
    keys = _load_tile(
        k_cache_ptr, k_scales_ptr, page_table_ptr, positions, before, kv_head, dims,
        NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, TYPE,
    )  # fmt: skip
    values = _load_tile(
        v_cache_ptr, v_scales_ptr, page_table_ptr, positions, before, kv_head, dims,
        NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, TYPE,
    )  # fmt: skip
    return keys, values


@jit
def _attend_part(
    q, newest_key, newest_value, holds_newest, keys, values,
    k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, page_table_ptr, start, before, kv_head, scale,
    sinks,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr,
    BLOCK_DIM: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Largest score, sum of weights and weighted sum of values of a part: [G], [G], [G, BLOCK_DIM].

    q [G, BLOCK_DIM]; keys and values [TILE, BLOCK_DIM] of start ..; the part ends at `before`, and with the
    newest token, whose key and value [BLOCK_DIM] are given, if it holds that. sinks: [G] of `load_sinks`, or
    None; they belong to the part of the newest token.
    """
    scale = scale * LOG2_E
    # A part is never empty: it holds the newest token or, in its first tile, an older one, and the maximum is
    # finite from then on.
    score = tl.sum(q.to(tl.float32) * newest_key.to(tl.float32)[None, :], 1) * scale
    score = cap_scores(score, SOFTCAP)
    maximum = tl.where(holds_newest, score, float("-inf"))
    total = tl.zeros(score.shape, tl.float32) + tl.where(holds_newest, 1.0, 0.0)
    output = tl.where(holds_newest, newest_value.to(tl.float32), 0.0)[None, :] + tl.zeros(q.shape, tl.float32)
    if sinks is not None:
        sink = tl.where(holds_newest, sinks, float("-inf"))
        maximum = tl.maximum(maximum, sink)
        base = tl.where(holds_newest, maximum, 0.0)
        share = tl.exp2(tl.where(holds_newest, score, float("-inf")) - base)
        total = share + tl.exp2(sink - base)
        output *= share[:, None]
    positions = start + tl.arange(0, TILE)
    maximum, total, output = _add_tile(
        q, keys, values, positions < before, maximum, total, output, scale, SOFTCAP
    )
    for tile_start in tl.range(start + TILE, before, TILE):
        positions = tile_start + tl.arange(0, TILE)
        keys, values = first_keys_and_values(
            k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, page_table_ptr, tile_start, before, kv_head,
            NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, TILE, BLOCK_DIM, q.dtype,
        )  # fmt: skip
        maximum, total, output = _add_tile(
            q, keys, values, positions < before, maximum, total, output, scale, SOFTCAP
        )
    return maximum, total, output


@jit
def _store_part(
    output_ptr, part_output_ptr, part_sums_ptr, maximum, total, output, q_row, part, max_parts,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, IS_WHOLE: tl.constexpr, BLOCK_GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Unnormalised outputs [B, Hq, max_parts, BLOCK_DIM] and (maximum, sum) of each; IS_WHOLE: the output
    itself, of the only part. q_row [G]: the heads' rows."""
    head = tl.arange(0, BLOCK_GROUP)
    dims = tl.arange(0, BLOCK_DIM)
    mask = (head < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    if IS_WHOLE:
        output = (output / total[:, None]).to(output_ptr.dtype.element_ty)
        tl.store(output_ptr + q_row[:, None] * HEAD_DIM + dims[None, :], output, mask=mask)
    else:
        part_row = q_row * max_parts + part
        tl.store(part_output_ptr + part_row[:, None] * BLOCK_DIM + dims[None, :], output, mask=mask)
        tl.store(part_sums_ptr + part_row * 2, maximum, mask=head < GROUP)
        tl.store(part_sums_ptr + part_row * 2 + 1, total, mask=head < GROUP)


@jit
def attend_and_store_part(
    output_ptr, part_output_ptr, part_sums_ptr, q, newest_key, newest_value, holds_newest, keys, values,
    k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, page_table_ptr, sinks_ptr,
    sequence, kv_head, part, max_parts, start, before, scale,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr, TILE: tl.constexpr, IS_WHOLE: tl.constexpr, BLOCK_GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """What is left of a program when it has its queries, the newest key and value, and its first tile."""
    head = tl.arange(0, BLOCK_GROUP)
    sinks = None
    if sinks_ptr is not None:
        sinks = load_sinks(sinks_ptr, kv_head * GROUP + head, head < GROUP)
    maximum, total, output = _attend_part(
        q, newest_key, newest_value, holds_newest, keys, values,
        k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, page_table_ptr, start, before, kv_head, scale,
        sinks, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, TILE, BLOCK_DIM, SOFTCAP,
    )  # fmt: skip
    q_row = (sequence * NUM_KV_HEADS + kv_head) * GROUP + head
    _store_part(
        output_ptr, part_output_ptr, part_sums_ptr, maximum, total, output, q_row, part, max_parts,
        GROUP, HEAD_DIM, IS_WHOLE, BLOCK_GROUP, BLOCK_DIM,
    )  # fmt: skip


@jit(do_not_specialize=("table_width", "max_parts"))
def _attend_part_kernel(
    output_ptr,
    part_output_ptr,
    part_sums_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    page_table_ptr,
    context_lens_ptr,
    table_rows_ptr,
    sinks_ptr,
    k_scales_ptr,
    v_scales_ptr,
    table_width,
    max_parts,
    scale,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B, Hkv, max_parts). sinks_ptr, and both scales, may be None. IS_WHOLE: max_parts is 1."""
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    if PDL:
        launch_dependents()
    context_len = tl.load(context_lens_ptr + sequence).to(tl.int32)
    start, end = part_of_context(context_len, part, max_parts, WINDOW, TILE)
    if start >= end:
        return
    table_row = tl.load(table_rows_ptr + sequence).to(tl.int64) if HAS_ROWS else sequence.to(tl.int64)
    page_table_ptr += table_row * table_width

    # What earlier steps wrote may be loaded now; the newest token's key and value only after the wait.
    newest = context_len - 1
    before = tl.minimum(end, newest)
    keys, values = first_keys_and_values(
        k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, page_table_ptr, start, before, kv_head,
        NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, TILE, BLOCK_DIM, q_ptr.dtype.element_ty,
    )  # fmt: skip
    newest_page = tl.load(page_table_ptr + newest // PAGE_SIZE).to(tl.int64)
    newest_row = (newest_page * NUM_KV_HEADS + kv_head) * PAGE_SIZE + newest % PAGE_SIZE
    newest_place = newest_row * HEAD_DIM
    if PDL:
        wait_for_predecessor()

    head = tl.arange(0, BLOCK_GROUP)
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
    q_row = (sequence * NUM_KV_HEADS + kv_head) * GROUP + head
    is_q = (head < GROUP)[:, None] & is_dim[None, :]
    q = tl.load(q_ptr + q_row[:, None] * HEAD_DIM + dims[None, :], mask=is_q, other=0.0)
    newest_key = tl.load(k_cache_ptr + newest_place + dims, mask=is_dim, other=0.0)
    newest_value = tl.load(v_cache_ptr + newest_place + dims, mask=is_dim, other=0.0)
    if k_scales_ptr is not None:
        newest_key = decode_rows(newest_key, tl.load(k_scales_ptr + newest_row), q.dtype)
        newest_value = decode_rows(newest_value, tl.load(v_scales_ptr + newest_row), q.dtype)
    attend_and_store_part(
        output_ptr, part_output_ptr, part_sums_ptr, q, newest_key, newest_value, end > newest, keys, values,
        k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, page_table_ptr, sinks_ptr,
        sequence, kv_head, part, max_parts, start, before, scale,
        GROUP, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, SOFTCAP, TILE, IS_WHOLE, BLOCK_GROUP, BLOCK_DIM,
    )  # fmt: skip


@jit(do_not_specialize=("max_parts",))
def _join_parts_kernel(
    output_ptr,
    part_output_ptr,
    part_sums_ptr,
    context_lens_ptr,
    max_parts,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B, Hq): the parts of one head, always added in the same order."""
    sequence = tl.program_id(0)
    row = sequence * tl.num_programs(1) + tl.program_id(1)
    if PDL:
        launch_dependents()
    context_len = tl.load(context_lens_ptr + sequence).to(tl.int32)
    part = tl.arange(0, BLOCK_PARTS)
    start, end = part_of_context(context_len, part, max_parts, WINDOW, TILE)
    is_part = (part < max_parts) & (start < end)
    dims = tl.arange(0, BLOCK_DIM)
    if PDL:
        wait_for_predecessor()

    part_row = row * max_parts + part
    maxima = tl.load(part_sums_ptr + part_row * 2, mask=is_part, other=float("-inf"))
    totals = tl.load(part_sums_ptr + part_row * 2 + 1, mask=is_part, other=0.0)
    mask = is_part[:, None] & (dims < HEAD_DIM)[None, :]
    outputs = tl.load(part_output_ptr + part_row[:, None] * BLOCK_DIM + dims[None, :], mask=mask, other=0.0)
    shrink = tl.exp2(maxima - tl.max(maxima, 0))
    output = tl.sum(outputs * shrink[:, None], 0) / tl.sum(totals * shrink, 0)
    tl.store(output_ptr + row * HEAD_DIM + dims, output.to(output_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """Where the programs of one launch leave what `join` puts together; constants: of both kernels."""

    tiles: AttentionTiles
    outputs: Tensor
    sums: Tensor
    constants: dict[str, int]

    @staticmethod
    def make(output: Tensor, num_kv_heads: int, longest: int, window: int | None) -> AttentionParts:
        """output [B, Hq, D]; longest: no context, or window, is longer."""
        num_sequences, num_heads, head_dim = output.shape
        block_dim = next_power_of_2(head_dim)
        tiles = choose_tiles(num_sequences * num_kv_heads, longest, block_dim)
        outputs = sums = output
        if tiles.max_parts > 1:
            sizes = (num_sequences, num_heads, tiles.max_parts)
            outputs = torch.empty(*sizes, block_dim, dtype=torch.float32, device=output.device)
            sums = torch.empty(*sizes, 2, dtype=torch.float32, device=output.device)
        constants = dict(
            HEAD_DIM=head_dim,
            WINDOW=window or 0,
            TILE=tiles.tile_len,
            BLOCK_DIM=block_dim,
        )
        return AttentionParts(tiles, outputs, sums, constants)

    def join(self, output: Tensor, context_lens: Tensor, pdl: bool) -> None:
        """Write output [B, Hq, D], unless it is there already because there was one part."""
        if self.tiles.max_parts == 1:
            return
        _join_parts_kernel[output.shape[:2]](
            output,
            self.outputs,
            self.sums,
            context_lens,
            self.tiles.max_parts,
            BLOCK_PARTS=next(block for block in JOIN_BLOCKS if block >= self.tiles.max_parts),
            PDL=pdl,
            **self.constants,
            **launch_options(JOIN_WARPS, pdl),
        )


def _attend_pages_ref(
    q: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    page_table: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    table_rows: Tensor | None = None,
    max_context_len: int | None = None,
    pdl: bool = False,
    **variants: Any,
) -> Tensor:
    """Where the kernel does not compile. It cannot be captured in a graph."""
    table = page_table if table_rows is None else page_table[table_rows]
    return paged_decode_attention_ref(q, k_cache, v_cache, table.long(), context_lens, scale, **variants)


@with_fallback(_attend_pages_ref)
def attend_pages(
    q: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    page_table: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    table_rows: Tensor | None = None,
    max_context_len: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    output: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """The kernels: q [B, Hq, D] -> [B, Hq, D], written to the contiguous `output` if there is one.

    page_table [R, W] and context_lens [B], int32 or int64. table_rows [B]: rows of the page table, by default
    row i is sequence i's. max_context_len: no context is longer (by default, than the table is wide); it only
    spares programs. window: a query sees that many newest tokens, itself included. softcap: of the scores.
    sinks [Hq]. pdl: see `triton_support`; context_lens, page_table and table_rows must then be complete
    before the preceding kernel starts.
    """
    num_sequences, num_heads, _ = q.shape
    _, num_kv_heads, page_size, _ = k_cache.shape
    group = num_heads // num_kv_heads
    assert q.is_contiguous()
    is_plain = window is None and softcap is None and sinks is None
    rows = context_lens if table_rows is None else table_rows
    if is_plain and hopper.takes(num_heads, k_cache, v_cache, page_table, context_lens, rows, scale):
        attended = hopper.attend(
            q, k_cache, v_cache, page_table, context_lens, scale, table_rows=table_rows, output=output
        )
        assert attended is not None, "it is compiled"
        return attended
    (k_values, k_scales), (v_values, v_scales) = cache_tensors(k_cache), cache_tensors(v_cache)
    longest = min(max_context_len or page_table.shape[1] * page_size, window or 1 << 30)
    output = torch.empty_like(q) if output is None else output
    assert output.is_contiguous()
    parts = AttentionParts.make(output, num_kv_heads, longest, window)
    _attend_part_kernel[(num_sequences, num_kv_heads, parts.tiles.max_parts)](
        output,
        parts.outputs,
        parts.sums,
        q,
        k_values,
        v_values,
        page_table,
        context_lens,
        context_lens if table_rows is None else table_rows,
        sinks,
        k_scales,
        v_scales,
        page_table.stride(0),
        parts.tiles.max_parts,
        scale,
        GROUP=group,
        NUM_KV_HEADS=num_kv_heads,
        PAGE_SIZE=page_size,
        SOFTCAP=softcap or 0.0,
        BLOCK_GROUP=max(next_power_of_2(group), 16),
        IS_WHOLE=parts.tiles.max_parts == 1,
        HAS_ROWS=table_rows is not None,
        PDL=pdl,
        **parts.constants,
        **launch_options(parts.tiles.num_warps, pdl, num_stages=parts.tiles.num_stages),
    )
    parts.join(output, context_lens, pdl)
    return output
