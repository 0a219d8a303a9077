"""Weights from safetensors files: a length, a JSON header, then the raw tensors.

Source: the safetensors format description. Opening reads the headers alone.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiny_vllm.errors import ModelError

DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}

MAX_HEADER_BYTES = 100_000_000
LENGTH = struct.Struct("<Q")
LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """offset: bytes from the file's start."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int


class SafetensorsFiles:
    """One or several safetensors files as one set of tensors.

    weight_map: tensor name -> file name, as an index states it; every entry must hold. Raises ModelError
    naming the file: not safetensors, truncated, damaged, or contradicting the index.
    """

    def __init__(self, paths: list[Path], weight_map: Mapping[str, str]) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        for path in paths:
            for name, tensor in read_safetensors_header(path).items():
                if name in self.tensors:
                    raise ModelError(f"tensor {name} is in both {self.tensors[name].path} and {path}")
                self.tensors[name] = tensor
        for name, file_name in weight_map.items():
            if name not in self.tensors or self.tensors[name].path.name != file_name:
                raise ModelError(
                    f"the index places tensor {name} in {file_name}, which does not hold it",
                    hint="index and files come from different versions; download the model again",
                )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def dtype(self, names: Mapping[str, str]) -> str:
        """The type to compute in: that of the stored matrices, float32 if they differ.

        names: canonical name -> stored name of the tensors that will be loaded. Raises ModelError for types
        that are not plain floating point.
        """
        kinds = set()
        for name in names.values():
            tensor = self.tensors[name]
            if tensor.dtype not in DTYPES:
                raise ModelError(
                    f"{tensor.path}: tensor {name} has type {tensor.dtype}, which is not supported",
                    hint=f"supported: {', '.join(DTYPES)}",
                )
            if len(tensor.shape) > 1:
                kinds.add(DTYPE_NAMES[tensor.dtype])
        return kinds.pop() if len(kinds) == 1 else "float32"

    def read(self, names: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (canonical name, tensor) file by file, in the order of the data."""
        wanted = [(self.tensors[name], part) for part, name in names.items()]
        wanted.sort(key=lambda item: (item[0].path, item[0].offset))
        path, data = None, None
        for tensor, part in wanted:
            if path != tensor.path:
                path, data = tensor.path, _map(tensor.path)
            assert data is not None
            values = torch.frombuffer(
                data, dtype=DTYPES[tensor.dtype], count=math.prod(tensor.shape), offset=tensor.offset
            )
            yield part, values.view(tensor.shape)


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """Name -> place of each tensor. Raises ModelError unless the file is exactly as long as it says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(LENGTH.size)
            header_bytes = LENGTH.unpack(first)[0] if len(first) == LENGTH.size else 0
            if LFS_POINTER.startswith(first) and first:
                raise ModelError(f"{path} is a Git LFS pointer, not the weights", hint="run git lfs pull")
            if not 2 <= header_bytes <= MAX_HEADER_BYTES:
                raise ModelError(f"{path} is not a safetensors file", hint="download it again")
            header = file.read(header_bytes)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    if len(header) < header_bytes:
        if not header.startswith(b"{"):
            raise ModelError(f"{path} is not a safetensors file", hint="download it again")
        raise _truncated(path, size, LENGTH.size + header_bytes)
    try:
        entries = json.loads(header)
        tensors, end = _parse(path, entries, LENGTH.size + header_bytes)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{path} is not a safetensors file: its header is damaged ({error})", hint="download it again"
        ) from error
    if size < end:
        raise _truncated(path, size, end)
    if size > end:
        raise ModelError(f"{path} is damaged: it has {size} bytes, but its header describes {end}")
    return tensors


def _parse(path: Path, entries: dict[str, Any], start: int) -> tuple[dict[str, StoredTensor], int]:
    """The tensors, and where the last one ends. Raises whatever a malformed entry runs into."""
    tensors = {}
    end = start
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        low, high = entry["data_offsets"]
        shape = tuple(entry["shape"])
        kind = entry["dtype"]
        values = math.prod(shape)
        if not all(isinstance(value, int) and value >= 0 for value in (low, high, *shape)) or low > high:
            raise ValueError(f"tensor {name} has impossible sizes")
        if kind in ITEM_BYTES and high - low != values * ITEM_BYTES[kind]:
            raise ValueError(f"tensor {name} has {high - low} bytes for {values} values of type {kind}")
        tensors[name] = StoredTensor(path, shape, kind, start + low)
        end = max(end, start + high)
    return tensors, end


def _truncated(path: Path, size: int, needed: int) -> ModelError:
    return ModelError(
        f"{path} is truncated: it has {size} bytes, but needs {needed}", hint="download it again"
    )


def _map(path: Path) -> mmap.mmap:
    # Copy-on-write, because torch warns about buffers it could not write to.
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
