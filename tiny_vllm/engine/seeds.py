"""Seeds of random streams: one per choice of a request, independent of everything else that runs."""

from __future__ import annotations

_MASK = 2**64 - 1


def mix(seed: int, stream: int) -> int:
    """A 64-bit seed for stream `stream` of `seed`; splitmix64's output function on their combination."""
    value = (seed + (stream + 1) * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
