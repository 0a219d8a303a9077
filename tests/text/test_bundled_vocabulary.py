"""The bundled model's token ids against a third implementation, on texts of every kind."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_vllm.text.tokenizer import Tokenizer

RECORDED = Path(__file__).parent / "data" / "smollm2_more.json"
"""Ids of tiktoken's merges over the splits of the regex package, control tokens apart. On the texts of
smollm2.json, recorded from llama.cpp, the two agree."""


def test_texts_have_the_ids_of_tiktoken(bundled_tokenizer: Tokenizer) -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert len(recorded["texts"]) > 150
    for text, ids in zip(recorded["texts"], recorded["ids"], strict=True):
        assert bundled_tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert bundled_tokenizer.decode(ids, skip_special_tokens=False) == text
