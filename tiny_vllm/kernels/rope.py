"""Rotary position embedding of q and k, and the write of k and v into their pages, in one op.

Each pair (x[i], x[i + R/2]) of the first R dimensions of a head is turned by the angle of its position:
    x[i] cos - x[i + R/2] sin,   x[i + R/2] cos + x[i] sin          (half-split pairs, i < R/2)

qkv [T, (Hq + 2 Hkv) * D], columns q, k, v, heads in order. cos_sin [max_len, R] FP32, a row is cos then sin
of one position. k_cache, v_cache [num_pages, Hkv, page_size, D]. FP32 arithmetic, results rounded once to
qkv's type. Moves about 2 * T * (Hq + 2 Hkv) * D values: memory-bound. Source: Su et al. 2021,
arXiv 2104.09864.

Everything that depends only on the positions and cells is the same in every layer: `prepare_rope` computes it
once per step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeStep:
    """What all layers of one step share. T tokens, R rotated dimensions.

    cos: [T, 1, R], both halves equal. sin: [T, 1, R], the first half negated, so that the rotation is
    x * cos + (x with its halves swapped) * sin.
    rows: [T * Hkv] int64, where each token's heads lie in a cache seen as [num_pages * Hkv * page_size, D].
    """

    cos: Tensor
    sin: Tensor
    rows: Tensor


def prepare_rope(
    cos_sin: Tensor, positions: Tensor, cells: Tensor, num_kv_heads: int, page_size: int
) -> RopeStep:
    """positions, cells: [T] int64; cell = page * page_size + offset."""
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, -1)
    first_rows = (cells // page_size) * (num_kv_heads * page_size) + cells % page_size
    heads = torch.arange(0, num_kv_heads * page_size, page_size, device=cells.device)
    return RopeStep(
        cos=torch.cat((cos, cos), -1),
        sin=torch.cat((-sin, sin), -1),
        rows=(first_rows.unsqueeze(1) + heads).flatten(),
    )


def rope_and_cache_ref(
    qkv: Tensor, step: RopeStep, k_cache: Tensor, v_cache: Tensor, num_heads: int
) -> Tensor:
    """Rotate q and k, write k and v to their cells, return q [T, Hq, D]."""
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    rotated = _rotate(heads[:, : num_heads + num_kv_heads], step)
    keys, values = rotated[:, num_heads:], heads[:, num_heads + num_kv_heads :]
    k_cache.view(-1, head_dim).index_copy_(0, step.rows, keys.reshape(-1, head_dim))
    v_cache.view(-1, head_dim).index_copy_(0, step.rows, values.reshape(-1, head_dim))
    return rotated[:, :num_heads]


def _rotate(x: Tensor, step: RopeStep) -> Tensor:
    """x [T, heads, D] -> the same shape and type; dimensions from R on pass through."""
    rotary_dim = step.cos.shape[-1]
    wide = x[..., :rotary_dim].float()
    rotated = (wide * step.cos).addcmul_(wide.roll(rotary_dim // 2, -1), step.sin).to(x.dtype)
    if rotary_dim == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., rotary_dim:]), -1)


rope_and_cache = rope_and_cache_ref
