"""A model by its hub id, through `huggingface_hub` and its cache: only the files that are needed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tiny_vllm.errors import MAX_PATH_LEN, ModelError, shown
from tiny_vllm.weights.hf_directory import INDEX, SINGLE_FILE, read_weight_map

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
SMALL_FILES = ["*.json", "*.jinja", "*.model"]
FILE_ENDINGS = (".gguf", ".json", ".safetensors", ".bin")


def is_hub_id(name: str) -> bool:
    """Whether a name that is no existing path can be meant as a hub id: "owner/model" or "model"."""
    return HUB_ID.fullmatch(name) is not None and not name.endswith(FILE_ENDINGS)


def fetch_model(hub_id: str, *, weights: bool = True) -> Path:
    """A local directory with the model's JSON files and, unless told otherwise, its safetensors files.

    Raises ModelError if the hub cannot be reached and the model is not in the local cache, or if the model
    does not exist or may not be read.
    """
    directory = _download(hub_id, SMALL_FILES)
    if weights:
        index = directory / INDEX
        files = sorted(set(read_weight_map(index).values())) if index.is_file() else [SINGLE_FILE]
        directory = _download(hub_id, [*SMALL_FILES, *files])
    return directory


def _download(hub_id: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    arguments: dict[str, Any] = {"repo_id": hub_id, "allow_patterns": patterns}
    try:
        return Path(snapshot_download(**arguments))
    except GatedRepoError as error:
        raise ModelError(
            f"hub model {shown(hub_id, MAX_PATH_LEN)} needs permission",
            hint="accept its licence, then log in with `hf auth login`",
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError(
            f"{shown(hub_id, MAX_PATH_LEN)} is neither a path on this machine nor a model on the hub",
            hint="check the spelling",
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, RuntimeError) as error:
        raise ModelError(
            f"{shown(hub_id, MAX_PATH_LEN)} is no path on this machine, and the hub cannot be reached "
            f"({type(error).__name__})",
            hint="check the path or the network; without model= the bundled model is used",
        ) from error
