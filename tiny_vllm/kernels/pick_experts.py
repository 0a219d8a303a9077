"""The experts of each token: the largest of the softmax of the router's logits, and their weights.

    p = softmax(sum over s of parts[s] + b);  the NUM_ACTIVE largest p, or these divided by their sum

parts [S, T, E], b [E] -> experts [T, NUM_ACTIVE] int32, the likeliest first, and weights FP32. Equal ones
favour the lower expert, so that a row alone decides its experts. FP32 arithmetic. Moves S * T * E values:
bound by latency. Source: Shazeer et al. 2017, arXiv 1701.06538.

A program takes a token: its probabilities stay in registers while the largest is taken out NUM_ACTIVE times.
It adds the parts of a product whose K was split, as every kernel does that needs whole rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
from torch import Tensor

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

# 512 experts are four per thread.
NUM_WARPS = 1


def pick_experts_ref(
    parts: Tensor, bias: Tensor | None, num_active: int, normalize: bool, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """By sorting. `pdl` is ignored."""
    logits = parts.float().sum(0)
    if bias is not None:
        logits = logits + bias.float()
    probabilities, experts = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, experts = probabilities[:, :num_active], experts[:, :num_active].int()
    return experts, weights / weights.sum(-1, keepdim=True) if normalize else weights


@jit(do_not_specialize=("num_tokens",))
def _pick_experts_kernel(
    experts_ptr,
    weights_ptr,
    parts_ptr,
    bias_ptr,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    SPLITS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ACTIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (T,). bias_ptr may be None."""
    token = tl.program_id(0)
    if PDL:
        launch_dependents()
    expert = tl.arange(0, BLOCK)
    is_expert = expert < NUM_EXPERTS
    logits = tl.zeros((BLOCK,), tl.float32)
    if bias_ptr is not None:
        logits = tl.load(bias_ptr + expert, mask=is_expert, other=0.0).to(tl.float32)
    if PDL:
        wait_for_predecessor()
    for split in tl.static_range(SPLITS):
        place = (split * num_tokens + token).to(tl.int64) * NUM_EXPERTS + expert
        logits += tl.load(parts_ptr + place, mask=is_expert, other=0.0).to(tl.float32)
    logits = tl.where(is_expert, logits, float("-inf"))
    # A maximum passes over what is no number, a sum does not: the weights of such a row are none either.
    maximum = tl.max(logits, 0)
    shares = tl.exp(logits - tl.where(maximum == float("-inf"), 0.0, maximum))
    total = tl.sum(shares, 0)

    rank = tl.arange(0, BLOCK_ACTIVE)
    picked = tl.zeros((BLOCK_ACTIVE,), tl.int32)
    weights = tl.zeros((BLOCK_ACTIVE,), tl.float32)
    left = tl.where(is_expert, shares, -1.0)
    for place in tl.static_range(NUM_ACTIVE):
        largest = tl.max(left, 0)
        # No expert may be the largest then, but one that exists must be picked.
        best = tl.minimum(tl.min(tl.where(left == largest, expert, BLOCK), 0), NUM_EXPERTS - 1)
        picked = tl.where(rank == place, best, picked)
        weights = tl.where(rank == place, largest, weights)
        left = tl.where(expert == best, -1.0, left)
    weights = weights / total
    if NORMALIZE:
        weights = weights / tl.sum(weights, 0)
    where = token * NUM_ACTIVE + rank
    tl.store(experts_ptr + where, picked, mask=rank < NUM_ACTIVE)
    tl.store(weights_ptr + where, weights, mask=rank < NUM_ACTIVE)


@with_fallback(pick_experts_ref)
def _launch_pick_experts(
    parts: Tensor, bias: Tensor | None, num_active: int, normalize: bool, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    splits, num_tokens, num_experts = parts.shape
    assert parts.is_contiguous()
    experts = torch.empty(num_tokens, num_active, dtype=torch.int32, device=parts.device)
    weights = torch.empty(num_tokens, num_active, dtype=torch.float32, device=parts.device)
    _pick_experts_kernel[(num_tokens,)](
        experts,
        weights,
        parts,
        bias,
        num_tokens,
        NUM_EXPERTS=num_experts,
        NUM_ACTIVE=num_active,
        SPLITS=splits,
        NORMALIZE=normalize,
        BLOCK=next_power_of_2(num_experts),
        BLOCK_ACTIVE=next_power_of_2(num_active),
        PDL=pdl,
        **launch_options(NUM_WARPS, pdl),
    )
    return experts, weights


def pick_experts(
    parts: Tensor, bias: Tensor | None, num_active: int, normalize: bool, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """parts [S, T, E], bias [E] or None -> experts [T, num_active] int32, weights FP32. pdl: see
    `triton_support`."""
    op = _launch_pick_experts if runs_triton(parts) and parts.shape[1] else pick_experts_ref
    return op(parts, bias, num_active, normalize, pdl)
