"""Rotary position embedding of q and k, and the write of k and v into their pages, in one op.

Where heads of q and k have an RMSNorm of their own, it comes first and is part of the op.

Each pair (x[i], x[i + R/2]) of the first R dimensions of a head is turned by the angle of its position:
    x[i] cos - x[i + R/2] sin,   x[i + R/2] cos + x[i] sin          (half-split pairs, i < R/2)

qkv [T, (Hq + 2 Hkv) * D], columns q, k, v, heads in order. cos_sin [max_len, R] FP32, a row is cos then sin
of one position. k_cache, v_cache [num_pages, Hkv, page_size, D]. FP32 arithmetic, results rounded once to
qkv's type; the torch operators round what is normed, too. Moves about 2 * T * (Hq + 2 Hkv) * D values:
memory-bound. Source: Su et al. 2021, arXiv 2104.09864.

Everything that depends only on the positions and cells is the same in every layer: on a CPU `prepare_rope`
computes it once per step. The Triton kernel reads positions and cells itself; a program takes some heads of
one token, so that small batches spread over the GPU too.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_vllm.kernels.fp8_cache import Cache, cache_tensors, encode_rows, row_scales, write_rows
from tiny_vllm.kernels.rms_norm import rms_norm_ref
from tiny_vllm.kernels.triton_support import (
    ceil_div,
    jit,
    launch_options,
    next_power_of_2,
    runs_triton,
    tl,
    with_fallback,
)

# Heads per program, and threads per pair of values of a head: with 16 bits a thread takes eight pairs of one
# head, two loads of 16 bytes. With more threads than cosines, each loads those that it needs; with as many or
# fewer, Triton sends all heads through shared memory instead.
HEADS_PER_PROGRAM = 16
THREADS_PER_PAIR = 2


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm weights [D] of the heads of queries and of keys."""

    q: Tensor
    k: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class GatheredRope:
    """What all layers of one step share. T tokens, R rotated dimensions.

    cos: [T, 1, R], both halves equal. sin: [T, 1, R], the first half negated, so that the rotation is
    x * cos + (x with its halves swapped) * sin.
    rows: [T * Hkv] int64, where each token's heads lie in a cache seen as [num_pages * Hkv * page_size, D].
    """

    cos: Tensor
    sin: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class PositionRope:
    """The same for the kernel: the arguments of `prepare_rope`."""

    cos_sin: Tensor
    positions: Tensor
    cells: Tensor


RopeStep = GatheredRope | PositionRope


def prepare_rope(
    cos_sin: Tensor, positions: Tensor, cells: Tensor, num_kv_heads: int, page_size: int
) -> RopeStep:
    """positions, cells: [T] int64; cell = page * page_size + offset."""
    if runs_triton(cos_sin):
        return PositionRope(cos_sin, positions, cells)
    return _gather(cos_sin, positions, cells, num_kv_heads, page_size)


def _gather(
    cos_sin: Tensor, positions: Tensor, cells: Tensor, num_kv_heads: int, page_size: int
) -> GatheredRope:
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, -1)
    first_rows = (cells // page_size) * (num_kv_heads * page_size) + cells % page_size
    heads = torch.arange(0, num_kv_heads * page_size, page_size, device=cells.device)
    return GatheredRope(
        cos=torch.cat((cos, cos), -1),
        sin=torch.cat((-sin, sin), -1),
        rows=(first_rows.unsqueeze(1) + heads).flatten(),
    )


def rope_and_cache_ref(
    qkv: Tensor,
    step: RopeStep,
    k_cache: Cache,
    v_cache: Cache,
    num_heads: int,
    head_norms: HeadNorms | None = None,
) -> Tensor:
    """As torch operators."""
    num_kv_heads, page_size, head_dim = k_cache.shape[1:]
    if isinstance(step, PositionRope):
        step = _gather(step.cos_sin, step.positions, step.cells, num_kv_heads, page_size)
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    q, k, values = heads.split([num_heads, num_kv_heads, num_kv_heads], 1)
    turned = heads[:, : num_heads + num_kv_heads]
    if head_norms is not None:
        eps = head_norms.eps
        turned = torch.cat((rms_norm_ref(q, head_norms.q, eps), rms_norm_ref(k, head_norms.k, eps)), 1)
    rotated = _rotate(turned, step)
    keys = rotated[:, num_heads:]
    write_rows(k_cache, step.rows, keys.reshape(-1, head_dim))
    write_rows(v_cache, step.rows, values.reshape(-1, head_dim))
    return rotated[:, :num_heads]


def _rotate(x: Tensor, step: GatheredRope) -> Tensor:
    """x [T, heads, D] -> the same shape and type; dimensions from R on pass through."""
    rotary_dim = step.cos.shape[-1]
    wide = x[..., :rotary_dim].float()
    rotated = (wide * step.cos).addcmul_(wide.roll(rotary_dim // 2, -1), step.sin).to(x.dtype)
    if rotary_dim == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., rotary_dim:]), -1)


