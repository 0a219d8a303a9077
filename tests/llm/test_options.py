"""Options of the engine: how the pool is sized, and which cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.llm_checks import greedy
from tiny_vllm import LLM, ConfigError, EngineDead, RequestError


def test_the_pool_can_be_sized_in_bytes(directory: Path) -> None:
    sizes = []
    for num_bytes in (1 << 20, 1 << 21):
        with LLM(str(directory), kv_cache_memory_bytes=num_bytes, max_num_seqs=512) as llm:
            sizes.append(llm.stats().num_pages)
            assert len(llm.generate([[5, 6]], greedy(3))[0].outputs[0].token_ids) == 3
    assert sizes[0] > 0 and sizes[1] == 2 * sizes[0]


def test_pool_formula(directory: Path) -> None:
    with LLM(
        str(directory), pool_sizing="formula", mean_sequence_len=100, max_num_seqs=4, page_size=16
    ) as llm:
        assert llm.config.num_pages == -(-4 * 100 * 3 // 2 // 16)
    with pytest.raises(ConfigError, match="mean_sequence_len"):
        LLM(str(directory), pool_sizing="formula")


def test_unknown_options_and_a_closed_llm_are_errors(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_length(.|\n)*did you mean max_model_len"):
        LLM(str(directory), max_model_length=5)
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 2"):
        LLM(str(directory), max_num_batched_tokens=2, max_num_seqs=3)
    with pytest.raises(ConfigError, match="no room for the KV cache"):
        LLM(str(directory), kv_cache_memory_bytes=100)
    with pytest.raises(ConfigError, match="512, more than the model's context"):
        LLM(str(directory), max_model_len=512)
    llm = LLM(str(directory), num_pages=8)
    stream = llm.stream([5, 6], greedy(5))
    llm.close()
    llm.close()
    stream.close()
    with pytest.raises(EngineDead, match="closed"):
        llm.generate([[5]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ageing_seconds": float("inf")}, "ageing_seconds is inf"),
        ({"num_pages": 10**9}, "page pool needs"),
        ({"num_pages": 10**30}, "num_pages is"),
        ({"pool_sizing": "formula", "mean_sequence_len": 10**30}, "mean_sequence_len is"),
        ({"mean_sequence_len": 100}, "mean_sequence_len"),
        ({"num_pages": 8, "kv_cache_memory_bytes": 1 << 20}, "kv_cache_memory_bytes"),
        ({"max_model_len": 1}, "max_model_len is 1"),
    ],
)
def test_impossible_or_contradictory_options_are_refused(
    directory: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(directory), **options)


def test_a_context_whose_tables_do_not_fit_is_refused(directory: Path, tmp_path: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    longer = tmp_path / "config.json"
    longer.write_text(json.dumps(config | {"max_position_embeddings": 2**31 - 1}))
    with pytest.raises(ConfigError, match=r"max_model_len is 2147483647(.|\n)*hint: lower max_model_len"):
        LLM(str(tmp_path), load_format="dummy")
    with LLM(str(tmp_path), load_format="dummy", max_model_len=64) as llm:
        assert len(llm.generate([[5, 6]], greedy(3))[0].outputs[0].token_ids) == 3


def test_what_is_no_boolean_does_not_choose_how_text_is_parsed(directory: Path) -> None:
    wrong: dict[str, Any] = {"parse_special_tokens": "no"}
    refusal = "parse_special_tokens is 'no', but must be true or false"
    with LLM(str(directory), num_pages=8) as llm:
        for call in (llm.generate, llm.stream, llm.embed):
            with pytest.raises(RequestError, match=refusal):
                call([5, 6], **wrong)
        with pytest.raises(RequestError, match=refusal):
            llm.chat([{"role": "user", "content": "hi"}], **wrong)
