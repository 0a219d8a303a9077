"""Weights from safetensors files, through the safetensors library. Opening reads the headers alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tiny_vllm.errors import MAX_REASON_LEN, UNREADABLE, ModelError, printable

DTYPE_NAMES: Mapping[str, str] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """dtype: the format's own name, such as "BF16"."""

    path: Path
    shape: tuple[int, ...]
    dtype: str


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
                    raise ModelError(
                        f"tensor {printable(name)} is in both {self.tensors[name].path} and {path}",
                        hint="files of different versions are mixed; download the model again",
                    )
                self.tensors[name] = tensor
        for name, file_name in weight_map.items():
            if name not in self.tensors or self.tensors[name].path.name != file_name:
                raise ModelError(
                    f"the index places tensor {printable(name)} in {printable(file_name)}, "
                    "which does not hold it",
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
            if tensor.dtype not in DTYPE_NAMES:
                raise ModelError(
                    f"{tensor.path}: tensor {printable(name)} has type {tensor.dtype}, which is not "
                    "supported",
                    hint=f"supported: {', '.join(DTYPE_NAMES)}",
                )
            if len(tensor.shape) > 1:
                kinds.add(DTYPE_NAMES[tensor.dtype])
        return kinds.pop() if len(kinds) == 1 else "float32"

    def read(self, names: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (canonical name, tensor), file by file."""
        wanted = sorted((self.tensors[stored].path, stored, name) for name, stored in names.items())
        for path, entries in groupby(wanted, key=lambda entry: entry[0]):
            with safe_open(path, framework="pt") as file:
                for _, stored, name in entries:
                    yield name, file.get_tensor(stored)


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """Name -> description of each tensor. Raises ModelError unless the file holds all it announces."""
    try:
        with path.open("rb") as start:
            if start.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ModelError(f"{path} is a Git LFS pointer, not the weights", hint="run git lfs pull")
        with safe_open(path, framework="pt") as file:
            tensors = {}
            for name in file.keys():  # noqa: SIM118 - not a mapping
                header = file.get_slice(name)
                tensors[name] = StoredTensor(path, tuple(header.get_shape()), header.get_dtype())
            return tensors
    except SafetensorError as error:
        raise ModelError(
            f"{path} is not a safetensors file, or it is truncated or damaged "
            f"({path.stat().st_size} bytes: {printable(str(error), MAX_REASON_LEN)})",
            hint="download it again",
        ) from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}", hint=UNREADABLE) from error