@jit
def _rope_and_cache_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    qkv_ptr,
    cos_sin_ptr,
    positions_ptr,
    cells_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_scales_ptr,
    v_scales_ptr,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Both norms may be None, and so may both scales, unless the cache is in FP8."""
    TYPE: tl.constexpr = q_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * BLOCK_HEADS
    head = first_head + tl.arange(0, BLOCK_HEADS)[:, None]
    index = tl.arange(0, BLOCK_HALF)[None, :]
    # Dimensions that are not rotated are paired up too, and pass through.
    is_rotated = index < ROTARY_DIM // 2
    low = tl.where(is_rotated, index, index + ROTARY_DIM // 2)
    high = low + tl.where(is_rotated, ROTARY_DIM // 2, (HEAD_DIM - ROTARY_DIM) // 2)
    mask = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (index < HEAD_DIM // 2)

    row = qkv_ptr + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM) + head * HEAD_DIM
    first = tl.load(row + low, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(row + high, mask=mask, other=0.0).to(tl.float32)
    position = tl.load(positions_ptr + token)
    cell = tl.load(cells_ptr + token)
    angle = cos_sin_ptr + position * ROTARY_DIM + index
    is_turned = is_rotated & (head < NUM_HEADS + NUM_KV_HEADS)
    cos = tl.where(is_turned, tl.load(angle, mask=is_rotated, other=1.0), 1.0)
    sin = tl.where(is_turned, tl.load(angle + ROTARY_DIM // 2, mask=is_rotated, other=0.0), 0.0)
    is_q = mask & (head < NUM_HEADS)
    if q_norm_ptr is not None:
        is_k = mask & (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
        norm = tl.rsqrt(tl.sum(first * first + second * second, 1) / HEAD_DIM + eps)[:, None]
        norm = tl.where(head < NUM_HEADS + NUM_KV_HEADS, norm, 1.0)
        first *= norm * tl.load(q_norm_ptr + low, mask=is_q, other=1.0).to(tl.float32)
        first *= tl.load(k_norm_ptr + low, mask=is_k, other=1.0).to(tl.float32)
        second *= norm * tl.load(q_norm_ptr + high, mask=is_q, other=1.0).to(tl.float32)
        second *= tl.load(k_norm_ptr + high, mask=is_k, other=1.0).to(tl.float32)
    turned_first = (first * cos - second * sin).to(TYPE)
    turned_second = (second * cos + first * sin).to(TYPE)

    q_row = q_ptr + token * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
    tl.store(q_row + low, turned_first, mask=is_q)
    tl.store(q_row + high, turned_second, mask=is_q)
    if first_head + BLOCK_HEADS <= NUM_HEADS:
        return

    is_k_head = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_v_head = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    # Cells of the token's first KV head, and from there on.
    first_cell = (cell // PAGE_SIZE) * (NUM_KV_HEADS * PAGE_SIZE) + cell % PAGE_SIZE
    cells = (head - NUM_HEADS) % NUM_KV_HEADS * PAGE_SIZE
    if k_scales_ptr is not None:
        largest = tl.maximum(tl.abs(turned_first.to(tl.float32)), tl.abs(turned_second.to(tl.float32)))
        scales = row_scales(tl.max(largest, 1)[:, None], TYPE)
        tl.store(k_scales_ptr + first_cell + cells, scales, mask=is_k_head)
        tl.store(v_scales_ptr + first_cell + cells, scales, mask=is_v_head)
        turned_first = encode_rows(turned_first, scales)
        turned_second = encode_rows(turned_second, scales)
    k_row = k_cache_ptr + first_cell * HEAD_DIM + cells * HEAD_DIM
    v_row = v_cache_ptr + first_cell * HEAD_DIM + cells * HEAD_DIM
    tl.store(k_row + low, turned_first, mask=mask & is_k_head)
    tl.store(k_row + high, turned_second, mask=mask & is_k_head)
    tl.store(v_row + low, turned_first, mask=mask & is_v_head)
    tl.store(v_row + high, turned_second, mask=mask & is_v_head)


@with_fallback(rope_and_cache_ref)
def _launch_rope_and_cache(
    qkv: Tensor,
    step: PositionRope,
    k_cache: Cache,
    v_cache: Cache,
    num_heads: int,
    head_norms: HeadNorms | None = None,
) -> Tensor:
    _, num_kv_heads, page_size, head_dim = k_cache.shape
    assert qkv.is_contiguous()
    (k_values, k_scales), (v_values, v_scales) = cache_tensors(k_cache), cache_tensors(v_cache)
    q = torch.empty(qkv.shape[0], num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    block_half = next_power_of_2(head_dim // 2)
    num_warps = max(THREADS_PER_PAIR * block_half // 32, 1)
    grid = (qkv.shape[0], ceil_div(num_heads + 2 * num_kv_heads, HEADS_PER_PROGRAM))
    _rope_and_cache_kernel[grid](
        q,
        k_values,
        v_values,
        qkv,
        step.cos_sin,
        step.positions,
        step.cells,
        None if head_norms is None else head_norms.q,
        None if head_norms is None else head_norms.k,
        k_scales,
        v_scales,
        None if head_norms is None else head_norms.eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=step.cos_sin.shape[1],
        PAGE_SIZE=page_size,
        BLOCK_HEADS=HEADS_PER_PROGRAM,
        BLOCK_HALF=block_half,
        **launch_options(num_warps),
    )
    return q


def rope_and_cache(
    qkv: Tensor,
    step: RopeStep,
    k_cache: Cache,
    v_cache: Cache,
    num_heads: int,
    head_norms: HeadNorms | None = None,
) -> Tensor:
    """Norm and rotate q and k, write k and v to their cells, return q [T, Hq, D].

    step: of `prepare_rope`. head_norms: None where heads have no norms."""
    op = _launch_rope_and_cache if isinstance(step, PositionRope) else rope_and_cache_ref
    return op(qkv, step, k_cache, v_cache, num_heads, head_norms)
