"""Tensor maps: how Hopper's copy engine (TMA) finds boxes of a tensor in device memory.

A map is 128 opaque bytes that the driver makes and a kernel takes as a parameter, 64-byte aligned. It holds
the tensor's address, so it is good for as long as that memory is.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tiny_vllm.kernels.cuda import driver

MAP_BYTES = 128
# Numbers of cuda.h: CUtensorMapDataType; no interleaving; 128-byte swizzle; no promotion of reads to larger
# ones in L2; zeros beyond the tensor. With promotion to 256 bytes, attention of large batches took 5 to 8 %
# longer on an H200.
DATA_TYPES = {torch.float16: 6, torch.bfloat16: 9}
NO_INTERLEAVE, SWIZZLE_128B, NO_PROMOTION, ZEROS = 0, 3, 0, 0


@dataclass(frozen=True, slots=True)
class BoxedTensor:
    """What a map is made of, the fastest dimension first, its values contiguous.

    address: of the first value, a multiple of 16. sizes: of the dimensions. steps: bytes from one index to
    the next in all dimensions but the fastest, multiples of 16. box: what one copy takes, at most 128 bytes
    of the fastest dimension and 256 of the others.
    """

    address: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    box: tuple[int, ...]


# Makes a map: `encode_tensor_map`, or what stands for it without a driver.
Encode = Callable[[BoxedTensor], bytes]


@functools.lru_cache(maxsize=1024)
def encode_tensor_map(tensor: BoxedTensor) -> bytes:
    """The map for boxes in shared memory whose rows of 128 bytes are permuted (SWIZZLE_128B).

    Raises DriverError if the driver refuses.
    """
    rank = len(tensor.sizes)
    space = ctypes.create_string_buffer(MAP_BYTES + 64)
    aligned = -(-ctypes.addressof(space) // 64) * 64
    status = driver._driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        ctypes.c_int(DATA_TYPES[tensor.dtype]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(tensor.address),
        (ctypes.c_uint64 * rank)(*tensor.sizes),
        (ctypes.c_uint64 * (rank - 1))(*tensor.steps),
        (ctypes.c_uint32 * rank)(*tensor.box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        ctypes.c_int(NO_INTERLEAVE),
        ctypes.c_int(SWIZZLE_128B),
        ctypes.c_int(NO_PROMOTION),
        ctypes.c_int(ZEROS),
    )
    driver._check(status, f"there is no tensor map of {tensor}")
    return ctypes.string_at(aligned, MAP_BYTES)


def set_maps(params: ctypes.Structure, maps: bytes) -> None:
    """Write maps, one behind the other, to the first fields of a kernel's argument.

    A copy of bytes: assigning a field of characters would stop at the first zero.
    """
    ctypes.memmove(ctypes.addressof(params), maps, len(maps))
