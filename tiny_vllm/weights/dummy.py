"""Seeded random weights, for running a model's shape without its checkpoint.

Every value is a hash of (seed, tensor name, position), computed with integers that are exact everywhere, so
a seed gives the same weights on every device, whichever tensors are made and in whatever order.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

HASH_MULTIPLIER = 0x45D9F3B
MASK_32 = 0xFFFFFFFF
VALUES_AT_ONCE = 1 << 20
NORM_SPREAD = 0.1
BIAS_SPREAD = 0.02


def dummy_tensors(
    shapes: Mapping[str, tuple[int, ...]], *, seed: int, device: torch.device, norm_offset: float = 0.0
) -> Iterator[tuple[str, Tensor]]:
    """Yield (canonical name, FP32 tensor).

    Matrices have mean 0 and standard deviation 1/sqrt(columns), so that activations keep their size from
    layer to layer and logits are spread; norms lie close to 1, or to what makes 1 with the model's offset,
    biases close to 0.
    """
    for name, shape in shapes.items():
        values = _uniform(math.prod(shape), zlib.crc32(f"{seed}/{name}".encode()), device).view(shape)
        if name.endswith("norm"):
            yield name, 1.0 - norm_offset + NORM_SPREAD * values
        elif name.endswith("bias"):
            yield name, BIAS_SPREAD * values
        else:
            # Uniform on [-1, 1) has standard deviation 1/sqrt(3).
            yield name, math.sqrt(3.0 / shape[-1]) * values


def _uniform(count: int, key: int, device: torch.device) -> Tensor:
    """`count` FP32 values on [-1, 1), a function of key and position alone."""
    out = torch.empty(count, dtype=torch.float32, device=device)
    for start in range(0, count, VALUES_AT_ONCE):
        end = min(start + VALUES_AT_ONCE, count)
        state = torch.arange(start, end, dtype=torch.int64, device=device)
        state = (state & MASK_32) ^ key ^ (state >> 32)
        # Products stay below 2**59, so int64 never overflows.
        for _ in range(2):
            state = ((state ^ (state >> 16)) * HASH_MULTIPLIER) & MASK_32
        state ^= state >> 16
        # 24 bits are exact in FP32.
        out[start:end] = (state >> 8).float() / (1 << 23) - 1.0
    return out
