"""The experts of each token: the largest of the softmax of the router's logits, and their weights.

    p = softmax(sum over s of parts[s] + b);  the NUM_ACTIVE largest p, or these divided by their sum

parts [S, T, E], b [E] -> experts [T, NUM_ACTIVE] int32, the likeliest first, and weights FP32. Equal logits
favour the lower expert, so that a row alone decides its experts. FP32 arithmetic. Moves S * T * E values:
bound by latency. Source: Shazeer et al. 2017, arXiv 1701.06538.

A program of one warp takes a token: its logits stay in registers while the largest is taken out NUM_ACTIVE
times. They are compared as integers of the same order, for which a warp has an instruction that finds the
largest of all its lanes. A program adds the parts of a product whose K was split, as every kernel does that
needs whole rows.
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

# Lanes of one warp find the largest of all without a barrier; 512 experts are 16 per lane.
NUM_WARPS = 1
# The least integer, of no logit.
NOTHING = tl.constexpr(-(1 << 31))


def pick_experts_ref(
    parts: Tensor, bias: Tensor | None, num_active: int, normalize: bool, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """By sorting. `pdl` is ignored."""
    logits = parts.float().sum(0)
    if bias is not None:
        logits = logits + bias.float()
    experts = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_active]
    weights = logits.softmax(-1).gather(-1, experts)
    return experts.int(), weights / weights.sum(-1, keepdim=True) if normalize else weights


@jit
def store_picks(
    experts_ptr, weights_ptr, parts_ptr, bias_ptr, token, num_tokens,
    NUM_EXPERTS: tl.constexpr, NUM_ACTIVE: tl.constexpr, SPLITS: tl.constexpr, NORMALIZE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All of a program's work for a token. Waits for the preceding kernel."""
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

    # Minus zero equals zero. What is no number comes after all numbers, but before what is no expert.
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    left = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    left = tl.where(logits == logits, left, NOTHING + 1)
    left = tl.where(is_expert, left, NOTHING)
    place = tl.full((BLOCK,), NUM_ACTIVE, tl.int32)
    for count in tl.static_range(NUM_ACTIVE):
        best = tl.min(tl.where(left == tl.max(left, 0), expert, BLOCK), 0)
        place = tl.where(expert == best, count, place)
        left = tl.where(expert == best, NOTHING, left)

    logits = tl.where(is_expert, logits, float("-inf"))
    maximum = tl.max(logits, 0)
    shares = tl.exp(logits - tl.where(maximum == float("-inf"), 0.0, maximum))
    is_picked = place < NUM_ACTIVE
    # A maximum passes over what is no number, a sum does not: the weights of such a row are none either.
    in_total = is_picked | (shares != shares) if NORMALIZE else is_expert
    weights = shares / tl.sum(tl.where(in_total, shares, 0.0), 0)
    where = token * NUM_ACTIVE + place
    tl.store(experts_ptr + where, expert, mask=is_picked)
    tl.store(weights_ptr + where, weights, mask=is_picked)


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
    PDL: tl.constexpr,
):
    """Grid (T,). bias_ptr may be None."""
    if PDL:
        launch_dependents()
    store_picks(
        experts_ptr, weights_ptr, parts_ptr, bias_ptr, tl.program_id(0), num_tokens,
        NUM_EXPERTS, NUM_ACTIVE, SPLITS, NORMALIZE, BLOCK, PDL,
    )  # fmt: skip


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
