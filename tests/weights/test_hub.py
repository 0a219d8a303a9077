"""Hub ids: what is asked of the hub, and one clear error when it cannot give it. No test uses a network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from tests.helpers.tiny_models import make_tiny_llama, save_tiny_llama
from tiny_vllm.errors import ModelError
from tiny_vllm.weights.checkpoint import open_checkpoint
from tiny_vllm.weights.hub import fetch_model, is_hub_id


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], list[list[str]]]:
    """Stand in for the hub: every model is this directory. Gives the patterns of the downloads."""

    def serve(directory: Path) -> list[list[str]]:
        patterns: list[list[str]] = []

        def snapshot_download(*, repo_id: str, allow_patterns: list[str]) -> str:
            patterns.append(allow_patterns)
            return str(directory)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return patterns

    return serve


def test_only_the_files_that_are_needed_are_fetched(hub: Any, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, make_tiny_llama(), max_shard_size="100KB")
    shards = sorted(path.name for path in tmp_path.glob("model-*.safetensors"))
    patterns = hub(tmp_path)
    checkpoint = open_checkpoint("someone/tiny-llama")
    assert checkpoint.spec.hidden_size == 64
    assert len(shards) > 1 and patterns[-1][-len(shards) :] == shards
    assert not any("safetensors" in pattern for pattern in patterns[0])


def test_one_file_is_fetched_when_there_is_no_index(hub: Any, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, make_tiny_llama())
    patterns = hub(tmp_path)
    open_checkpoint("someone/tiny-llama")
    assert patterns[-1][-1] == "model.safetensors"


def test_dummy_weights_fetch_no_weights(hub: Any, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, make_tiny_llama())
    patterns = hub(tmp_path)
    open_checkpoint("someone/tiny-llama", load_format="dummy")
    assert not any("safetensors" in pattern for call in patterns for pattern in call)


def test_the_name_of_a_hub_model_is_its_id(hub: Any, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, make_tiny_llama())
    hub(tmp_path)
    assert open_checkpoint("someone/tiny-llama").name == "someone/tiny-llama"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (LocalEntryNotFoundError("no cache"), "the hub cannot be reached"),
        (OSError("no route"), "the hub cannot be reached"),
        (huggingface_hub.errors.HFValidationError("bad id"), "nor a model on the hub"),
    ],
)
def test_failures_are_one_clear_error(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**arguments: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=rf"'someone/absent'.*{said}.*\nhint"):
        open_checkpoint("someone/absent")


def test_offline_without_a_cache_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="the hub cannot be reached"):
        fetch_model("someone/absent")


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.2-1B", "a/b_c.d"])
def test_hub_ids(name: str) -> None:
    assert is_hub_id(name)


@pytest.mark.parametrize(
    "name", ["", "/models/a", "./a", "../a", "~/a", "a/b/c", "a/", "model.gguf", "a/b.safetensors", "a b"]
)
def test_paths_are_no_hub_ids(name: str) -> None:
    assert not is_hub_id(name)
