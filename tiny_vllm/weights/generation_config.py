"""A model's generation_config.json: the sampling parameters that its authors recommend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiny_vllm.errors import ModelError, RequestError
from tiny_vllm.types import SamplingParams
from tiny_vllm.weights.hf_directory import read_json

# The file's name for each -> ours. `do_sample` is not among them: temperature says it here.
RECOMMENDED: Mapping[str, str] = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def sampling_defaults(path: Path) -> dict[str, Any]:
    """Sampling parameter -> value, for those that the file gives one. Raises ModelError.

    A wrong value is refused rather than passed over: what the authors meant cannot be guessed, and answers
    sampled otherwise would look like a poor model.
    """
    recommended = read_json(path)
    defaults: dict[str, Any] = {}
    for key, name in RECOMMENDED.items():
        value = recommended.get(key)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
            if key == "max_new_tokens" and value < 1:
                raise RequestError(f"{name} is {value}, but must be at least 1", hint="leave it out")
        except RequestError as error:
            fault = error.message.removeprefix(name)
            # In quotes the command line does not take the key for its own option.
            raise ModelError(
                f"{path}: '{key}'{fault}", hint="correct the file, or use generation_config='none'"
            ) from None
        defaults[name] = value
    return defaults


def describe_defaults(defaults: Mapping[str, Any], path: Path) -> str:
    """In words, for the log and for `info`."""
    return ", ".join(f"{name} {value}" for name, value in defaults.items()) + f" from {path}"
