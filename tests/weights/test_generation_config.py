"""What a model's generation_config.json recommends becomes the defaults of its requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_gguf import write_tiny_gguf
from tests.helpers.tiny_models import edit_json, make_tiny_llama, save_tiny_llama
from tiny_vllm.errors import ModelError
from tiny_vllm.weights.checkpoint import open_checkpoint


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_tiny_llama(tmp_path / "tiny", make_tiny_llama())


def defaults(directory: Path, **recommended: Any) -> dict[str, Any]:
    edit_json(directory / "generation_config.json", **recommended)
    return dict(open_checkpoint(str(directory)).sampling_defaults("auto"))


def test_every_recommendation_is_taken_under_the_name_of_its_parameter(directory: Path) -> None:
    recommended = dict(temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.05)
    assert defaults(directory, **recommended, max_new_tokens=2048) == {**recommended, "max_tokens": 2048}


def test_what_is_null_or_for_others_recommends_nothing(directory: Path) -> None:
    path = directory / "generation_config.json"
    path.write_text(json.dumps({"temperature": None, "do_sample": True, "num_beams": 4, "top_k": 7}))
    assert defaults(directory) == {"top_k": 7}


def test_none_takes_nothing_and_does_not_even_look(directory: Path) -> None:
    edit_json(directory / "generation_config.json", temperature="hot")
    assert open_checkpoint(str(directory)).sampling_defaults("none") == {}


def test_models_without_the_file_have_no_recommendations(directory: Path, tmp_path: Path) -> None:
    (directory / "generation_config.json").unlink()
    assert open_checkpoint(str(directory)).sampling_defaults("auto") == {}
    write_tiny_gguf(tmp_path / "tiny.gguf", make_tiny_llama())
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    assert open_checkpoint(str(tmp_path / "tiny.gguf")).sampling_defaults("auto") == {}


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("temperature", "hot", "'temperature' is 'hot', but must be a number"),
        ("temperature", -1, "'temperature' is -1, but must be"),
        ("temperature", float("nan"), "'temperature' is nan, but must be"),
        ("top_p", 1.5, "'top_p' is 1.5, but must be from 0 to 1"),
        ("top_k", [5], "'top_k' is [5], but must be an integer"),
        ("min_p", True, "'min_p' is True, but must be a number"),
        ("repetition_penalty", 0, "'repetition_penalty' is 0, but must be a finite number above 0"),
        ("repetition_penalty", -1, "'repetition_penalty' is -1, but must be a finite number above 0"),
        ("max_new_tokens", "64", "'max_new_tokens' is '64', but must be an integer"),
        ("max_new_tokens", 0, "'max_new_tokens' is 0, but must be at least 1"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_with_file_key_and_value(
    key: str, value: Any, fault: str, directory: Path
) -> None:
    with pytest.raises(ModelError) as error:
        defaults(directory, **{key: value})
    assert error.value.message.startswith(f"{directory / 'generation_config.json'}: {fault}")
    assert error.value.hint == "correct the file, or use generation_config='none'"
