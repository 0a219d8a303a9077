"""The bundled model's token ids against a third implementation, on texts of every kind."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_vllm.text.tokenizer import Tokenizer

RECORDED = Path(__file__).parent / "data" / "smollm2_more.json"
"""Ids of tiktoken's merges over the splits of the regex package, control tokens apart. On the texts of
smollm2.json, recorded from llama.cpp, the two agree."""


WRITTEN = RECORDED.with_name("written_control_tokens.json")


def test_texts_have_the_ids_of_tiktoken(bundled_tokenizer: Tokenizer) -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert len(recorded["texts"]) > 150
    for text, ids in zip(recorded["texts"], recorded["ids"], strict=True):
        assert bundled_tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert bundled_tokenizer.decode(ids, skip_special_tokens=False) == text


def test_control_tokens_in_plain_text_have_the_ids_of_tiktoken(bundled_tokenizer: Tokenizer) -> None:
    """Recorded in the same way, without a token for what they spell."""
    recorded = json.loads(WRITTEN.read_text(encoding="utf-8"))["smollm2"]
    for text, ids in zip(recorded["texts"], recorded["ids"], strict=True):
        encoded = bundled_tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=False)
        assert encoded == ids, text
        assert bundled_tokenizer.decode(ids) == text
