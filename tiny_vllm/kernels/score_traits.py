"""What some families do to attention scores, for the attention kernels. Scores are in base 2: s * log2(e).

soft cap c:  s becomes c * tanh(s / c), which never exceeds c (Bello et al. 2016, arXiv 1611.09940)
sinks:       one more score per query head, learnt, that takes part in the softmax and has no value
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from tiny_vllm.kernels.triton_support import jit, tl

LOG2_E = tl.constexpr(1.4426950408889634)


@jit
def cap_scores(scores, SOFTCAP: tl.constexpr):
    """SOFTCAP: 0 for none. tanh(x) = (1 - e) / (1 + e), e = exp(-2 x), of |x| so that e cannot overflow."""
    if SOFTCAP > 0:
        e = tl.exp2(tl.abs(scores) * (-2.0 / SOFTCAP))
        capped = (1.0 - e) / (1.0 + e) * (SOFTCAP * LOG2_E)
        return tl.where(scores < 0, -capped, capped)
    else:
        return scores


@jit
def load_sinks(sinks_ptr, heads, mask):
    """The scores [heads] of sinks."""
    return tl.load(sinks_ptr + heads, mask=mask, other=0.0).to(tl.float32) * LOG2_E
