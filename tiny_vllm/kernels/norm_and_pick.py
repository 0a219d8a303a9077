"""RMSNorm of few rows and the choice of their experts, as one kernel.

    normed = rmsnorm(x) * norm_weight;  p = softmax(sum over s of parts[s] + b);  the NUM_ACTIVE largest p

x [T, H]; parts [S, T, E], b [E] as in pick_experts.py, whose experts and weights these are. FP32 arithmetic.
Moves some kilobytes: bound by latency.

Two programs of one warp take a token: one picks its experts, the other makes what the experts' products
read. The router's product, which norms its input itself, then needs no kernel before it that norms.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
from torch import Tensor

from tiny_vllm.kernels.pick_experts import pick_experts_ref, store_picks
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

# A warp's lanes meet without a barrier.
NUM_WARPS = 1
# 2,048 values are 64 per lane.
MAX_BLOCK = 2048


def norm_and_pick_ref(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    parts: Tensor,
    bias: Tensor | None,
    num_active: int,
    normalize: bool,
    pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """As operators of their own. `pdl` is ignored."""
    return rms_norm_ref(x, norm_weight, eps), *pick_experts_ref(parts, bias, num_active, normalize)


@jit
def _norm_row(normed_ptr, x_ptr, norm_ptr, row, eps, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Read the row twice, the second time from the first cache level. Waits for the preceding kernel."""
    column = tl.arange(0, BLOCK)
    # For the first block, before the wait; beyond, this brings the weights near.
    norm = tl.load(norm_ptr + column, mask=column < N, other=0.0)
    if PDL:
        wait_for_predecessor()
    x_ptr += row.to(tl.int64) * N
    normed_ptr += row.to(tl.int64) * N
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in tl.static_range(0, N, BLOCK):
        x = tl.load(x_ptr + first + column, mask=first + column < N, other=0.0).to(tl.float32)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, 0) / N + eps)
    for first in tl.static_range(0, N, BLOCK):
        if first > 0:
            norm = tl.load(norm_ptr + first + column, mask=first + column < N, other=0.0)
        x = tl.load(x_ptr + first + column, mask=first + column < N, other=0.0).to(tl.float32)
        normed = (x * scale * norm.to(tl.float32)).to(normed_ptr.dtype.element_ty)
        tl.store(normed_ptr + first + column, normed, mask=first + column < N)


@jit(do_not_specialize=("num_tokens",))
def _norm_and_pick_kernel(
    normed_ptr,
    experts_ptr,
    weights_ptr,
    x_ptr,
    norm_ptr,
    parts_ptr,
    bias_ptr,
    num_tokens,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    SPLITS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (T, 2). bias_ptr may be None."""
    token = tl.program_id(0)
    if PDL:
        launch_dependents()
    if tl.program_id(1) == 0:
        store_picks(
            experts_ptr, weights_ptr, parts_ptr, bias_ptr, token, num_tokens,
            NUM_EXPERTS, NUM_ACTIVE, SPLITS, NORMALIZE, BLOCK_EXPERTS, PDL,
        )  # fmt: skip
    else:
        _norm_row(normed_ptr, x_ptr, norm_ptr, token, eps, HIDDEN, BLOCK_HIDDEN, PDL)


@with_fallback(norm_and_pick_ref)
def _launch_norm_and_pick(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    parts: Tensor,
    bias: Tensor | None,
    num_active: int,
    normalize: bool,
    pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    splits, num_tokens, num_experts = parts.shape
    assert parts.is_contiguous() and x.is_contiguous()
    normed = torch.empty_like(x)
    experts = torch.empty(num_tokens, num_active, dtype=torch.int32, device=x.device)
    weights = torch.empty(num_tokens, num_active, dtype=torch.float32, device=x.device)
    _norm_and_pick_kernel[(num_tokens, 2)](
        normed,
        experts,
        weights,
        x,
        norm_weight,
        parts,
        bias,
        num_tokens,
        eps,
        HIDDEN=x.shape[1],
        BLOCK_HIDDEN=min(next_power_of_2(x.shape[1]), MAX_BLOCK),
        NUM_EXPERTS=num_experts,
        BLOCK_EXPERTS=next_power_of_2(num_experts),
        NUM_ACTIVE=num_active,
        SPLITS=splits,
        NORMALIZE=normalize,
        PDL=pdl,
        **launch_options(NUM_WARPS, pdl),
    )
    return normed, experts, weights


def norm_and_pick(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    parts: Tensor,
    bias: Tensor | None,
    num_active: int,
    normalize: bool,
    pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H], parts [S, T, E], bias [E] or None -> normed [T, H], experts [T, num_active] int32, weights
    FP32. pdl: see `triton_support`."""
    op = _launch_norm_and_pick if runs_triton(x) else norm_and_pick_ref
    return op(x, norm_weight, eps, parts, bias, num_active, normalize, pdl)
