"""Decode attention that starts from the parts of a QKV product: sum, rotation, cache write, attention.

    q, k, v = sum over s of parts[s] + b;  q, k = rope(q, k);  k, v -> their cells;  out = attention of q

parts [S, B, (Hq + 2 Hkv) * D] FP32 or of the cache's type, columns q, k, v, heads in order; bias [columns].
See `rope` for the rotation, `paged_decode_attention` for the rest, its variants included. Where a family
norms queries and keys, RMSNorm of each head comes before the rotation. q, k and v are rounded once before
they are used, as if kernels of their own had written them. Moves the context's keys and values, as attention
does.

A program attends with the query heads of one KV head, which it sums and rotates itself: some kilobytes from
the L2 cache. Programs that share a KV head's context repeat that; the one whose part ends with the newest
token also makes its key and value, starts its softmax from them and writes them to the cache, where only
later steps read them. That is a kernel per layer less than rotating first, and as many boundaries.

On Hopper GPUs large batches have the kernel in CUDA C++ (`hopper_decode`), where some warps make queries
while others read keys and values already. What it does not make, such as keys in FP8, a kernel before it does
(`rope_from_parts`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiny_vllm.kernels.fp8_cache import Cache, cache_tensors, decode_rows, encode_rows, row_scales
from tiny_vllm.kernels.hopper_decode import launch as hopper
from tiny_vllm.kernels.paged_decode_attention import (
    AttentionParts,
    attend_and_store_part,
    attend_pages,
    first_keys_and_values,
    part_of_context,
)
from tiny_vllm.kernels.rope_from_parts import HeadNorms, rope_from_parts, rope_from_parts_ref
from tiny_vllm.kernels.triton_support import (
    IS_INTERPRETED,
    jit,
    launch_dependents,
    launch_options,
    next_power_of_2,
    tl,
    wait_for_predecessor,
    with_fallback,
)

# A load behind a sum that threads make together, such as a norm, begins another round trip to memory. It is
# worth 150 registers in place of 128, with heads of 128, as long as the GPU is far from full.
FEW_SEQUENCES = 8


def rope_and_attend_ref(
    parts: Tensor,
    bias: Tensor | None,
    cos_sin: Tensor,
    cells: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    page_table: Tensor,
    context_lens: Tensor,
    num_heads: int,
    scale: float,
    *,
    table_rows: Tensor | None = None,
    head_norms: HeadNorms | None = None,
    max_context_len: int | None = None,
    workspace: hopper.Workspace | None = None,
    pdl: bool = False,
    **variants: Any,
) -> Tensor:
    """As kernels of their own. `workspace` and `pdl` are ignored."""
    q = rope_from_parts_ref(
        parts, bias, cos_sin, context_lens, cells, k_cache, v_cache, num_heads, head_norms=head_norms
    )
    return attend_pages(
        q, k_cache, v_cache, page_table, context_lens, scale, table_rows=table_rows,
        max_context_len=max_context_len, **variants,
    )  # fmt: skip


@jit
def _sum_parts(parts_ptr, bias_ptr, places, mask, num_values, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr,
               WIDTH: tl.constexpr):  # fmt: skip
    """FP32 values at the given places of all parts, and their bias."""
    total = tl.zeros(places.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + split * num_values + places, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + places % WIDTH, mask=mask, other=0.0).to(tl.float32)
    return total


@jit
def _newest_key(parts_ptr, bias_ptr, place, dims, partners, mask, num_values, SPLITS: tl.constexpr,
                HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Not rotated yet: its values, and those of their partners."""
    k = _sum_parts(parts_ptr, bias_ptr, place + dims, mask, num_values, SPLITS, HAS_BIAS, WIDTH)
    turned = _sum_parts(parts_ptr, bias_ptr, place + partners, mask, num_values, SPLITS, HAS_BIAS, WIDTH)
    return k, turned


