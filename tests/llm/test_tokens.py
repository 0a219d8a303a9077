"""The tokens of a tiny random Llama in FP32 are those of transformers, whatever the schedule."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.llm_checks import EOS_IDS, assert_pool_is_whole, greedy, random_prompt, tokens_of
from tests.helpers.oracle import greedy_tokens
from tests.helpers.tiny_models import make_tiny_llama, save_tiny_llama
from tiny_vllm import LLM, RequestError


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("prefill_policy", ["exclusive", "mixed"])
@pytest.mark.parametrize("budget", [5, 200])
def test_greedy_tokens_equal_transformers_at_page_edges_and_on_repeats(
    model: Any, directory: Path, page_size: int, prefill_policy: str, budget: int
) -> None:
    rng = random.Random(page_size)
    lengths = sorted({max(1, n) for n in (page_size - 1, page_size, page_size + 1, 2 * page_size)})
    prompts = [random_prompt(rng, length) for length in lengths]
    expected = [[greedy_tokens(model, prompt, 12, EOS_IDS)] for prompt in prompts]
    with LLM(
        str(directory),
        page_size=page_size,
        num_pages=max(512 // page_size, 12),
        prefill_policy=prefill_policy,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
    ) as llm:
        for repeat in range(3):
            outputs = llm.generate(prompts, greedy(12))
            assert tokens_of(outputs) == expected
            if repeat:
                cached = [output.num_cached_tokens for output in outputs]
                assert cached == [(length - 1) // page_size * page_size for length in lengths]
        assert_pool_is_whole(llm)


def test_preemption_with_shared_prefixes_gives_the_unpressured_tokens(model: Any, directory: Path) -> None:
    rng = random.Random(1)
    prefix = random_prompt(rng, 33)
    prompts = [[*prefix, *random_prompt(rng, 1)] for _ in range(5)]
    with LLM(str(directory), page_size=4, num_pages=30, max_num_seqs=5) as llm:
        outputs = llm.generate(prompts, greedy(35, ignore_eos=True))
        assert llm.stats().num_preemptions > 0
        assert_pool_is_whole(llm)
    assert tokens_of(outputs) == [[greedy_tokens(model, prompt, 35)] for prompt in prompts]


def test_random_load_equals_solo_runs(model: Any, directory: Path) -> None:
    """Shared prefixes, choices, stop tokens, priorities and a small pool; every output as if it ran alone."""
    rng = random.Random(2)
    prefixes = [random_prompt(rng, 40) for _ in range(3)]
    prompts = [
        rng.choice(prefixes)[: rng.randrange(40)] + random_prompt(rng, rng.randrange(1, 9)) for _ in range(40)
    ]
    params = [greedy(rng.randrange(1, 20), n=rng.choice([1, 1, 2])) for _ in prompts]
    with LLM(str(directory), page_size=4, num_pages=40, max_num_seqs=6, max_num_batched_tokens=24) as llm:
        outputs = llm.generate(prompts, params, priority=[rng.randrange(3) for _ in prompts])
        assert llm.stats().num_preemptions > 0
        assert_pool_is_whole(llm)
    for prompt, sampling, output in zip(prompts, params, outputs, strict=True):
        expected = greedy_tokens(model, prompt, sampling.max_tokens, EOS_IDS)
        assert [choice.token_ids for choice in output.outputs] == [expected] * sampling.n


def test_dynamic_rope_is_not_stretched_unless_a_longer_context_is_asked_for(tmp_path: Path) -> None:
    """Stretching depends on the longest context; transformers' answers to short prompts need it
    unstretched."""
    model = make_tiny_llama(
        max_position_embeddings=64,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )
    directory = save_tiny_llama(tmp_path / "dynamic", model)
    prompt = random_prompt(random.Random(8), 30)
    with LLM(str(directory), num_pages=32) as llm:
        assert llm.config.max_model_len == 64
        assert tokens_of(llm.generate([prompt], greedy(20, ignore_eos=True))) == [
            [greedy_tokens(model, prompt, 20)]
        ]
    with LLM(str(directory), num_pages=32, max_model_len=128) as llm:
        assert len(llm.generate([prompt], greedy(90, ignore_eos=True))[0].outputs[0].token_ids) == 90


def test_nan_logits_fail_only_their_own_request(model: Any, tmp_path: Path) -> None:
    """A checkpoint with one poisoned embedding row: requests that touch it fail, their neighbours do not."""
    poisoned = make_tiny_llama()
    with torch.no_grad():
        poisoned.model.embed_tokens.weight[9] = float("nan")
    directory = save_tiny_llama(tmp_path / "poisoned", poisoned)
    with LLM(str(directory), num_pages=32, page_size=4) as llm:
        bad, good = llm.generate([[5, 9, 6, 7, 8, 10], [5, 6, 7]], greedy(6, ignore_eos=True))
        assert bad.outputs[0].finish_reason == "error" and bad.outputs[0].token_ids == []
        assert tokens_of([good]) == [[greedy_tokens(model, [5, 6, 7], 6)]]
        # The failed request's pages hold NaN and are used again.
        assert_pool_is_whole(llm)
        for length in (9, 30, 60):
            prompt = random_prompt(random.Random(length), length)
            prompt = [token for token in prompt if token != 9]
            assert tokens_of(llm.generate([prompt], greedy(6, ignore_eos=True))) == [
                [greedy_tokens(model, prompt, 6)]
            ]


def test_dummy_weights_run_without_a_tokenizer(directory: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text((directory / "config.json").read_text())
    runs = []
    for _ in range(2):
        with LLM(str(config), load_format="dummy", num_pages=16, seed=3) as llm:
            runs.append(tokens_of(llm.generate([[5, 6, 7]], greedy(5, ignore_eos=True))))
            with pytest.raises(RequestError, match="tokenizer"):
                llm.generate(["text"])
    assert runs[0] == runs[1]
