"""Opening a checkpoint finds everything, and refuses what is incomplete before it allocates anything."""

from __future__ import annotations

import codecs
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.tiny_gguf import write_tiny_gguf
from tests.helpers.tiny_models import (
    BOS_ID,
    EOS_ID,
    TURN_END_ID,
    VOCAB_SIZE,
    edit_json,
    make_tiny_llama,
    save_tiny_llama,
)
from tiny_vllm.errors import ConfigError, ModelError
from tiny_vllm.weights.checkpoint import Checkpoint, open_checkpoint
from tiny_vllm.weights.gguf_file import GGUFFile
from tiny_vllm.weights.load import load_weights
from tiny_vllm.weights.safetensors_file import SafetensorsFiles

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("single"), make_tiny_llama())


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("sharded"), make_tiny_llama(), max_shard_size="100KB")


@pytest.fixture
def directory(single: Path, tmp_path: Path) -> Path:
    """A copy of the one-file checkpoint, to be damaged."""
    return shutil.copytree(single, tmp_path / "model")


@pytest.fixture
def shards(sharded: Path, tmp_path: Path) -> Path:
    """A copy of the sharded checkpoint, to be damaged."""
    return shutil.copytree(sharded, tmp_path / "shards")


def opened(model: str | Path | None, **options: Any) -> Checkpoint:
    """Open a checkpoint under a ban: nothing may be read or allocated, above all when it is refused."""

    def forbidden(*arguments: Any, **keywords: Any) -> Any:
        raise AssertionError("a tensor was read or allocated while opening a checkpoint")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafetensorsFiles, "read", forbidden)
        patch.setattr(GGUFFile, "read", forbidden)
        for name in ("empty", "zeros", "frombuffer", "from_numpy", "tensor"):
            patch.setattr(torch, name, forbidden)
        return open_checkpoint(None if model is None else str(model), **options)


def refused(path: Path, *named: str, **options: Any) -> None:
    with pytest.raises(ModelError) as error:
        opened(path, **options)
    for text in named:
        assert text in str(error.value)