@jit
def _head_norm(norm_ptr, dims, partners, is_dim):
    """FP32 weights of the dimensions, and of their partners."""
    own = tl.load(norm_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
    return own, tl.load(norm_ptr + partners, mask=is_dim, other=0.0).to(tl.float32)


@jit
def _in_its_layout(values):
    """The same values, which the compiler then does not compute in every warp: for the operand of a product
    that all warps read, it would otherwise (with heads of 128: 255 registers and spills, instead of 128)."""
    if IS_INTERPRETED or values.dtype == tl.float32:
        return values
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [values], dtype=values.dtype, is_pure=False, pack=2
        )


@jit
def _store_row(
    cache_ptr, scales_ptr, row, values, is_stored, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    """Quantise values [BLOCK_DIM] and store them if is_stored; return what will be read."""
    dims = tl.arange(0, BLOCK_DIM)
    scale = row_scales(tl.max(tl.abs(values.to(tl.float32)), 0), values.dtype)
    codes = encode_rows(values, scale)
    tl.store(cache_ptr + row * HEAD_DIM + dims, codes, mask=(dims < HEAD_DIM) & is_stored)
    tl.store(scales_ptr + row, scale, mask=is_stored)
    return decode_rows(codes, scale, values.dtype)


@jit
def _rope_and_attend_kernel(
    output_ptr,
    part_output_ptr,
    part_sums_ptr,
    parts_ptr,
    bias_ptr,
    cos_sin_ptr,
    cells_ptr,
    k_cache_ptr,
    v_cache_ptr,
    page_table_ptr,
    context_lens_ptr,
    table_rows_ptr,
    sinks_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_scales_ptr,
    v_scales_ptr,
    table_width,
    num_values,
    scale,
    eps,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    LOADS_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B, Hkv, parts). sinks_ptr, both norms and both scales may be None.

    LOADS_FIRST: ask for all values of the newest token before any is summed; takes registers.
    """
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    if PDL:
        launch_dependents()
    context_len = tl.load(context_lens_ptr + sequence).to(tl.int32)
    start, end = part_of_context(context_len, part, MAX_PARTS, WINDOW, TILE)
    if start >= end:
        return
    table_row = tl.load(table_rows_ptr + sequence).to(tl.int64) if HAS_ROWS else sequence.to(tl.int64)
    page_table_ptr += table_row * table_width

    newest = context_len - 1
    before = tl.minimum(end, newest)
    holds_newest = end > newest
    keys, values = first_keys_and_values(
        k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, page_table_ptr, start, before, kv_head,
        NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, TILE, BLOCK_DIM, output_ptr.dtype.element_ty,
    )  # fmt: skip
    # Each dimension is turned with its partner; those beyond R are their own, and stay.
    head = tl.arange(0, BLOCK_GROUP)
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
    HALF: tl.constexpr = ROTARY_DIM // 2
    is_first = dims < HALF
    is_turned = dims < ROTARY_DIM
    partners = tl.where(is_turned, tl.where(is_first, dims + HALF, dims - HALF), dims)
    angle = cos_sin_ptr + newest.to(tl.int64) * ROTARY_DIM + tl.where(is_first, dims, dims - HALF)
    cos = tl.load(angle, mask=is_turned, other=1.0)
    sin = tl.load(angle + HALF, mask=is_turned, other=0.0)
    sin = tl.where(is_first, -sin, sin)
    cell = tl.load(cells_ptr + sequence)
    cell_row = ((cell // PAGE_SIZE).to(tl.int64) * NUM_KV_HEADS + kv_head) * PAGE_SIZE + cell % PAGE_SIZE
    # Before the wait, except where FP8's registers do not suffice.
    if q_norm_ptr is not None and k_scales_ptr is None:
        q_norm, q_norm_turned = _head_norm(q_norm_ptr, dims, partners, is_dim)
        k_norm, k_norm_turned = _head_norm(k_norm_ptr, dims, partners, is_dim)
    if PDL:
        wait_for_predecessor()

    WIDTH: tl.constexpr = (GROUP + 2) * NUM_KV_HEADS * HEAD_DIM
    row = sequence * WIDTH
    is_q = (head < GROUP)[:, None] & is_dim[None, :]
    q_place = row + (kv_head * GROUP + head)[:, None] * HEAD_DIM
    q = _sum_parts(parts_ptr, bias_ptr, q_place + dims[None, :], is_q, num_values, SPLITS, HAS_BIAS, WIDTH)
    turned = _sum_parts(
        parts_ptr, bias_ptr, q_place + partners[None, :], is_q, num_values, SPLITS, HAS_BIAS, WIDTH
    )
    if LOADS_FIRST:
        is_new = is_dim & holds_newest
        k_place = row + (NUM_KV_HEADS * GROUP + kv_head) * HEAD_DIM
        v_place = k_place + NUM_KV_HEADS * HEAD_DIM + dims
        k, k_turned = _newest_key(
            parts_ptr, bias_ptr, k_place, dims, partners, is_new, num_values, SPLITS, HAS_BIAS, WIDTH
        )
        v = _sum_parts(parts_ptr, bias_ptr, v_place, is_new, num_values, SPLITS, HAS_BIAS, WIDTH)
    if q_norm_ptr is not None:
        if k_scales_ptr is not None:
            q_norm, q_norm_turned = _head_norm(q_norm_ptr, dims, partners, is_dim)
        norm = tl.rsqrt(tl.sum(q * q, 1) / HEAD_DIM + eps)[:, None]
        q *= norm * q_norm[None, :]
        turned *= norm * q_norm_turned[None, :]
    q = _in_its_layout((q * cos[None, :] + turned * sin[None, :]).to(output_ptr.dtype.element_ty))
    if not LOADS_FIRST:
        is_new = is_dim & holds_newest
        k_place = row + (NUM_KV_HEADS * GROUP + kv_head) * HEAD_DIM
        v_place = k_place + NUM_KV_HEADS * HEAD_DIM + dims
        k, k_turned = _newest_key(
            parts_ptr, bias_ptr, k_place, dims, partners, is_new, num_values, SPLITS, HAS_BIAS, WIDTH
        )
    if k_norm_ptr is not None:
        if k_scales_ptr is not None:
            k_norm, k_norm_turned = _head_norm(k_norm_ptr, dims, partners, is_dim)
        norm = tl.rsqrt(tl.sum(k * k, 0) / HEAD_DIM + eps)
        k *= norm * k_norm
        k_turned *= norm * k_norm_turned
    k = (k * cos + k_turned * sin).to(output_ptr.dtype.element_ty)
    if not LOADS_FIRST:
        v = _sum_parts(parts_ptr, bias_ptr, v_place, is_new, num_values, SPLITS, HAS_BIAS, WIDTH)
    v = v.to(output_ptr.dtype.element_ty)
    if k_scales_ptr is None:
        tl.store(k_cache_ptr + cell_row * HEAD_DIM + dims, k, mask=is_new)
        tl.store(v_cache_ptr + cell_row * HEAD_DIM + dims, v, mask=is_new)
    else:
        # This step sees what later ones will read.
        k = _store_row(k_cache_ptr, k_scales_ptr, cell_row, k, holds_newest, HEAD_DIM, BLOCK_DIM)
        v = _store_row(v_cache_ptr, v_scales_ptr, cell_row, v, holds_newest, HEAD_DIM, BLOCK_DIM)

    attend_and_store_part(
        output_ptr, part_output_ptr, part_sums_ptr, q, k, v, holds_newest, keys, values,
        k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, page_table_ptr, sinks_ptr,
        sequence, kv_head, part, MAX_PARTS, start, before, scale,
        GROUP, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, SOFTCAP, TILE, MAX_PARTS == 1, BLOCK_GROUP, BLOCK_DIM,
    )  # fmt: skip


def _rope_then_attend(
    parts: Tensor,
    bias: Tensor | None,
    cos_sin: Tensor,
    cells: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    page_table: Tensor,
    context_lens: Tensor,
    num_heads: int,
    scale: float,
    table_rows: Tensor | None,
    head_norms: HeadNorms | None,
    workspace: hopper.Workspace | None,
    pdl: bool,
) -> Tensor:
    """In two kernels, of which the second is the one for Hopper."""
    q = rope_from_parts(
        parts, bias, cos_sin, context_lens, cells, k_cache, v_cache, num_heads, head_norms=head_norms,
        pdl=pdl,
    )  # fmt: skip
    attended = hopper.attend(
        q, k_cache, v_cache, page_table, context_lens, scale, table_rows=table_rows, workspace=workspace,
        pdl=pdl,
    )  # fmt: skip
    assert attended is not None, "it is compiled"
    return attended


@with_fallback(rope_and_attend_ref)
def rope_and_attend(
    parts: Tensor,
    bias: Tensor | None,
    cos_sin: Tensor,
    cells: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    page_table: Tensor,
    context_lens: Tensor,
    num_heads: int,
    scale: float,
    *,
    table_rows: Tensor | None = None,
    max_context_len: int | None = None,
    head_norms: HeadNorms | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    workspace: hopper.Workspace | None = None,
    pdl: bool = False,
) -> Tensor:
    """parts [S, B, (Hq + 2 Hkv) * D] -> [B, Hq, D] of the cache's type; writes k and v.

    cos_sin [max_len, R] FP32; cells [B] int64: where k and v go, for a real sequence the cell of its newest
    token. A row whose cell is one of the null page, 0, is padding: its result means nothing, but is finite if
    its parts are. workspace: see `hopper.workspace_of`; without one pdl cannot overlap Hopper's kernel. The
    other arguments are as in `attend_pages`; with pdl, cells must be complete early, too.
    """
    if window is None and softcap is None and sinks is None:
        rows = context_lens if table_rows is None else table_rows
        batch = num_heads, k_cache, v_cache, page_table, context_lens, rows, scale
        made = hopper.QueryParts(parts, bias, cos_sin, cells, head_norms)
        if hopper.takes(*batch, made):
            attended = hopper.attend_from_parts(
                made, k_cache, v_cache, page_table, context_lens, num_heads, scale, table_rows=table_rows,
                workspace=workspace, pdl=pdl,
            )  # fmt: skip
            assert attended is not None, "it is compiled"
            return attended
        if hopper.takes(*batch):
            return _rope_then_attend(
                parts, bias, cos_sin, cells, k_cache, v_cache, page_table, context_lens, num_heads, scale,
                table_rows, head_norms, workspace, pdl,
            )  # fmt: skip
    splits, num_sequences, width = parts.shape
    _, num_kv_heads, page_size, head_dim = k_cache.shape
    group = num_heads // num_kv_heads
    assert parts.is_contiguous()
    (k_values, k_scales), (v_values, v_scales) = cache_tensors(k_cache), cache_tensors(v_cache)
    longest = min(max_context_len or page_table.shape[1] * page_size, window or 1 << 30)
    output = torch.empty(num_sequences, num_heads, head_dim, dtype=k_cache.dtype, device=parts.device)
    share = AttentionParts.make(output, num_kv_heads, longest, window)
    _rope_and_attend_kernel[(num_sequences, num_kv_heads, share.tiles.max_parts)](
        output,
        share.outputs,
        share.sums,
        parts,
        parts if bias is None else bias,
        cos_sin,
        cells,
        k_values,
        v_values,
        page_table,
        context_lens,
        context_lens if table_rows is None else table_rows,
        sinks,
        None if head_norms is None else head_norms.q,
        None if head_norms is None else head_norms.k,
        k_scales,
        v_scales,
        page_table.stride(0),
        num_sequences * width,
        scale,
        None if head_norms is None else head_norms.eps,
        SPLITS=splits,
        HAS_BIAS=bias is not None,
        ROTARY_DIM=cos_sin.shape[1],
        GROUP=group,
        NUM_KV_HEADS=num_kv_heads,
        PAGE_SIZE=page_size,
        SOFTCAP=softcap or 0.0,
        MAX_PARTS=share.tiles.max_parts,
        BLOCK_GROUP=max(next_power_of_2(group), 16),
        HAS_ROWS=table_rows is not None,
        LOADS_FIRST=head_norms is not None and splits == 1 and num_sequences <= FEW_SEQUENCES,
        PDL=pdl,
        **share.constants,
        **launch_options(share.tiles.num_warps, pdl, num_stages=share.tiles.num_stages),
    )
    share.join(output, context_lens, pdl)
    return output
