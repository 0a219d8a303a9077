"""RMSNorm, the QKV projection, rotation, and the write of k and v into their pages, as one kernel.

x [M, K] -> q [M, Hq, D]; k and v of the M tokens go to their cells. See `norm_linear` for the product and
`rope` for the rotation and the caches. Moves the QKV matrix once: (Hq + 2 Hkv) * D * K values.

A program owns pairs of rows (i, i + R/2) of heads, because a rotation mixes exactly these; dimensions that
are not rotated are paired up among themselves and turned by nothing. More than a few tokens take separate
kernels.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
from torch import Tensor

from tiny_vllm.kernels.norm_linear import (
    MAX_SMALL_ROWS,
    choose_tiles,
    halves,
    norm_linear,
    small_products,
)
from tiny_vllm.kernels.rope import prepare_rope, rope_and_cache
from tiny_vllm.kernels.triton_support import (
    ceil_div,
    jit,
    launch_dependents,
    launch_options,
    runs_triton,
    tl,
    with_fallback,
)


def qkv_rope_and_cache_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    cells: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    pdl: bool = False,
) -> Tensor:
    """As separate operators. `pdl` is ignored."""
    qkv = norm_linear(x, weight, norm_weight=norm_weight, eps=eps, bias=bias)
    step = prepare_rope(cos_sin, positions, cells, k_cache.shape[1], k_cache.shape[2])
    return rope_and_cache(qkv, step, k_cache, v_cache, num_heads)


@jit
def rows_of_pair(pair, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr):
    """A pair's head, its two rows within the head, and whether they are rotated."""
    index = pair % (HEAD_DIM // 2)
    is_rotated = index < ROTARY_DIM // 2
    low = tl.where(is_rotated, index, index + ROTARY_DIM // 2)
    high = low + tl.where(is_rotated, ROTARY_DIM // 2, (HEAD_DIM - ROTARY_DIM) // 2)
    return pair // (HEAD_DIM // 2), low, high, is_rotated


@jit
def _qkv_rope_and_cache_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    cos_sin_ptr,
    positions_ptr,
    cells_ptr,
    num_rows,
    eps,
    K: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
    NUM_PAIRS: tl.constexpr = BLOCK_N // 2
    first_pair = tl.program_id(0) * NUM_PAIRS
    pair = first_pair + tl.arange(0, NUM_PAIRS)
    is_pair = pair < (NUM_HEADS + 2 * NUM_KV_HEADS) * (HEAD_DIM // 2)
    head, low, high, is_rotated = rows_of_pair(pair, HEAD_DIM, ROTARY_DIM)
    index = pair % (HEAD_DIM // 2)

    # The first kernel of the step wrote these, and it is complete: they may be read before the wait.
    row = tl.arange(0, BLOCK_M)
    is_token = row < num_rows
    position = tl.load(positions_ptr + row, mask=is_token, other=0)
    cell = tl.load(cells_ptr + row, mask=is_token, other=0)
    is_turned = (is_rotated & (head < NUM_HEADS + NUM_KV_HEADS) & is_pair)[:, None] & is_token[None, :]
    angle = cos_sin_ptr + position[None, :] * ROTARY_DIM + index[:, None]
    cos = tl.load(angle, mask=is_turned, other=1.0)
    sin = tl.load(angle + ROTARY_DIM // 2, mask=is_turned, other=0.0)

    # The first rows of the pairs, then their second rows.
    place = tl.arange(0, BLOCK_N)
    both_heads, both_low, both_high, _ = rows_of_pair(first_pair + place % NUM_PAIRS, HEAD_DIM, ROTARY_DIM)
    rows = both_heads * HEAD_DIM + tl.where(place < NUM_PAIRS, both_low, both_high)
    is_row = both_heads < NUM_HEADS + 2 * NUM_KV_HEADS
    products = small_products(
        x_ptr, weight_ptr, norm_ptr, rows, is_row, num_rows, eps,
        K, BLOCK_M, BLOCK_N, BLOCK_K, DEPTH, NUM_SPLITS, True, PDL,
    )  # fmt: skip
    if HAS_BIAS:
        products += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    first, second = halves(products, BLOCK_N, BLOCK_M)
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    turned_first = turned_first.to(q_ptr.dtype.element_ty)
    turned_second = turned_second.to(q_ptr.dtype.element_ty)

    mask = is_pair[:, None] & is_token[None, :]
    is_q = mask & (head < NUM_HEADS)[:, None]
    q_row = q_ptr + (row[None, :] * NUM_HEADS + head[:, None]) * HEAD_DIM
    tl.store(q_row + low[:, None], turned_first, mask=is_q)
    tl.store(q_row + high[:, None], turned_second, mask=is_q)

    kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
    page = (cell // PAGE_SIZE).to(tl.int64)
    cache_row = (page[None, :] * NUM_KV_HEADS + kv_head[:, None]) * PAGE_SIZE + (cell % PAGE_SIZE)[None, :]
    is_k = mask & ((head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS))[:, None]
    is_v = mask & (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    tl.store(k_cache_ptr + cache_row * HEAD_DIM + low[:, None], turned_first, mask=is_k)
    tl.store(k_cache_ptr + cache_row * HEAD_DIM + high[:, None], turned_second, mask=is_k)
    tl.store(v_cache_ptr + cache_row * HEAD_DIM + low[:, None], turned_first, mask=is_v)
    tl.store(v_cache_ptr + cache_row * HEAD_DIM + high[:, None], turned_second, mask=is_v)


@with_fallback(qkv_rope_and_cache_ref)
def _launch_qkv_rope_and_cache(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    cells: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    pdl: bool = False,
) -> Tensor:
    num_rows, K = x.shape
    _, num_kv_heads, page_size, head_dim = k_cache.shape
    assert (
        x.is_contiguous() and weight.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()
    )
    q = torch.empty(num_rows, num_heads, head_dim, dtype=x.dtype, device=x.device)
    tiles = choose_tiles(num_rows, weight.shape[0], K)
    num_warps = tiles.pop("num_warps")
    _qkv_rope_and_cache_kernel[(ceil_div(weight.shape[0], tiles["BLOCK_N"]),)](
        q,
        k_cache,
        v_cache,
        x,
        weight,
        x if bias is None else bias,
        norm_weight,
        cos_sin,
        positions,
        cells,
        num_rows,
        eps,
        K=K,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=cos_sin.shape[1],
        PAGE_SIZE=page_size,
        **tiles,
        HAS_BIAS=bias is not None,
        PDL=pdl,
        **launch_options(num_warps, pdl),
    )
    return q


def qkv_rope_and_cache(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    cells: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    pdl: bool = False,
) -> Tensor:
    """x [M, K] before the norm -> q [M, Hq, D], rotated; writes k and v.

    weight [(Hq + 2 Hkv) * D, K]; cos_sin [max_len, R] FP32; positions, cells [M] int64. pdl: see
    `triton_support`; positions and cells must then be complete before the preceding kernel starts.
    """
    small = x.shape[0] <= MAX_SMALL_ROWS and runs_triton(x)
    op = _launch_qkv_rope_and_cache if small else qkv_rope_and_cache_ref
    return op(
        x, weight, bias, norm_weight, eps, cos_sin, positions, cells, k_cache, v_cache, num_heads, pdl
    )  # fmt: skip
