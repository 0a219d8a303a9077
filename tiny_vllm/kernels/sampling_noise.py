"""Counter-based randomness: noise is a pure function of (seed, output position, token id).

Nothing is stored between draws, so a request draws the same tokens alone, in any batch, in any slot and
after a preemption.

    keys  = high and low half of splitmix64(stream(seed) + position * GAMMA)
    x     = mix((token_id + GOLDEN) * (key[1] | 1) ^ key[0])    32-bit integers, arithmetic modulo 2**32
    u     = (x mod 2**31 + 1/2) * 2**-31                        FP32, in (0, 1)
    E     = -log1p(-u)                                          exponential arrival time, mean 1

The token with the smallest E / p wins with probability p: an exponential race, the same as taking the largest
logit - log(E). Winners have a small E, and FP32 is finest near 0, which is why E comes from log1p(-u) and not
from log(u). 31 bits give a smallest E of 2.3e-10, so the noise resolves probabilities down to about 1e-9.
Two 32-bit keys, not one: after 65,000 draws with one, two positions would probably share all their noise.
Rejected: the second key xored in between the two rounds of mixing. It saves a multiplication, but what is
left of the mixing does not separate keys that differ in it alone (their noise correlates at 0.2 to 0.6).

Rejected: one uniform number and a search in the cumulative sum. It is cheaper on a CPU, but needs a scan over
the vocabulary where the race needs one pass and no order, so that it also works on shards of a vocabulary.

Cost per token: 14 integer operations and 2 logarithms; no memory traffic of its own in a fused kernel.
Sources: splitmix64 (Steele, Lea, Flood 2014); multipliers of the 32-bit mixer: lowbias32 (C. Wellons, 2018).
"""

from __future__ import annotations

import torch

MASK_64 = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
MIX_64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
GOLDEN_32 = 0x9E3779B1
MIX_32 = (0x7FEB352D, 0x846CA68B)
# Slightly below 2**-31: the largest x rounds up to 2**31 in FP32 and must still give u < 1.
UNIT = 2.0**-31 * (1 - 2.0**-24)


def stream_of_seed(seed: int) -> int:
    """The signed 64-bit stream number of a seed; seeds are taken modulo 2**64.

    Mixing keeps neighbouring seeds apart: without it, one seed's position p+1 could be another's p.
    """
    z = (seed + GAMMA) & MASK_64
    z = ((z ^ (z >> 30)) * MIX_64[0]) & MASK_64
    z = ((z ^ (z >> 27)) * MIX_64[1]) & MASK_64
    return _signed(z ^ (z >> 31), 64)


def noise_keys(streams: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Keys of one draw per row: streams [N] and positions [N], both I64 -> [N, 2] I32."""
    z = streams + positions * _signed(GAMMA, 64)
    z = (z ^ _shift_right(z, 30, 64)) * _signed(MIX_64[0], 64)
    z = (z ^ _shift_right(z, 27, 64)) * _signed(MIX_64[1], 64)
    z = z ^ _shift_right(z, 31, 64)
    return z.view(torch.int32).view(-1, 2)


def log_race_times(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """log(E) of every token: keys [N, 2] I32, token_ids [W] or [N, W] integers -> [N, W] FP32, finite."""
    x = (token_ids.to(torch.int32) + _signed(GOLDEN_32, 32)) * (keys[:, 1:] | 1)
    x ^= keys[:, :1]
    scratch = torch.empty_like(x)
    _fold(x, 16, scratch).mul_(_signed(MIX_32[0], 32))
    _fold(x, 15, scratch).mul_(_signed(MIX_32[1], 32))
    _fold(x, 16, scratch).bitwise_and_(2**31 - 1)
    times = x.to(torch.float32).mul_(-UNIT).sub_(UNIT / 2).log1p_()
    return times.neg_().log_()


def _fold(x: torch.Tensor, bits: int, scratch: torch.Tensor) -> torch.Tensor:
    """x ^= x >> bits, in place, with zeros shifted in."""
    torch.bitwise_right_shift(x, bits, out=scratch).bitwise_and_(2 ** (32 - bits) - 1)
    x ^= scratch
    return x


def _shift_right(x: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Logical shift: torch shifts signed integers arithmetically and has no unsigned shift."""
    return (x >> bits) & (2 ** (width - bits) - 1)


def _signed(value: int, width: int) -> int:
    """The two's complement reading of an unsigned value."""
    return value - 2**width if value >= 2 ** (width - 1) else value
