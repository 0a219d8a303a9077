"""GGUF files: each storage type has the exact values of the gguf package, damage is refused by name."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.tiny_gguf import K_QUANT_SCALES, WRITABLE_TYPES, write_tiny_gguf
from tests.helpers.tiny_models import make_tiny_llama
from tiny_vllm.errors import ModelError
from tiny_vllm.text.gguf_vocabulary import GGUFTokenType
from tiny_vllm.weights.bundled import bundled_model_path
from tiny_vllm.weights.gguf_file import GGUFFile
from tiny_vllm.weights.gguf_header import read_gguf_header
from tiny_vllm.weights.match import match_tensors

COMPUTE_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@pytest.fixture(scope="module")
def model() -> Any:
    """Sizes that K-quant blocks of 256 values divide; a single layer keeps the files small."""
    return make_tiny_llama(
        hidden_size=256, intermediate_size=256, num_hidden_layers=1, vocab_size=64, tie_word_embeddings=True
    )


@pytest.fixture(scope="module")
def plain_file(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_tiny_gguf(path, model)
    return path


WRONG_TYPES = [
    ("ggml.model", 5, "text"),
    ("ggml.tokens", [1, 2, 3], "a list of texts"),
    ("ggml.pre", ["a", "b"], "text"),
    ("ggml.token_type", 1, "a list of integers"),
    ("ggml.token_type", ["a"], "a list of integers"),
    ("ggml.scores", 1.5, "a list of numbers"),
    ("ggml.merges", 5, "a list of texts"),
    ("ggml.merges", [1, 2], "a list of texts"),
    ("ggml.eos_token_id", "a", "an integer"),
    ("ggml.bos_token_id", True, "an integer"),
    ("ggml.eom_token_id", 1.5, "an integer"),
    ("ggml.padding_token_id", [1], "an integer"),
    ("ggml.add_bos_token", "a", "true or false"),
    ("ggml.add_space_prefix", 1, "true or false"),
    ("chat_template", ["\x1b"], "text"),
]


@pytest.mark.parametrize(("key", "value", "expected"), WRONG_TYPES)
def test_a_vocabulary_of_wrong_types_is_refused(
    model: Any, tmp_path: Path, key: str, value: Any, expected: str
) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_gguf(path, model, metadata={f"tokenizer.{key}": value})
    message = rf"model\.gguf: tokenizer\.{re.escape(key)} is {re.escape(repr(value))}, but must be {expected}"
    with pytest.raises(ModelError, match=rf"{message}\nhint: "):
        GGUFFile(path).vocabulary()


def read_all(file: GGUFFile) -> dict[str, torch.Tensor]:
    names = match_tensors(file.spec, file.shapes, where="the file")
    return {part: tensor.clone() for part, tensor in file.read(names)}


@pytest.mark.parametrize("kind", [*WRITABLE_TYPES, *K_QUANT_SCALES])
def test_every_storage_type_is_read_with_its_exact_values(kind: str, model: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    expected = write_tiny_gguf(path, model, kind=kind)
    file = GGUFFile(path)
    tensors = read_all(file)
    assert file.spec.dtype == COMPUTE_DTYPES.get(kind, "bfloat16")
    names = {
        "embedding": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "layers.0.q": "model.layers.0.self_attn.q_proj.weight",
        "layers.0.k": "model.layers.0.self_attn.k_proj.weight",
        "layers.0.v": "model.layers.0.self_attn.v_proj.weight",
        "layers.0.output": "model.layers.0.self_attn.o_proj.weight",
        "layers.0.gate": "model.layers.0.mlp.gate_proj.weight",
        "layers.0.up": "model.layers.0.mlp.up_proj.weight",
        "layers.0.down": "model.layers.0.mlp.down_proj.weight",
        "layers.0.input_norm": "model.layers.0.input_layernorm.weight",
        "layers.0.post_attention_norm": "model.layers.0.post_attention_layernorm.weight",
    }
    assert tensors.keys() == names.keys()
    for part, name in names.items():
        assert np.array_equal(tensors[part].float().numpy(), expected[name]), part


def test_query_and_key_rows_return_to_the_order_of_the_checkpoint(model: Any, plain_file: Path) -> None:
    tensors = read_all(GGUFFile(plain_file))
    attention = model.model.layers[0].self_attn
    assert torch.equal(tensors["layers.0.q"], attention.q_proj.weight)
    assert torch.equal(tensors["layers.0.k"], attention.k_proj.weight)


def test_biases_are_reordered_as_their_rows_are(tmp_path: Path) -> None:
    model = make_tiny_llama(attention_bias=True, mlp_bias=True)
    write_tiny_gguf(tmp_path / "model.gguf", model)
    file = GGUFFile(tmp_path / "model.gguf")
    tensors = read_all(file)
    assert file.spec.qkv_bias and file.spec.output_bias and file.spec.mlp_bias
    layer = model.model.layers[1]
    assert torch.equal(tensors["layers.1.q_bias"], layer.self_attn.q_proj.bias)
    assert torch.equal(tensors["layers.1.k_bias"], layer.self_attn.k_proj.bias)
    assert torch.equal(tensors["layers.1.v_bias"], layer.self_attn.v_proj.bias)
    assert torch.equal(tensors["layers.1.output_bias"], layer.self_attn.o_proj.bias)
    assert torch.equal(tensors["layers.1.gate_bias"], layer.mlp.gate_proj.bias)
    assert torch.equal(tensors["layers.1.down_bias"], layer.mlp.down_proj.bias)


def test_the_header_agrees_with_the_reader_of_the_gguf_package(plain_file: Path) -> None:
    from gguf import GGUFReader

    header, reader = read_gguf_header(plain_file), GGUFReader(plain_file)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == fields
    assert {name: (tensor.offset, tensor.shape) for name, tensor in header.tensors.items()} == {
        tensor.name: (tensor.data_offset, tuple(reversed(tensor.shape.tolist()))) for tensor in reader.tensors
    }


def test_every_metadata_type_is_read(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    metadata = {"x.list": [1.5, -2.0], "x.flag": True, "x.flags": [True, False], "x.texts": ["a", "ü", ""]}
    write_tiny_gguf(path, model, metadata=metadata)
    header = read_gguf_header(path)
    assert {key: header.metadata[key] for key in metadata} == metadata


def test_llama3_scaling_is_recognised_in_its_tensor(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model = make_tiny_llama(head_dim=128)
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](
        LlamaConfig(head_dim=128, rope_parameters=rope), torch.device("cpu")
    )
    factors = (1e4 ** (-torch.arange(0, 128, 2) / 128) / scaled).numpy()
    write_tiny_gguf(tmp_path / "model.gguf", model, extra_tensors={"rope_freqs.weight": factors})
    spec = GGUFFile(tmp_path / "model.gguf").spec
    assert (spec.rope.scaling, spec.rope.factor) == ("llama3", pytest.approx(32.0, rel=1e-6))


def test_the_bundled_model_is_smollm2() -> None:
    file = GGUFFile(bundled_model_path())
    assert (file.spec.num_layers, file.spec.hidden_size, file.spec.vocab_size) == (30, 576, 49152)
    assert (file.spec.num_heads, file.spec.num_kv_heads, file.spec.rope.theta) == (9, 3, 100000.0)
    assert file.spec.tie_word_embeddings and file.spec.dtype == "bfloat16"
    assert file.eos_token_ids == (2,) and file.bos_token_id == 1
    vocabulary = file.vocabulary()
    assert (vocabulary.model, vocabulary.pre, len(vocabulary.tokens)) == ("gpt2", "smollm", 49152)
    assert vocabulary.tokens[2] == "<|im_end|>"


def test_end_of_turn_and_message_end_a_text_too(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_gguf(
        path, model, metadata={"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 1}
    )
    assert GGUFFile(path).eos_token_ids == (1, 9)


def test_control_tokens_whose_text_ends_a_turn_end_a_text(model: Any, tmp_path: Path) -> None:
    """Many files name only the token that ends a document."""
    path = tmp_path / "model.gguf"
    tokens = [f"token{index}" for index in range(384)]
    types = [GGUFTokenType.NORMAL] * 384
    for index, text, kind in (
        (7, "<|im_end|>", GGUFTokenType.CONTROL),
        (8, "<end_of_turn>", GGUFTokenType.NORMAL),
        (9, "<|other|>", GGUFTokenType.CONTROL),
        (11, "<|eot_id|>", GGUFTokenType.CONTROL),
    ):
        tokens[index], types[index] = text, kind
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [int(kind) for kind in types]}
    write_tiny_gguf(path, model, metadata=metadata)
    assert GGUFFile(path).eos_token_ids == (1, 7, 11)
    write_tiny_gguf(path, model, metadata={**metadata, "tokenizer.ggml.eot_token_id": 11})
    assert GGUFFile(path).eos_token_ids == (1, 11, 7)


def test_where_a_message_may_be_followed_by_another_its_end_ends_no_text(model: Any, tmp_path: Path) -> None:
    """gpt-oss thinks in messages of their own; only <|return|> and <|call|> hand over."""
    path = tmp_path / "model.gguf"
    tokens = [f"token{index}" for index in range(384)]
    tokens[7:10] = "<|return|>", "<|end|>", "<|call|>"
    types = [int(GGUFTokenType.NORMAL)] * 7 + [int(GGUFTokenType.CONTROL)] * 3
    types += [int(GGUFTokenType.NORMAL)] * (384 - len(types))
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    write_tiny_gguf(path, model, metadata=metadata)
    assert GGUFFile(path).eos_token_ids == (1, 7, 9)
    tokens[7] = "other"
    write_tiny_gguf(path, model, metadata=metadata)
    assert GGUFFile(path).eos_token_ids == (1, 8, 9)


def test_sentencepiece_files_that_name_no_end_mean_its_default(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for kind, expected in (("llama", (2,)), ("gpt2", ())):
        metadata = {"tokenizer.ggml.model": kind, "tokenizer.ggml.eos_token_id": None}
        write_tiny_gguf(path, model, metadata=metadata)
        assert GGUFFile(path).eos_token_ids == expected


def test_a_file_without_a_vocabulary_says_so(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_gguf(path, model, metadata={"tokenizer.ggml.tokens": None})
    with pytest.raises(ModelError, match=r"model\.gguf holds no tokenizer"):
        GGUFFile(path).vocabulary()


def test_unsupported_storage_types_are_refused_with_the_supported_ones(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    extra = {"blk.0.attn_q.scale": np.zeros(4, dtype=np.int32)}
    write_tiny_gguf(path, model, extra_tensors=extra)
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.scale has type I32.*\n.*Q6_K"):
        GGUFFile(path)


def test_a_split_model_is_refused(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_gguf(path, model, metadata={"split.count": 2})
    with pytest.raises(ModelError, match="split GGUF"):
        GGUFFile(path)


def test_other_content_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for content in (b"", b"GG", b"PK\x03\x04 a zip file"):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"model\.gguf is not a GGUF file"):
            GGUFFile(path)


def test_other_versions_are_refused(plain_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for version in (struct.pack("<I", 1), struct.pack(">I", 3)):
        path.write_bytes(b"GGUF" + version + plain_file.read_bytes()[8:])
        with pytest.raises(ModelError, match=r"model\.gguf: GGUF version"):
            GGUFFile(path)


def test_a_file_cut_anywhere_is_refused(plain_file: Path, tmp_path: Path) -> None:
    content = plain_file.read_bytes()
    start = min(tensor.offset for tensor in read_gguf_header(plain_file).tensors.values())
    path = tmp_path / "model.gguf"
    for length in [*range(4, start, 97), start, start + 1, len(content) - 40]:
        path.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"model\.gguf is (damaged|truncated)"):
            GGUFFile(path)


def test_impossible_counts_fail_before_they_are_allocated(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    huge = 2**60
    key = struct.pack("<Q", 1) + b"k"
    lists = {item: struct.pack("<II", 9, item) + struct.pack("<Q", huge) for item in (4, 8)}
    for body in (key + lists[4], key + lists[8], struct.pack("<Q", huge) + b"k", key + struct.pack("<I", 99)):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + body + bytes(64))
        with pytest.raises(ModelError, match="is damaged"):
            GGUFFile(path)


def test_text_that_is_no_unicode_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2) + b"\xff\xfe" + bytes(64))
    with pytest.raises(ModelError, match="is damaged"):
        GGUFFile(path)
