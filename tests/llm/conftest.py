"""A tiny random Llama in FP32, as a model of transformers, as a checkpoint, and as an LLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_models import make_tiny_llama, save_tiny_llama
from tiny_vllm import LLM


@pytest.fixture(scope="module")
def model() -> Any:
    return make_tiny_llama()


@pytest.fixture(scope="module")
def directory(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), model)


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(str(directory), max_num_seqs=4, num_pages=64, max_num_batched_tokens=32, max_logprobs=-1) as llm:
        yield llm
