"""The weights of a decoder in the order in which a decode step reads them.

A matrix [rows, columns] becomes blocks of 32 rows; a block holds, column after column, its rows' values: 64
bytes in BF16, one cache line. The 32 rows are two groups of 16, the first and the second: a column of a BF16
block alternates first, second, first, ... so that one 32-bit word carries both; of an FP32 block it is the
first group, then the second. Missing rows are zeros. Gate and up form one matrix whose blocks have 16 gate
rows as first group and the 16 up rows that belong to them as second.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

GROUP = 16
BLOCK = 2 * GROUP
CACHE_LINE = 64

Array = npt.NDArray


def num_blocks(num_rows: int) -> int:
    return -(-num_rows // BLOCK)


def padded(num_rows: int) -> int:
    """num_rows rounded up to whole blocks."""
    return num_blocks(num_rows) * BLOCK


def values_view(tensor: Tensor) -> Array:
    """A contiguous FP32 or BF16 tensor's memory as an array: float32, or uint16 with BF16 bits."""
    assert tensor.is_contiguous()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: Array = tensor.detach().numpy()
    return array


def allocate(num_values: int, dtype: torch.dtype) -> Array:
    """Uninitialised values that begin at a cache line. numpy asks for huge pages, torch does not."""
    value_bytes = dtype.itemsize
    memory = np.empty(num_values * value_bytes + CACHE_LINE, dtype=np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    kind = np.uint16 if dtype == torch.bfloat16 else np.float32
    return memory[start : start + num_values * value_bytes].view(kind)


def pair_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """values [rows, ...] -> first and second groups [blocks, 16, ...], padded with zeros."""
    blocks = _pad(values, BLOCK).unflatten(0, (-1, 2, GROUP))
    return blocks[:, 0], blocks[:, 1]


def pair_gate_up(values: Tensor) -> tuple[Tensor, Tensor]:
    """values [2 * intermediate, ...], gate then up -> their groups [blocks, 16, ...]."""
    gate, up = (_pad(half, GROUP).unflatten(0, (-1, GROUP)) for half in values.chunk(2))
    return gate, up


def pack(groups: tuple[Tensor, Tensor], target: Array) -> None:
    """Write a matrix, as groups [blocks, 16, columns], to its place in the tape."""
    first, second = groups
    dim = -1 if first.dtype == torch.bfloat16 else -2
    columns = torch.stack((first.mT, second.mT), dim)
    target[:] = values_view(columns.contiguous().flatten())


def _pad(values: Tensor, multiple: int) -> Tensor:
    missing = -len(values) % multiple
    if not missing:
        return values
    return torch.cat((values, values.new_zeros(missing, *values.shape[1:])))