def rewrite(path: Path, change: Any) -> None:
    """Change the tensors of a safetensors file."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_directory_with_one_file(single: Path) -> None:
    checkpoint = opened(single)
    assert isinstance(checkpoint, Checkpoint)
    assert checkpoint.name == single.name
    assert checkpoint.spec.dtype == "float32"
    assert checkpoint.bos_token_id == BOS_ID


def test_a_directory_with_shards(sharded: Path) -> None:
    assert opened(sharded).spec == opened(sharded, load_format="safetensors").spec


def test_a_file_of_another_name_is_found_when_it_is_the_only_one(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "weights.safetensors")
    assert opened(directory).source is not None


def test_nothing_means_the_bundled_model() -> None:
    checkpoint = opened(None)
    assert checkpoint.name == "SmolLM2-135M-Instruct"
    assert checkpoint.eos_token_ids == (2,)
    assert checkpoint.spec.dtype == "bfloat16"


def test_the_bundled_model_has_its_tokenizer() -> None:
    tokenizer = opened(None).load_tokenizer()
    assert tokenizer.decode(tokenizer.encode("Hello, world!")) == "Hello, world!"


def test_a_gguf_file_and_a_directory_that_holds_one(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, make_tiny_llama())
    for name in (path, tmp_path):
        checkpoint = opened(name)
        assert checkpoint.name == "tiny"
        assert checkpoint.eos_token_ids == (1,)
        assert checkpoint.bos_token_id == 0


def test_the_old_config_style_gives_the_same_spec(tmp_path: Path, single: Path) -> None:
    old = shutil.copytree(single, tmp_path / "old")
    config = json.loads((old / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    config |= {"rope_theta": theta, "rope_scaling": None, "torch_dtype": config.pop("dtype")}
    (old / "config.json").write_text(json.dumps(config))
    assert opened(old).spec == opened(single).spec


@pytest.mark.parametrize("declared", ["float16", "bfloat16", None])
def test_the_stored_type_wins_over_the_declared_one(declared: str | None, directory: Path) -> None:
    edit_json(directory / "config.json", dtype=declared)
    assert opened(directory).spec.dtype == "float32"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_in_float32_do_not_widen_the_model(dtype: torch.dtype, directory: Path) -> None:
    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {name: tensor.to(dtype) for name, tensor in tensors.items() if tensor.ndim == 2}

    rewrite(directory / "model.safetensors", narrow)
    assert opened(directory).spec.dtype == str(dtype).removeprefix("torch.")


def test_eos_tokens_are_united_from_every_file(directory: Path) -> None:
    edit_json(directory / "config.json", eos_token_id=[7, 8])
    edit_json(directory / "generation_config.json", eos_token_id=[8, 9])
    checkpoint = opened(directory)
    assert checkpoint.eos_token_ids == (7, 8, 9, TURN_END_ID)


def test_eos_tokens_may_be_in_the_tokenizer_alone(directory: Path) -> None:
    edit_json(directory / "config.json", eos_token_id=None, bos_token_id=None)
    (directory / "generation_config.json").unlink()
    edit_json(directory / "tokenizer_config.json", eos_token={"content": "</s>"})
    checkpoint = opened(directory)
    assert checkpoint.eos_token_ids == (EOS_ID,)
    assert checkpoint.bos_token_id == BOS_ID


def test_special_tokens_map_is_read_when_the_tokenizer_config_is_silent(directory: Path) -> None:
    edit_json(directory / "tokenizer_config.json", eos_token=None)
    (directory / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_start|>"}))
    assert opened(directory).eos_token_ids == (EOS_ID, 2)


def test_an_eos_text_the_tokenizer_does_not_know_is_no_token(directory: Path) -> None:
    edit_json(directory / "tokenizer_config.json", eos_token="<|absent|>")
    assert opened(directory).eos_token_ids == (EOS_ID,)


@pytest.mark.parametrize("value", ["2", [1, None, "x"], 1.5, True])
def test_an_eos_that_is_no_token_id_is_refused(value: Any, directory: Path) -> None:
    edit_json(directory / "generation_config.json", eos_token_id=value)
    refused(directory, str(directory / "generation_config.json"), "generation_config.json: eos_token_id")


def test_the_directory_has_its_tokenizer(single: Path) -> None:
    tokenizer = opened(single).load_tokenizer()
    assert tokenizer.decode(tokenizer.encode("pages")) == "pages"
    assert tokenizer.chat_template is not None


def test_another_tokenizer_brings_its_own_end_of_sequence(directory: Path, tmp_path: Path) -> None:
    other = shutil.copytree(directory, tmp_path / "other")
    edit_json(other / "tokenizer_config.json", eos_token="<|im_start|>")
    (directory / "tokenizer.json").unlink()
    for name in (other, other / "tokenizer.json"):
        checkpoint = opened(directory, tokenizer=str(name))
        assert checkpoint.eos_token_ids == (EOS_ID, 2)
        assert checkpoint.load_tokenizer().special_tokens["eos_token"] == "<|im_start|>"


def test_a_gguf_file_may_lend_its_tokenizer(single: Path) -> None:
    from tiny_vllm.weights.bundled import bundled_model_path

    checkpoint = opened(single, tokenizer=str(bundled_model_path()))
    assert checkpoint.eos_token_ids[-1] == 2
    assert checkpoint.load_tokenizer().vocab_size == 49152


def test_a_damaged_tokenizer_of_a_gguf_file_is_named_with_its_file(single: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, make_tiny_llama())
    path.write_bytes(path.read_bytes().replace(b"gpt2", b"gpt9"))
    fault = re.escape(f"{path}: tokenizer.ggml.model is 'gpt9'")
    for checkpoint in (opened(path), opened(single, tokenizer=str(path))):
        with pytest.raises(ModelError, match=fault):
            checkpoint.load_tokenizer()


def test_a_missing_tokenizer_is_refused_when_it_is_needed(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    checkpoint = opened(directory)
    with pytest.raises(ModelError, match="model has no tokenizer\nhint: pass tokenizer="):
        checkpoint.load_tokenizer()


def test_a_tokenizer_that_is_not_there_is_refused(single: Path, tmp_path: Path) -> None:
    refused(single, f"there is no tokenizer at '{tmp_path}/absent'", tokenizer=str(tmp_path / "absent"))


@pytest.mark.parametrize("name", ["", "config.json"])
def test_dummy_weights_need_a_config_alone(name: str, directory: Path) -> None:
    for path in directory.iterdir():
        if path.name != "config.json":
            path.unlink()
    checkpoint = opened(directory / name, load_format="dummy")
    assert checkpoint.source is None
    assert checkpoint.spec.hidden_size == 64
    assert checkpoint.eos_token_ids == (EOS_ID,)


def test_dummy_weights_of_the_bundled_model() -> None:
    checkpoint = opened(None, load_format="dummy")
    assert checkpoint.source is None
    assert checkpoint.spec.num_layers == 30


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "there is no model at", "absent")
    refused(tmp_path / "absent.gguf", "there is no model at", "absent.gguf")
    deep = tmp_path.joinpath(*(["directory"] * 20), "absent")
    refused(deep, "there is no model at", f"'{deep}'")


@pytest.mark.parametrize("what", ["model", "tokenizer"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "the name of the {} is empty"),
        ("x" * 5000, "{} 'xxx.*cannot be opened: File name too long"),
        ("~nobody-of-this-name/model", "{} '~nobody-of-this-name/model' cannot be opened: "),
    ],
)
def test_a_name_that_cannot_be_a_path_is_refused(what: str, name: str, message: str, single: Path) -> None:
    with pytest.raises(ModelError, match=message.format(what)):
        open_checkpoint(**{"model": str(single), what: name})


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "has no config.json")


def test_an_unknown_load_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="load_format is 'pickle', but must be one of auto"):
        opened(None, load_format="pickle")


def test_a_format_that_contradicts_the_files_is_refused(single: Path) -> None:
    refused(single, "holds no GGUF file", load_format="gguf")
    with pytest.raises(ModelError, match="is a GGUF file, but load_format is 'safetensors'"):
        opened(None, load_format="safetensors")


def test_several_gguf_files_are_not_guessed_between(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    refused(tmp_path, "a.gguf, b.gguf")


def test_a_weight_file_alone_is_not_a_model(single: Path) -> None:
    refused(single / "model.safetensors", "name the directory")
    refused(single / "config.json", "name its directory")


def test_no_weights_at_all(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    refused(directory, "has no weights")
    (directory / "pytorch_model.bin").touch()
    refused(directory, "pytorch_model.bin")


def test_missing_shards_are_named(shards: Path) -> None:
    names = sorted(path.name for path in shards.glob("model-*.safetensors"))
    for name in names[1:3]:
        (shards / name).unlink()
    refused(shards, f"2 of {len(names)} weight files are missing", *names[1:3])


def test_a_missing_index_is_named(shards: Path) -> None:
    (shards / INDEX).unlink()
    refused(shards, INDEX)
    for path in sorted(shards.glob("model-*.safetensors"))[1:]:
        path.unlink()
    refused(shards, INDEX, "model-00001-of")


@pytest.mark.parametrize("shard", ["first", "last"])
def test_a_truncated_shard_is_named(shard: str, shards: Path) -> None:
    path = sorted(shards.glob("model-*.safetensors"))[0 if shard == "first" else -1]
    path.write_bytes(path.read_bytes()[:-1])
    refused(shards, path.name, "truncated")


def test_strays_beside_the_index_are_ignored(shards: Path) -> None:
    (shards / "model-00099-of-00099.safetensors").write_bytes(b"an interrupted download")
    (shards / "consolidated.safetensors").write_bytes(b"")
    (shards / "original.gguf").write_bytes(b"")
    assert opened(shards).source is not None


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", INDEX])
@pytest.mark.parametrize("content", ["{", "[]", "", '{"a": \x00}'])
def test_damaged_json_is_named(name: str, content: str, shards: Path) -> None:
    (shards / name).write_text(content)
    refused(shards, name)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}])
def test_an_index_without_a_map_is_refused(index: Any, shards: Path) -> None:
    (shards / INDEX).write_text(json.dumps(index))
    refused(shards, INDEX, "weight_map")


@pytest.mark.parametrize("token_id", [[[]], "2", {}, -1])
def test_a_token_id_that_is_none_is_refused(token_id: Any, tmp_path: Path, single: Path) -> None:
    directory = shutil.copytree(single, tmp_path / "model")
    added = [{"content": "</s>", "id": token_id}]
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(ModelError, match=r"the id of '</s>' is .* but must be a token id"):
        open_checkpoint(str(directory))


def test_a_file_name_longer_than_any_file_has_is_missing(shards: Path) -> None:
    index = json.loads((shards / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "n" * 5000
    (shards / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"weight files are missing: n{80} \.\.\.\n") as refusal:
        open_checkpoint(str(shards))
    assert len(refusal.value.message) < 500


def test_an_index_may_not_point_outside(shards: Path) -> None:
    index = json.loads((shards / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "../other.safetensors"
    (shards / INDEX).write_text(json.dumps(index))
    refused(shards, "outside", "../other.safetensors")


def test_a_damaged_gguf_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, make_tiny_llama())
    path.write_bytes(path.read_bytes()[:-64])
    refused(path, "tiny.gguf is truncated")


def test_an_unsupported_config_is_named_with_its_file(directory: Path) -> None:
    edit_json(directory / "config.json", hidden_act="gelu")
    refused(directory, "config.json", "hidden_act is 'gelu'")


def test_missing_tensors_are_named(directory: Path) -> None:
    rewrite(directory / "model.safetensors", lambda tensors: tensors.pop("model.norm.weight"))
    refused(directory, "missing tensor model.norm.weight")
    rewrite(
        directory / "model.safetensors",
        lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers.1." in name],
    )
    refused(directory, "missing 10 tensors", "model.layers.1.input_layernorm.weight")


def test_unexpected_tensors_are_named(directory: Path) -> None:
    names = ("model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.q_proj.bias")
    for name in names:
        rewrite(
            directory / "model.safetensors", lambda tensors, name=name: tensors.update({name: torch.ones(64)})
        )
        refused(directory, name, "unexpected")


def test_layers_beyond_the_configured_ones_are_unexpected(directory: Path) -> None:
    edit_json(directory / "config.json", num_hidden_layers=1)
    refused(directory, "unexpected 9 tensors", "model.layers.1.")


def test_a_wrong_shape_is_named(directory: Path) -> None:
    edit_json(directory / "config.json", vocab_size=400)
    refused(directory, "model.embed_tokens.weight", "[384, 64]", "[400, 64]")


def test_stored_rotary_tables_are_ignored(directory: Path) -> None:
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    rewrite(directory / "model.safetensors", lambda tensors: tensors.update(table))
    assert opened(directory).tensor_names.keys().isdisjoint(table)


def test_an_integer_matrix_is_refused(directory: Path) -> None:
    weight = {"lm_head.weight": torch.zeros(384, 64, dtype=torch.int8)}
    rewrite(directory / "model.safetensors", lambda tensors: tensors.update(weight))
    refused(directory, "lm_head.weight has type I8")


@pytest.mark.parametrize("kind", ["tied", "tied with a head", "untied without a head"])
def test_tied_heads(kind: str, tmp_path: Path) -> None:
    model = make_tiny_llama(tie_word_embeddings=kind != "untied without a head")
    directory = save_tiny_llama(tmp_path / "model", model)
    path = directory / "model.safetensors"
    if kind == "tied with a head":
        head = model.model.embed_tokens.weight.detach().clone()
        rewrite(path, lambda tensors: tensors.update({"lm_head.weight": head}))
    if kind == "untied without a head":
        rewrite(path, lambda tensors: tensors.pop("lm_head.weight"))
        refused(directory, "missing tensor lm_head.weight", "tie_word_embeddings is false")
        return
    weights = load_weights(opened(directory), dtype=torch.float32, device="cpu")
    assert weights.lm_head is weights.embedding
    assert torch.equal(weights.embedding, model.model.embed_tokens.weight)


@pytest.mark.parametrize("shape", [(384, 64), (400, 64)])
def test_a_head_that_differs_from_the_embedding_it_is_said_to_be_is_refused(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    """transformers 5 computes with the head, transformers 4 with the embedding."""
    model = make_tiny_llama(tie_word_embeddings=True)
    directory = save_tiny_llama(tmp_path / "model", model)
    head = torch.zeros(shape)
    head[: model.vocab_size] = model.model.embed_tokens.weight.detach()
    head[7, 3] += 1.0
    rewrite(directory / "model.safetensors", lambda tensors: tensors.update({"lm_head.weight": head}))
    with pytest.raises(ModelError, match=r"lm_head\.weight is not the embedding") as refusal:
        load_weights(opened(directory), dtype=torch.bfloat16, device="cpu")
    assert refusal.value.hint is not None and "tie_word_embeddings" in refusal.value.hint


def test_ids_beyond_the_vocabulary_end_no_text_and_are_told(directory: Path) -> None:
    assert opened(directory).eos_remark is None
    edit_json(directory / "config.json", eos_token_id=[VOCAB_SIZE, VOCAB_SIZE - 1])
    checkpoint = opened(directory)
    assert checkpoint.eos_remark == "384 is beyond the model's ids (0 to 383), so no text ends with it"
    assert checkpoint.can_end
    edit_json(directory / "config.json", eos_token_id=[VOCAB_SIZE, 10**9])
    edit_json(directory / "generation_config.json", eos_token_id=None)
    edit_json(directory / "tokenizer_config.json", eos_token=None)
    checkpoint = opened(directory)
    assert checkpoint.eos_remark == (
        "384, 1000000000 are beyond the model's ids (0 to 383), so no text ends with them: "
        "only max_tokens and a request's own stops end one"
    )
    assert not checkpoint.can_end


def test_a_negative_id_in_a_configuration_is_none_of_the_models(directory: Path) -> None:
    """It says that there is no such token; transformers takes it, too."""
    edit_json(directory / "config.json", eos_token_id=-1, bos_token_id=-1)
    checkpoint = opened(directory)
    assert checkpoint.eos_token_ids[0] == -1 and checkpoint.can_end
    assert checkpoint.eos_remark == "-1 is beyond the model's ids (0 to 383), so no text ends with it"
    assert checkpoint.bos_token_id == BOS_ID


def test_a_negative_id_in_a_gguf_file_is_beyond_the_vocabulary_too(single: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, make_tiny_llama(), metadata={"tokenizer.ggml.eom_token_id": -1})
    checkpoint = opened(path)
    assert checkpoint.eos_token_ids == (1, -1)
    assert checkpoint.eos_remark == "-1 is beyond the model's ids (0 to 383), so no text ends with it"


def test_an_id_of_a_gguf_file_beyond_its_vocabulary_is_told_as_that_of_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tokens = ["<s>", "</s>", "t", "o", "to", *[f"token{index}" for index in range(5, VOCAB_SIZE)]]

    def opened_with(**ids: int) -> Checkpoint:
        metadata = {f"tokenizer.ggml.{role}_token_id": token_id for role, token_id in ids.items()}
        write_tiny_gguf(path, make_tiny_llama(), metadata={"tokenizer.ggml.tokens": tokens, **metadata})
        return opened(path)

    remark = "1000000 is beyond the model's ids (0 to 383), so no text ends with it"
    checkpoint = opened_with(eos=10**6, eot=1)
    assert (checkpoint.can_end, checkpoint.eos_remark) == (True, remark)
    assert "eos_token" not in checkpoint.load_tokenizer().special_tokens
    checkpoint = opened_with(eos=10**6)
    assert not checkpoint.can_end
    assert checkpoint.eos_remark == f"{remark}: only max_tokens and a request's own stops end one"


def test_a_byte_order_mark_before_every_json_file_changes_nothing(shards: Path) -> None:
    edit_json(shards / "generation_config.json", temperature=0.5)
    plain, plain_tokenizer = opened(shards), opened(shards).load_tokenizer()
    marked = list(shards.glob("*.json"))
    for file in marked:
        file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    assert {"config.json", "generation_config.json", "tokenizer.json", INDEX} <= {
        file.name for file in marked
    }
    checkpoint = opened(shards)
    assert (checkpoint.eos_token_ids, checkpoint.bos_token_id) == (plain.eos_token_ids, plain.bos_token_id)
    assert checkpoint.sampling_defaults("auto")["temperature"] == 0.5
    assert checkpoint.load_tokenizer().encode("a b") == plain_tokenizer.encode("a b")
