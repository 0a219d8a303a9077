"""What the products of this folder have in common on the host: their sources, operands and maps."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from tiny_vllm.kernels import hopper_decode, hopper_prefill
from tiny_vllm.kernels.cuda.tensor_map import BoxedTensor, Encode

TERMS = 64  # of K at a time
SHARED_LIMIT = 232448  # bytes a block of an H200 can have


def join_sources(*names: str, instruction: str = "") -> str:
    """Files of this folder behind all instructions. instruction: one more."""
    here = Path(__file__).parent
    folders = Path(hopper_prefill.__file__).parent, Path(hopper_decode.__file__).parent, here
    texts = [(folder / "instructions.cu").read_text(encoding="utf-8") for folder in folders]
    return "".join([*texts, instruction, *((here / name).read_text(encoding="utf-8") for name in names)])


def operand_obstacle(x: Tensor, weight: Tensor) -> str | None:
    """Why no product here can take x [M, K] and weight [N, K], whatever the device; None if one can."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"the type {x.dtype} has no tensor cores of 16 bits"
    if weight.dtype != x.dtype:
        return f"the matrix's type {weight.dtype} is not that of the rows, {x.dtype}"
    if x.shape[1] % TERMS or x.shape[1] == 0:
        return f"{x.shape[1]} terms are no multiple of {TERMS}"
    for name, tensor in (("rows", x), ("matrix", weight)):
        if tensor.stride(1) != 1 or tensor.stride(0) % 8 or tensor.data_ptr() % 16:
            return f"the {name}' values are not contiguous, or rows do not begin at multiples of 16 bytes"
    return None


def encode_matrices(encode: Encode, boxes: Iterable[tuple[Tensor, int]]) -> bytes:
    """Maps of matrices, one behind the other, with the rows of a box, which has 64 columns."""
    return b"".join(
        _encode_matrix(encode, matrix.data_ptr(), matrix.dtype, matrix.shape, matrix.stride(0), rows)
        for matrix, rows in boxes
    )


@functools.lru_cache(maxsize=8192)
def _encode_matrix(
    encode: Encode, address: int, dtype: torch.dtype, shape: tuple[int, ...], stride: int, rows: int
) -> bytes:
    """stride: of rows."""
    sizes, steps = (shape[1], shape[0]), (stride * dtype.itemsize,)
    return encode(BoxedTensor(address, dtype, sizes, steps, (64, rows)))
