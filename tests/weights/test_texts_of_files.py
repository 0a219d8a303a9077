"""What a model's files say is shown written out and bounded, whichever file says it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.tiny_gguf import write_tiny_gguf
from tests.helpers.tiny_models import edit_json, make_tiny_llama, save_tiny_llama
from tiny_vllm.errors import ModelError
from tiny_vllm.weights.checkpoint import open_checkpoint

INDEX = "model.safetensors.index.json"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_tiny_llama(tmp_path / "model", make_tiny_llama())


EVIL = "\x1b[2J\x9b" + "x" * 1000
SHOWN = r"\x1b[2J\x9bx"
CUT = re.compile(r"x{50,} \.\.\.")


def spoil_config(**changes: Any) -> Any:
    return lambda directory: edit_json(directory / "config.json", **changes)


def spoil_tensor_names(directory: Path) -> None:
    path = directory / "model.safetensors"
    save_file({**load_file(path), EVIL: torch.ones(1)}, path)


def spoil_tokenizer(**changes: Any) -> Any:
    return lambda directory: edit_json(directory / "tokenizer_config.json", **changes)


def spoil_tokenizer_alone(**changes: Any) -> Any:
    """Where nobody looks for the ids of BOS and EOS."""
    return spoil_tokenizer(eos_token=None, bos_token=None, **changes)


def spoil_index(weight_map: dict[str, str]) -> Any:
    return lambda directory: void((directory / INDEX).write_text(json.dumps({"weight_map": weight_map})))


def void(_: object) -> None:
    pass


SPOILT: dict[str, Any] = {
    "architecture": spoil_config(architectures=[EVIL]),
    "model type": spoil_config(architectures=None, model_type=EVIL),
    "text part": spoil_config(
        architectures=["Gemma3ForConditionalGeneration"], text_config={"model_type": EVIL}
    ),
    "activation": spoil_config(hidden_act=EVIL),
    "quantisation": spoil_config(quantization_config={"quant_method": EVIL}),
    "dtype": spoil_config(dtype=EVIL),
    "integer": spoil_config(num_hidden_layers=EVIL),
    "neutral key": spoil_config(pretraining_tp=EVIL),
    "rope type": spoil_config(rope_parameters={"rope_type": EVIL}),
    "rope": spoil_config(rope_parameters=EVIL),
    "rope by layer type": spoil_config(rope_parameters={EVIL: {}}),
    "token id": spoil_config(eos_token_id=EVIL),
    "recommended": lambda directory: edit_json(directory / "generation_config.json", top_p=EVIL),
    "tensor": spoil_tensor_names,
    "file in the index": spoil_index({"lm_head.weight": EVIL}),
    "file outside": spoil_index({"lm_head.weight": f"../{EVIL}"}),
    "tensor in the index": spoil_index({EVIL: "model.safetensors"}),
    "special tokens": spoil_tokenizer(additional_special_tokens=EVIL),
    "added tokens": spoil_tokenizer_alone(added_tokens_decoder=[EVIL]),
    "key of an added token": spoil_tokenizer_alone(added_tokens_decoder={EVIL: {}}),
    "added token": spoil_tokenizer_alone(added_tokens_decoder={"5": EVIL}),
    "added tokens beside EOS": spoil_tokenizer(added_tokens_decoder=[EVIL]),
    "id of an added token": spoil_tokenizer(added_tokens_decoder={"5000": {"content": EVIL}}),
    "token that is no text": spoil_tokenizer(eos_token=f"\ud800{EVIL}"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_text_of_a_checkpoint_reaches_no_terminal_as_it_is(name: str, directory: Path) -> None:
    SPOILT[name](directory)
    with pytest.raises(ModelError) as error:
        checkpoint = open_checkpoint(str(directory))
        checkpoint.load_tokenizer()
        checkpoint.sampling_defaults("auto")
    message, hint = error.value.message, error.value.hint
    assert message.isprintable() and SHOWN in message
    assert CUT.search(message) and len(message) < 1000
    assert hint


def test_text_of_a_gguf_file_reaches_no_terminal_as_it_is(tmp_path: Path) -> None:
    model = make_tiny_llama()
    for metadata, tensors in (
        ({"general.architecture": EVIL}, {}),
        ({"llama.rope.scaling.type": EVIL, "llama.rope.scaling.factor": 2.0}, {}),
        ({"llama.context_length": EVIL}, {}),
        ({"general.alignment": EVIL}, {}),
        ({"tokenizer.ggml.model": EVIL}, {}),
        ({"tokenizer.ggml.pre": EVIL}, {}),
        ({"tokenizer.ggml.merges": [EVIL]}, {}),
        ({"tokenizer.ggml.tokens": [EVIL, EVIL, "a", "b"]}, {}),
        ({}, {EVIL[:60]: np.ones(4, dtype=np.float32)}),
    ):
        write_tiny_gguf(tmp_path / "tiny.gguf", model, metadata=metadata, extra_tensors=tensors)
        with pytest.raises(ModelError) as error:
            open_checkpoint(str(tmp_path / "tiny.gguf")).load_tokenizer()
        assert error.value.message.isprintable() and SHOWN in error.value.message
        assert error.value.hint
        assert tensors or CUT.search(error.value.message)
