"""The header of a GGUF file: metadata and tensor directory, read without touching tensor data.

Source: the GGUF specification, versions 2 and 3, little-endian. The `gguf` package has a reader, but it
builds an array object per metadata string, which takes seconds for a vocabulary; this takes milliseconds.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_vllm.errors import UNREADABLE, ModelError, printable, shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

STRING, ARRAY = 8, 9
SCALAR_FORMATS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """shape: rows first. type_id: ggml's number of the storage type. offset: bytes from the file's start."""

    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """metadata: key -> str, int, float, bool or a list of these."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


def read_gguf_header(path: Path) -> GGUFHeader:
    """Parse the header. Raises ModelError naming the file if it is no GGUF file or its header is damaged."""
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise ModelError(
                    f"{path} is not a GGUF file (it does not begin with 'GGUF')",
                    hint="name a .gguf file, or the directory of a model in safetensors",
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, _Cursor(data))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}", hint=UNREADABLE) from error
    except (struct.error, UnicodeDecodeError, OverflowError) as error:
        raise ModelError(
            f"{path} is damaged: its header ends early or holds impossible values ({error})",
            hint="download it again",
        ) from error


def _parse(path: Path, cursor: _Cursor) -> GGUFHeader:
    cursor.offset = len(MAGIC)
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise ModelError(
            f"{path}: GGUF version {version} is not supported", hint="supported: 2 and 3, little-endian"
        )
    num_tensors, num_entries = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(num_entries):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    directory = {}
    for _ in range(num_tensors):
        name = cursor.string()
        dimensions = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))
        type_id, offset = cursor.scalar("I"), cursor.scalar("Q")
        if name in directory:
            raise ModelError(
                f"{path} is damaged: tensor {printable(name)} appears twice", hint="download it again"
            )
        directory[name] = (dimensions[::-1], type_id, offset)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ModelError(
            f"{path} is damaged: general.alignment is {shown(alignment)}, not a power of two",
            hint="download it again",
        )
    start = -(-cursor.offset // alignment) * alignment
    tensors = {name: GGUFTensor(shape, kind, start + at) for name, (shape, kind, at) in directory.items()}
    return GGUFHeader(path, metadata, tensors)


class _Cursor:
    """Reads little-endian values one after the other. Reading past the end raises struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.offset = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self.offset)
        self.offset += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        return self._strings(1)[0]

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            return self._strings(count) if item == STRING else self._scalars(item, count)
        return self._scalars(kind, 1)[0]

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in SCALAR_FORMATS:
            raise struct.error(f"unknown metadata type {kind}")
        size = struct.calcsize(SCALAR_FORMATS[kind])
        self._require(size * count)
        values = struct.unpack_from(f"<{count}{SCALAR_FORMATS[kind]}", self._data, self.offset)
        self.offset += size * count
        return list(values)

    def _strings(self, count: int) -> list[str]:
        # The hot loop: a vocabulary and its merges are some hundred thousand strings.
        self._require(8 * count)
        data, at, values = self._data, self.offset, []
        read_length = struct.Struct("<Q").unpack_from
        end_of_file = len(data)
        for _ in range(count):
            start = at + 8
            at = start + read_length(data, at)[0]
            if at > end_of_file:
                raise struct.error("a string reaches past the end of the file")
            values.append(data[start:at].decode())
        self.offset = at
        return values

    def _require(self, num_bytes: int) -> None:
        """Fail before allocating what a damaged count asks for."""
        if self.offset + num_bytes > len(self._data):
            raise struct.error("a list reaches past the end of the file")
