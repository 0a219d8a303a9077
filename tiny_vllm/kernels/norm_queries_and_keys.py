"""RMSNorm of queries and keys over all their heads, from the parts of a QKV product.

    q, k, v = sum over s of parts[s] + b;  q = rmsnorm(q) * q_norm;  k = rmsnorm(k) * k_norm

parts [S, M, N] FP32 or of the model's type, columns q, k, v; b [N]; q_norm [Nq], k_norm [Nk], and
N = Nq + 2 Nk. Result [1, M, N] FP32, as a product that was not split, which attention rotates and rounds.
FP32 arithmetic in a fixed order. Moves (4 * S + 4) * M * N bytes for about (S + 4) * M * N FLOPs.

Norms of single heads need no kernel of their own, because who rotates a head sees all of it
(`rope_and_attend`). Here a program sees the queries, the keys or the values of a row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
from torch import Tensor

from tiny_vllm.kernels.rms_norm import rms_norm_ref
from tiny_vllm.kernels.triton_support import (
    jit,
    launch_dependents,
    launch_options,
    next_power_of_2,
    runs_triton,
    tl,
    wait_for_predecessor,
    with_fallback,
)

# (most values of a program, warps): 16 values per thread.
NUM_WARPS = ((2048, 4), (4096, 8), (1 << 20, 16))


def norm_queries_and_keys_ref(
    parts: Tensor, bias: Tensor | None, q_norm: Tensor, k_norm: Tensor, eps: float, pdl: bool = False
) -> Tensor:
    """As torch operators. `pdl` is ignored."""
    qkv = parts.float().sum(0)
    if bias is not None:
        qkv = qkv + bias.float()
    q, k, v = qkv.split([len(q_norm), len(k_norm), len(k_norm)], 1)
    return torch.cat((rms_norm_ref(q, q_norm, eps), rms_norm_ref(k, k_norm, eps), v), 1).unsqueeze(0)


@jit
def _norm_queries_and_keys_kernel(
    normed_ptr,
    parts_ptr,
    bias_ptr,
    q_norm_ptr,
    k_norm_ptr,
    num_rows,
    eps,
    Q_SIZE: tl.constexpr,
    KV_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (M, 3): the queries, the keys or the values of a row each."""
    row = tl.program_id(0)
    kind = tl.program_id(1)
    if PDL:
        launch_dependents()
    N: tl.constexpr = Q_SIZE + 2 * KV_SIZE
    size = tl.where(kind == 0, Q_SIZE, KV_SIZE)
    first = tl.where(kind == 0, 0, Q_SIZE + (kind - 1) * KV_SIZE)
    place = tl.arange(0, BLOCK)
    mask = place < size
    norm = tl.load(q_norm_ptr + place, mask=mask & (kind == 0), other=1.0).to(tl.float32)
    norm *= tl.load(k_norm_ptr + place, mask=mask & (kind == 1), other=1.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        total = tl.load(bias_ptr + first + place, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        wait_for_predecessor()
    for split in tl.static_range(SPLITS):
        values = parts_ptr + (split * num_rows + row) * N + first + place
        total += tl.load(values, mask=mask, other=0.0).to(tl.float32)
    if kind < 2:
        total *= tl.rsqrt(tl.sum(total * total, 0) / size + eps) * norm
    tl.store(normed_ptr + row * N + first + place, total, mask=mask)


@with_fallback(norm_queries_and_keys_ref)
def _launch_norm_queries_and_keys(
    parts: Tensor, bias: Tensor | None, q_norm: Tensor, k_norm: Tensor, eps: float, pdl: bool = False
) -> Tensor:
    splits, num_rows, width = parts.shape
    q_size, kv_size = len(q_norm), len(k_norm)
    assert parts.is_contiguous() and width == q_size + 2 * kv_size
    normed = torch.empty(1, num_rows, width, dtype=torch.float32, device=parts.device)
    block = next_power_of_2(q_size)
    _norm_queries_and_keys_kernel[(num_rows, 3)](
        normed,
        parts,
        parts if bias is None else bias,
        q_norm,
        k_norm,
        num_rows,
        eps,
        Q_SIZE=q_size,
        KV_SIZE=kv_size,
        BLOCK=block,
        SPLITS=splits,
        HAS_BIAS=bias is not None,
        PDL=pdl,
        **launch_options(next(warps for limit, warps in NUM_WARPS if limit >= block), pdl),
    )
    return normed


def norm_queries_and_keys(
    parts: Tensor, bias: Tensor | None, q_norm: Tensor, k_norm: Tensor, eps: float, pdl: bool = False
) -> Tensor:
    """[1, M, N] FP32. There are at least as many queries as keys. pdl: see `triton_support`."""
    op = _launch_norm_queries_and_keys if runs_triton(parts) else norm_queries_and_keys_ref
    return op(parts, bias, q_norm, k_norm, eps, pdl)
