"""Weights, configuration and vocabulary from one GGUF file.

Storage types are decoded by the `gguf` package. Files of some architectures hold the rows of Q and K
reordered for rotating neighbouring pairs; reading undoes that, because this project rotates the two halves
of a head against each other, as Hugging Face's checkpoints do. Where a family adds an offset to its norm
weights, files hold the sum; reading takes the offset off again.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiny_vllm.errors import ModelError, printable, shown
from tiny_vllm.models.gguf_metadata import RopeTensors, architecture_of, spec_from_gguf
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.text.gguf_vocabulary import (
    DEFAULT_EOS_ID,
    END_OF_MESSAGE,
    END_OF_REPLY,
    END_OF_TURN_TOKENS,
    GGUFTokenType,
    GGUFVocabulary,
)
from tiny_vllm.weights.gguf_header import GGUFHeader, GGUFTensor, read_gguf_header

PLAIN_DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
QUANTISED_TYPES = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4",
)  # fmt: skip

VALUES_AT_ONCE = 1 << 16
"""Values decoded in one numpy pass: large enough to hide its overhead, small enough to stay in the cache."""

Bytes = NDArray[np.uint8]

ROPE_TENSORS: Mapping[str, str] = {
    "freqs": "rope_freqs.weight",
    "short": "rope_factors_short.weight",
    "long": "rope_factors_long.weight",
}
"""Field of RopeTensors -> tensor."""


KINDS: Mapping[str, type | UnionType] = {
    "text": str,
    "an integer": int,
    "true or false": bool,
    "a list of texts": str,
    "a list of integers": int,
    "a list of numbers": int | float,
}
"""What a value may be, in words -> its type, or that of what it lists."""

VOCABULARY: Mapping[str, tuple[str, str]] = {
    "model": ("tokenizer.ggml.model", "text"),
    "pre": ("tokenizer.ggml.pre", "text"),
    "tokens": ("tokenizer.ggml.tokens", "a list of texts"),
    "token_types": ("tokenizer.ggml.token_type", "a list of integers"),
    "scores": ("tokenizer.ggml.scores", "a list of numbers"),
    "merges": ("tokenizer.ggml.merges", "a list of texts"),
    "bos_token_id": ("tokenizer.ggml.bos_token_id", "an integer"),
    "eos_token_id": ("tokenizer.ggml.eos_token_id", "an integer"),
    "unk_token_id": ("tokenizer.ggml.unknown_token_id", "an integer"),
    "pad_token_id": ("tokenizer.ggml.padding_token_id", "an integer"),
    "add_bos_token": ("tokenizer.ggml.add_bos_token", "true or false"),
    "add_eos_token": ("tokenizer.ggml.add_eos_token", "true or false"),
    "add_space_prefix": ("tokenizer.ggml.add_space_prefix", "true or false"),
    "chat_template": ("tokenizer.chat_template", "text"),
}
"""Field of GGUFVocabulary -> its key, and what its value must be."""


class GGUFFile:
    """An opened GGUF file. Opening reads the header alone and checks that every tensor lies within the file.

    Raises ModelError naming the file: not GGUF, damaged, truncated, split, or of an unsupported storage type.
    """

    def __init__(self, path: Path) -> None:
        self.header: GGUFHeader = read_gguf_header(path)
        self.path = path
        self._check()

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.header.metadata

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.header.tensors.items()}

    @cached_property
    def spec(self) -> ModelSpec:
        """What the metadata describes. Raises ModelError for what is not supported."""
        tensors, data = self.header.tensors, self._map()
        factors = {
            field: _tensor(data, tensors[name]).tolist()
            for field, name in ROPE_TENSORS.items()
            if name in tensors
        }
        rope = RopeTensors(**factors)
        try:
            return spec_from_gguf(self.metadata, self.shapes, dtype=self.dtype, rope_tensors=rope)
        except ModelError as error:
            raise ModelError(f"{self.path}: {error.message}", hint=error.hint) from error

    @property
    def dtype(self) -> str:
        """The type to compute in, by the rule of `checkpoint`."""
        kinds = {_type_name(tensor) for tensor in self.header.tensors.values() if len(tensor.shape) > 1}
        if kinds & set(QUANTISED_TYPES):
            return "bfloat16"
        if kinds in ({"F16"}, {"BF16"}):
            return "float16" if kinds == {"F16"} else "bfloat16"
        return "float32"

    @property
    def bos_token_id(self) -> int | None:
        return self._token_id("bos")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End of sequence, end of turn and end of message, as the file names them, and control tokens whose
        text says so: any of them ends an answer."""
        ids = [self._token_id(kind) for kind in ("eos", "eot", "eom")]
        if ids[0] is None and self.metadata.get("tokenizer.ggml.model") == "llama":
            ids[0] = DEFAULT_EOS_ID
        tokens, types = (self.metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
        if isinstance(tokens, Sequence) and isinstance(types, Sequence):
            found = {
                token: token_id
                for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False))
                if kind == GGUFTokenType.CONTROL and token in END_OF_TURN_TOKENS
            }
            if END_OF_REPLY in found:
                found.pop(END_OF_MESSAGE, None)
            ids += found.values()
        return tuple(dict.fromkeys(token for token in ids if token is not None))

    def vocabulary(self) -> GGUFVocabulary:
        """The tokenizer's data. Raises ModelError if the file has none, and for values of a wrong type."""
        values = {field: self._vocabulary_value(key, kind) for field, (key, kind) in VOCABULARY.items()}
        for field in ("tokens", "model"):
            if values[field] is None:
                raise ModelError(
                    f"{self.path} holds no tokenizer: it has no {VOCABULARY[field][0]}",
                    hint="pass tokenizer=",
                )
        # Only `eos_token_ids` uses these, which passes over what is no integer.
        for kind in ("eot", "eom"):
            self._vocabulary_value(f"tokenizer.ggml.{kind}_token_id", "an integer")
        return GGUFVocabulary(**values)

    def _vocabulary_value(self, key: str, kind: str) -> Any:
        value = self.metadata.get(key)
        if value is None or _is_of_kind(value, kind):
            return value
        raise ModelError(
            f"{self.path}: {key} is {shown(value)}, but must be {kind}",
            hint="download the file again, or use another tokenizer: pass tokenizer=",
        )

    def read(self, names: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (canonical name, tensor) in file order; quantised tensors come as FP32."""
        tensors = self.header.tensors
        spec, data = self.spec, self._map()
        num_heads: dict[str, int] = {}
        if architecture_of(self.metadata).has_pair_order:
            num_heads = {"q": spec.num_heads, "k": spec.num_kv_heads}
        for part, name in sorted(names.items(), key=lambda item: tensors[item[1]].offset):
            field = part.rpartition(".")[2].removesuffix("_bias")
            tensor = _tensor(data, tensors[name], num_heads.get(field))
            if spec.norm_offset and field.endswith("norm"):
                tensor = tensor - spec.norm_offset
            yield part, tensor

    def _map(self) -> mmap.mmap:
        # Copy-on-write, because torch warns about buffers it could not write to.
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def _token_id(self, kind: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        return value if isinstance(value, int) else None

    def _check(self) -> None:
        if self.metadata.get("split.count", 0) not in (0, 1):
            raise ModelError(f"{self.path} is one part of a split GGUF model", hint="join it with gguf-split")
        size = self.path.stat().st_size
        for stored, tensor in self.header.tensors.items():
            name = printable(stored)
            if _type_name(tensor) not in (*PLAIN_DTYPES, *QUANTISED_TYPES):
                raise ModelError(
                    f"{self.path}: tensor {name} has type {_type_name(tensor)}, which is not supported",
                    hint=f"supported: {', '.join((*PLAIN_DTYPES, *QUANTISED_TYPES))}",
                )
            end = tensor.offset + _num_bytes(tensor)
            if not tensor.shape or 0 in tensor.shape or tensor.shape[-1] % _block_sizes(tensor)[0]:
                block = _block_sizes(tensor)[0]
                raise ModelError(
                    f"{self.path} is damaged: tensor {name} has shape {list(tensor.shape)}, but must have "
                    f"values, and in rows of a multiple of {block}",
                    hint="download it again",
                )
            if end > size:
                raise ModelError(
                    f"{self.path} is truncated: it has {size} bytes, but tensor {name} ends at byte {end}",
                    hint="download it again",
                )


def _is_of_kind(value: Any, kind: str) -> bool:
    """kind: of KINDS. All items of a list have one type in a GGUF file, so the first one tells."""
    if kind.startswith("a list"):
        if not isinstance(value, list):
            return False
        if not value:
            return True
        value = value[0]
    return isinstance(value, KINDS[kind]) and isinstance(value, bool) == (KINDS[kind] is bool)


def _type_name(tensor: GGUFTensor) -> str:
    from gguf import GGMLQuantizationType

    try:
        return GGMLQuantizationType(tensor.type_id).name
    except ValueError:
        return f"number {tensor.type_id}"


def _block_sizes(tensor: GGUFTensor) -> tuple[int, int]:
    """Values and bytes of one block of the storage type."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    return GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type_id)]


def _num_bytes(tensor: GGUFTensor) -> int:
    values, size = _block_sizes(tensor)
    num_values = 1
    for dimension in tensor.shape:
        num_values *= dimension
    return num_values // values * size


def _tensor(data: mmap.mmap, tensor: GGUFTensor, num_heads: int | None = None) -> Tensor:
    """One tensor in its plain type, or FP32 if quantised. num_heads: undo the row order of Q or K.

    Until the values are decoded this is numpy's work: torch would wake its threads for every small piece.
    """
    kind = _type_name(tensor)
    stored = np.frombuffer(data, dtype=np.uint8, offset=tensor.offset, count=_num_bytes(tensor))
    if num_heads is not None:
        stored = _split_halves(stored.reshape(tensor.shape[0], -1), num_heads)
    if kind in PLAIN_DTYPES:
        return torch.from_numpy(stored.reshape(-1)).view(PLAIN_DTYPES[kind]).view(tensor.shape)
    return torch.from_numpy(_dequantise(stored, kind)).view(tensor.shape)


def _split_halves(rows: Bytes, num_heads: int) -> Bytes:
    """Rows of each head from pair order (0, half, 1, half + 1, ...) to half order (0, 1, ..., half, ...)."""
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _dequantise(stored: Bytes, kind: str) -> NDArray[np.float32]:
    """Blocks of a storage type -> their values, as one row."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    quantisation = GGMLQuantizationType[kind]
    num_values, num_bytes = GGML_QUANT_SIZES[quantisation]
    blocks = stored.reshape(-1, num_bytes)
    values = np.empty((len(blocks), num_values), dtype=np.float32)
    step = VALUES_AT_ONCE // num_values
    for start in range(0, len(blocks), step):
        # One long row: the package works through groups of 16 rows, so short rows would cost a call each.
        row = dequantize(blocks[start : start + step].reshape(1, -1), quantisation)
        values[start : start + step] = row.reshape(-1, num_values)
    return values
