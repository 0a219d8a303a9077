"""safetensors files: headers are read without data, and damage is refused by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tiny_vllm.errors import ModelError
from tiny_vllm.weights.safetensors_file import SafetensorsFiles, read_safetensors_header

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c": torch.tensor([[0.25]], dtype=torch.float16),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def write_header(path: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(**changes: Any) -> dict[str, Any]:
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


def test_values_of_every_type_are_those_written(path: Path) -> None:
    files = SafetensorsFiles([path], {})
    read = dict(files.read({name.upper(): name for name in TENSORS}))
    assert read.keys() == {"A", "B", "C"}
    for name, tensor in TENSORS.items():
        assert torch.equal(read[name.upper()], tensor)
        assert read[name.upper()].dtype == tensor.dtype
    assert files.shapes == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


def test_values_are_read_whatever_their_alignment(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    values = struct.pack("<ff", 1.0, 2.0)
    for padding in range(8):
        write_header(path, json.dumps(entry()).encode() + b" " * padding, values)
        ((_, tensor),) = SafetensorsFiles([path], {}).read({"t": "t"})
        assert tensor.tolist() == [1.0, 2.0]


def test_the_same_matrix_type_everywhere_is_the_type_to_compute_in(path: Path) -> None:
    files = SafetensorsFiles([path], {})
    assert files.dtype({"a": "a", "b": "b"}) == "float32"
    assert files.dtype({"c": "c", "b": "b"}) == "float16"


def test_mixed_matrix_types_are_computed_in_float32(path: Path) -> None:
    assert SafetensorsFiles([path], {}).dtype({"a": "a", "c": "c"}) == "float32"


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    save_file({"q": torch.zeros(2, 2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    files = SafetensorsFiles([tmp_path / "model.safetensors"], {})
    with pytest.raises(ModelError, match=r"tensor q has type I8.*\n.*F32, BF16, F16"):
        files.dtype({"q": "q"})


def test_a_file_cut_anywhere_is_refused_by_name(path: Path) -> None:
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"model\.safetensors is not .*truncated"):
            read_safetensors_header(path)


def test_a_file_with_missing_or_surplus_bytes_is_refused_with_its_size(path: Path) -> None:
    content = path.read_bytes()
    for changed in (content[:-3], content + b"\0"):
        path.write_bytes(changed)
        with pytest.raises(ModelError, match=rf"model\.safetensors .*damaged \({len(changed)} bytes"):
            read_safetensors_header(path)


def test_a_git_lfs_pointer_is_recognised(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(ModelError, match=r"Git LFS pointer.*\n.*git lfs pull"):
        read_safetensors_header(path)


DAMAGED_HEADERS: dict[str, object] = {
    "no JSON": b"{]  ",
    "a list": [1],
    "no UTF-8": b"{\xff\xff}",
    "no offsets": {"t": {"dtype": "F32", "shape": [2]}},
    "no shape": {"t": {"dtype": "F32", "data_offsets": [0, 8]}},
    "an entry that is no object": {"t": 1},
    "three offsets": entry(data_offsets=[0, 4, 8]),
    "negative offset": entry(data_offsets=[-8, 0]),
    "reversed offsets": entry(data_offsets=[8, 0]),
    "fractional shape": entry(shape=[2.0]),
    "shape of text": entry(shape="2"),
    "wrong size": entry(shape=[3]),
}


@pytest.mark.parametrize("case", DAMAGED_HEADERS)
def test_a_damaged_header_is_refused_by_name(case: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_header(path, DAMAGED_HEADERS[case], bytes(8))
    with pytest.raises(ModelError, match=r"model\.safetensors is not a safetensors file"):
        read_safetensors_header(path)


def test_a_tensor_in_two_files_is_refused(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file({"a": torch.zeros(1)}, other)
    with pytest.raises(
        ModelError, match=r"tensor a is in both .*model\.safetensors and .*other\.safetensors"
    ):
        SafetensorsFiles([path, other], {})


@pytest.mark.parametrize("weight_map", [{"z": "model.safetensors"}, {"a": "other.safetensors"}])
def test_an_index_that_contradicts_the_files_is_refused(path: Path, weight_map: dict[str, str]) -> None:
    with pytest.raises(ModelError, match="the index places tensor"):
        SafetensorsFiles([path], weight_map)
