"""The end of a QKV product as a kernel of its own: sum of its parts, head norms, rotation, cache write.

    q, k, v = sum over s of parts[s] + b;  q, k = rope(norm(q), norm(k));  k, v -> their cells

parts [S, B, (Hq + 2 Hkv) * D] FP32 or of the cache's type, columns q, k, v, heads in order; bias [columns].
See `rope` for the rotation. FP32 arithmetic, results rounded once to the cache's type; FP8 caches get codes
of that (`fp8_cache`). Moves S + 1 times B tokens' heads: some megabytes in the L2 cache.

It stands before the attention of hopper_decode, which reads keys and values meanwhile; `rope_and_attend` does
the same work inside of attention.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
from torch import Tensor

from tiny_vllm.kernels.fp8_cache import Cache, cache_tensors, encode_rows, row_scales
from tiny_vllm.kernels.rms_norm import rms_norm_ref
from tiny_vllm.kernels.rope import HeadNorms, prepare_rope, rope_and_cache
from tiny_vllm.kernels.triton_support import (
    ceil_div,
    jit,
    launch_dependents,
    launch_options,
    next_power_of_2,
    tl,
    wait_for_predecessor,
    with_fallback,
)

# With heads of 64, two pairs of values per thread.
HEADS_PER_PROGRAM, NUM_WARPS = 8, 4


def rope_from_parts_ref(
    parts: Tensor,
    bias: Tensor | None,
    cos_sin: Tensor,
    context_lens: Tensor,
    cells: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    num_heads: int,
    *,
    head_norms: HeadNorms | None = None,
    pdl: bool = False,
) -> Tensor:
    """As kernels of their own. `pdl` is ignored."""
    qkv = parts.float().sum(0)
    if bias is not None:
        qkv = qkv + bias.float()
    if head_norms is not None:
        heads = qkv.view(len(qkv), -1, k_cache.shape[3])
        num_keys = k_cache.shape[1]
        q, k, v = heads.split([num_heads, num_keys, num_keys], 1)
        q, k = rms_norm_ref(q, head_norms.q, head_norms.eps), rms_norm_ref(k, head_norms.k, head_norms.eps)
        qkv = torch.cat((q, k, v), 1).flatten(1)
    step = prepare_rope(cos_sin, context_lens.long() - 1, cells, k_cache.shape[1], k_cache.shape[2])
    return rope_and_cache(qkv.to(k_cache.dtype), step, k_cache, v_cache, num_heads).contiguous()


@jit
def _rope_from_parts_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    parts_ptr,
    bias_ptr,
    cos_sin_ptr,
    context_lens_ptr,
    cells_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_scales_ptr,
    v_scales_ptr,
    num_values,
    eps,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B, groups of heads). Both norms and both scales may be None."""
    if PDL:
        launch_dependents()
    TYPE: tl.constexpr = q_ptr.dtype.element_ty
    WIDTH: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    index = tl.arange(0, BLOCK_HALF)[None, :]
    # Dimensions that are not rotated are paired up too, and pass through.
    is_rotated = index < ROTARY_DIM // 2
    low = tl.where(is_rotated, index, index + ROTARY_DIM // 2)
    high = low + tl.where(is_rotated, ROTARY_DIM // 2, (HEAD_DIM - ROTARY_DIM) // 2)
    mask = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (index < HEAD_DIM // 2)
    is_q = head < NUM_HEADS
    is_v = head >= NUM_HEADS + NUM_KV_HEADS

    position = tl.load(context_lens_ptr + token).to(tl.int64) - 1
    cell = tl.load(cells_ptr + token)
    angle = cos_sin_ptr + position * ROTARY_DIM + index
    cos = tl.where(is_v, 1.0, tl.load(angle, mask=is_rotated, other=1.0))
    sin = tl.where(is_v, 0.0, tl.load(angle + ROTARY_DIM // 2, mask=is_rotated, other=0.0))
    column = head * HEAD_DIM
    first = tl.zeros((BLOCK_HEADS, BLOCK_HALF), tl.float32)
    second = tl.zeros((BLOCK_HEADS, BLOCK_HALF), tl.float32)
    if HAS_BIAS:
        first += tl.load(bias_ptr + column + low, mask=mask, other=0.0).to(tl.float32)
        second += tl.load(bias_ptr + column + high, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        wait_for_predecessor()

    row = parts_ptr + token * WIDTH + column
    for _ in tl.static_range(SPLITS):
        first += tl.load(row + low, mask=mask, other=0.0).to(tl.float32)
        second += tl.load(row + high, mask=mask, other=0.0).to(tl.float32)
        row += num_values
    if q_norm_ptr is not None:
        norm = tl.rsqrt(tl.sum(first * first + second * second, 1) / HEAD_DIM + eps)[:, None]
        norm = tl.where(is_v, 1.0, norm)
        is_k = mask & ~is_q & ~is_v
        first *= norm * tl.load(q_norm_ptr + low, mask=mask & is_q, other=1.0).to(tl.float32)
        first *= tl.load(k_norm_ptr + low, mask=is_k, other=1.0).to(tl.float32)
        second *= norm * tl.load(q_norm_ptr + high, mask=mask & is_q, other=1.0).to(tl.float32)
        second *= tl.load(k_norm_ptr + high, mask=is_k, other=1.0).to(tl.float32)
    turned_first = (first * cos - second * sin).to(TYPE)
    turned_second = (second * cos + first * sin).to(TYPE)

    q_row = q_ptr + token * (NUM_HEADS * HEAD_DIM) + column
    tl.store(q_row + low, turned_first, mask=mask & is_q)
    tl.store(q_row + high, turned_second, mask=mask & is_q)
    kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
    cache_row = ((cell // PAGE_SIZE).to(tl.int64) * NUM_KV_HEADS + kv_head) * PAGE_SIZE + cell % PAGE_SIZE
    k_row, v_row = k_cache_ptr + cache_row * HEAD_DIM, v_cache_ptr + cache_row * HEAD_DIM
    if k_scales_ptr is not None:
        largest = tl.maximum(tl.abs(turned_first.to(tl.float32)), tl.abs(turned_second.to(tl.float32)))
        scales = row_scales(tl.max(largest, 1)[:, None], TYPE)
        turned_first, turned_second = encode_rows(turned_first, scales), encode_rows(turned_second, scales)
        is_row = head < NUM_HEADS + 2 * NUM_KV_HEADS
        tl.store(k_scales_ptr + cache_row, scales, mask=is_row & ~is_q & ~is_v)
        tl.store(v_scales_ptr + cache_row, scales, mask=is_row & is_v)
    tl.store(k_row + low, turned_first, mask=mask & ~is_q & ~is_v)
    tl.store(k_row + high, turned_second, mask=mask & ~is_q & ~is_v)
    tl.store(v_row + low, turned_first, mask=mask & is_v)
    tl.store(v_row + high, turned_second, mask=mask & is_v)


@with_fallback(rope_from_parts_ref)
def rope_from_parts(
    parts: Tensor,
    bias: Tensor | None,
    cos_sin: Tensor,
    context_lens: Tensor,
    cells: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    num_heads: int,
    *,
    head_norms: HeadNorms | None = None,
    pdl: bool = False,
) -> Tensor:
    """parts [S, B, (Hq + 2 Hkv) * D] -> q [B, Hq, D] of the cache's type; writes k and v.

    cos_sin [max_len, R] FP32; context_lens [B], position + 1; cells [B] int64: where k and v go. pdl:
    see `triton_support`; context_lens and cells must then be complete before the preceding kernel starts.
    """
    splits, num_sequences, width = parts.shape
    _, num_kv_heads, page_size, head_dim = k_cache.shape
    (k_values, k_scales), (v_values, v_scales) = cache_tensors(k_cache), cache_tensors(v_cache)
    assert parts.is_contiguous()
    q = torch.empty(num_sequences, num_heads, head_dim, dtype=k_cache.dtype, device=parts.device)
    grid = (num_sequences, ceil_div(num_heads + 2 * num_kv_heads, HEADS_PER_PROGRAM))
    _rope_from_parts_kernel[grid](
        q,
        k_values,
        v_values,
        parts,
        parts if bias is None else bias,
        cos_sin,
        context_lens,
        cells,
        None if head_norms is None else head_norms.q,
        None if head_norms is None else head_norms.k,
        k_scales,
        v_scales,
        num_sequences * width,
        None if head_norms is None else head_norms.eps,
        SPLITS=splits,
        HAS_BIAS=bias is not None,
        ROTARY_DIM=cos_sin.shape[1],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_HEADS=HEADS_PER_PROGRAM,
        BLOCK_HALF=next_power_of_2(head_dim // 2),
        PDL=pdl,
        **launch_options(NUM_WARPS, pdl),
    )
    return q
