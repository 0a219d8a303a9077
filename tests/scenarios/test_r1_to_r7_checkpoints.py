"""Checkpoints: heads, windows, types; each against transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.oracle import all_logits
from tests.helpers.tiny_families import WINDOW, make_tiny_model
from tests.helpers.tiny_models import edit_json, make_tiny_llama, save_tiny_llama
from tiny_vllm import LLM, ModelError, SamplingParams
from tiny_vllm.engine import build

NUM_TOKENS = 8
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
# FP32 sums of at most 96 terms of size ~10, over a few layers, in another order.
LOGPROB_TOLERANCE = 1e-4


def assert_follows(model: Any, llm: LLM, prompt: list[int], num_cached: int = 0) -> None:
    """Every token and its log-probability are those of transformers."""
    (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
    choice = output.outputs[0]
    assert output.num_cached_tokens == num_cached
    rows = torch.log_softmax(all_logits(model, [*prompt, *choice.token_ids[:-1]]), -1)[len(prompt) - 1 :]
    assert choice.token_ids == rows.argmax(-1).tolist() and choice.logprobs is not None
    given = [entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs, strict=True)]
    assert given == pytest.approx(rows.amax(-1).tolist(), abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("kind", ["tied", "tied with a head", "untied without a head"])
def test_r1_a_tied_head_is_the_embedding_and_an_absent_one_is_missed(kind: str, tmp_path: Path) -> None:
    model = make_tiny_llama(tie_word_embeddings=kind != "untied without a head")
    directory = save_tiny_llama(tmp_path, model, tokenizer=False)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    if kind == "tied with a head":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if kind == "untied without a head":
        del tensors["lm_head.weight"]
    save_file(tensors, path)
    if kind == "untied without a head":
        with pytest.raises(ModelError, match=r"lm_head\.weight"):
            LLM(str(directory), num_pages=16)
        return
    with LLM(str(directory), num_pages=16) as llm:
        assert_follows(model, llm, [5, 6, 7])


@pytest.mark.parametrize("budget", [WINDOW // 2, 4 * WINDOW], ids=["small chunks", "large chunks"])
@pytest.mark.parametrize("case", ["mistral", "qwen2 with windows"])
def test_r4_windows_with_chunks_of_every_size_and_a_prefix_hit(
    case: str, budget: int, tmp_path: Path
) -> None:
    model = make_tiny_model(case)
    save_tiny_llama(tmp_path, model, tokenizer=False)
    rng = random.Random(4)
    prompt = [rng.randrange(4, 320) for _ in range(3 * WINDOW)]
    with LLM(str(tmp_path), page_size=4, num_pages=64, max_num_seqs=2, max_num_batched_tokens=budget) as llm:
        assert_follows(model, llm, prompt)
        assert_follows(model, llm, prompt, num_cached=3 * WINDOW - 4)


def test_r4_a_window_that_is_switched_off_is_none(tmp_path: Path) -> None:
    model = make_tiny_model("qwen2 with windows", use_sliding_window=False)
    save_tiny_llama(tmp_path, model, tokenizer=False)
    edit_json(tmp_path / "config.json", sliding_window=WINDOW, use_sliding_window=False, layer_types=None)
    rng = random.Random(5)
    with LLM(str(tmp_path), num_pages=64, max_num_seqs=2) as llm:
        assert_follows(model, llm, [rng.randrange(4, 320) for _ in range(3 * WINDOW)])


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("declared", ["float16", "bfloat16", "float32"])
def test_r6_auto_computes_in_the_type_that_is_stored(
    stored: torch.dtype, key: str, declared: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_has_bf16_instructions", lambda: True)
    directory = save_tiny_llama(tmp_path, make_tiny_llama(), dtype=stored, tokenizer=False)
    edit_json(directory / "config.json", **{"dtype": None, key: declared})
    with LLM(str(directory), num_pages=16) as llm:
        assert f"torch.{llm.config.dtype}" == str(stored)
        assert any(choice.name == "dtype" and "checkpoint's own" in choice.reason for choice in llm.choices)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_r6_a_cpu_without_instructions_for_the_stored_type_computes_in_fp32(
    stored: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values are those that are stored: the tokens are transformers' with them in FP32."""
    monkeypatch.setattr(build, "_has_bf16_instructions", lambda: False)
    model = make_tiny_llama()
    directory = save_tiny_llama(tmp_path, model, dtype=stored, tokenizer=False)
    with LLM(str(directory), device="cpu", num_pages=16) as llm:
        assert llm.config.dtype == "float32"
        for parameter in model.parameters():
            parameter.data = parameter.data.to(stored).float()
        assert_follows(model, llm, [5, 6, 7])


def test_r6_activations_beyond_float16_are_an_error_and_no_text(tmp_path: Path) -> None:
    """The same weights are fine in FP32; in FP16 they overflow, which ends the request and hurts nobody."""
    model = make_tiny_llama()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1e6)
    directory = save_tiny_llama(tmp_path, model)
    with LLM(str(directory), num_pages=16) as llm:
        assert llm.generate([[5, 6]], PARAMS, use_tqdm=False)[0].outputs[0].finish_reason == "length"
    with LLM(str(directory), dtype="float16", num_pages=16) as llm:
        for _ in range(2):
            (output,) = llm.generate([[5, 6]], PARAMS, use_tqdm=False)
            choice = output.outputs[0]
            assert (choice.finish_reason, choice.token_ids, choice.text) == ("error", [], "")
        stats = llm.stats()
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages


def test_r7_scores_of_a_prompt_that_is_preempted_half_way_are_the_models(tmp_path: Path) -> None:
    model = make_tiny_llama()
    directory = save_tiny_llama(tmp_path, model, tokenizer=False)
    rng = random.Random(7)
    prompt, urgent = ([rng.randrange(4, 320) for _ in range(60)] for _ in range(2))
    with LLM(str(directory), page_size=4, num_pages=20, max_num_seqs=3, max_num_batched_tokens=8) as llm:
        llm.generate([prompt[:30]], SamplingParams(max_tokens=1), use_tqdm=False)  # a warm prefix
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        scored = llm.stream(prompt, params, priority=5)
        llm.generate([[5]], SamplingParams(max_tokens=3), use_tqdm=False)
        assert 0 < llm._live_engine().slots()[0].computed_len < 60
        llm.generate([urgent], SamplingParams(max_tokens=2), use_tqdm=False)
        assert llm.stats().num_preemptions == 1
        *_, last = scored
    scores = last.output.prompt_logprobs
    assert scores is not None and len(scores) == 60 and scores[0] is None
    rows = torch.log_softmax(all_logits(model, prompt), -1)
    given = [entry[token].logprob for token, entry in zip(prompt[1:], scores[1:], strict=True) if entry]
    expected = [float(rows[place, token]) for place, token in enumerate(prompt[1:])]
    assert given == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
