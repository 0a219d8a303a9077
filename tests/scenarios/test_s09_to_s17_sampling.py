"""From logits to tokens: temperatures, filters, seeds, choices, penalties, bad words; on a whole engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.helpers.oracle import all_logits
from tests.helpers.tiny_models import EOS_ID, TURN_END_ID, VOCAB_SIZE, make_tiny_llama, save_tiny_llama
from tests.scenarios.conftest import Served, Tiny
from tiny_vllm import LLM, RequestError, SamplingParams

PROMPT = [5, 6, 7, 8]
NUM_TOKENS = 24


def tokens(llm: LLM, prompt: list[int] = PROMPT, **options: Any) -> list[int]:
    params = SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 1, **options})
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def steep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, LLM]]:
    """A model whose logits reach 1e4 and more."""
    model = make_tiny_llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(1e4 / all_logits(model, PROMPT).abs().max())
    with LLM(str(save_tiny_llama(tmp_path_factory.mktemp("steep"), model)), num_pages=64) as llm:
        yield model, llm


@pytest.mark.parametrize("temperature", [0, 1e-7, 1e-6, 9.9e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9, "top_k": 40, "min_p": 0.01}])
def test_s09_tiny_temperatures_are_greedy_where_the_gap_is_clear(
    steep: tuple[Any, LLM], llm: LLM, tiny: Tiny, temperature: float, filters: dict[str, Any]
) -> None:
    for model, engine in (steep, (tiny.model, llm)):
        drawn = tokens(engine, temperature=temperature, **filters)
        rows = all_logits(model, [*PROMPT, *drawn])[len(PROMPT) - 1 : -1]
        best = rows.topk(2)
        # An exponential race of a vocabulary is over when the gap is 40 temperatures: e^-40 of probability.
        is_clear = best.values[:, 0] - best.values[:, 1] > 40 * max(temperature, 1e-5)
        assert is_clear.sum() > NUM_TOKENS // 2, "nothing would be tested"
        assert torch.equal(torch.tensor(drawn)[is_clear], best.indices[is_clear, 0])


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"seed": 1}, {"temperature": 50.0, "top_k": 5}], ids=str
)
def test_s06_a_bias_of_100_decides_whatever_the_size_of_the_logits(
    steep: tuple[Any, LLM], options: dict[str, Any]
) -> None:
    _, llm = steep
    free = tokens(llm, temperature=0)
    assert tokens(llm, **options, logit_bias={200: 100}) == [200] * NUM_TOKENS
    assert set(tokens(llm, **options, logit_bias={200: 100, 201: 100, free[0]: 99})) <= {200, 201}
    assert not set(tokens(llm, **options, logit_bias=dict.fromkeys(free, -100))) & set(free)
    # What is impossible together gives way, in the order of the docs: the allow-list holds.
    everything = dict.fromkeys(range(VOCAB_SIZE), -100)
    assert len(tokens(llm, **options, logit_bias=everything)) == NUM_TOKENS
    contradiction = {"allowed_token_ids": [7, 8], "logit_bias": {200: 100, 7: -100}}
    assert tokens(llm, **options, **contradiction) == [8] * NUM_TOKENS


@pytest.mark.parametrize("temperature", [-1e-9, -1, math.nan, math.inf, -math.inf, "1", True])
def test_s09_a_temperature_is_finite_and_not_negative(temperature: Any) -> None:
    with pytest.raises(RequestError, match="temperature is"):
        SamplingParams(temperature=temperature)


@pytest.mark.parametrize(
    "narrow",
    [
        {"top_k": 1},
        {"top_p": 0.0},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"top_k": 1, "top_p": 0.0, "min_p": 1.0},
        {"top_k": 10**9, "top_p": 1e-30, "temperature": 1e-5},
        {"top_p": 0.0, "temperature": 100.0},
    ],
    ids=str,
)
def test_s10_the_narrowest_filters_leave_the_most_likely_token(llm: LLM, narrow: dict[str, Any]) -> None:
    assert tokens(llm, **narrow) == tokens(llm, temperature=0)


@pytest.mark.parametrize(
    "off", [{"top_k": 0}, {"top_k": -1}, {"top_k": VOCAB_SIZE}, {"top_k": 10**9}, {"top_p": 1}, {"min_p": 0}]
)
def test_s10_filters_that_are_off_change_nothing(llm: LLM, off: dict[str, Any]) -> None:
    assert tokens(llm, temperature=1.5, **off) == tokens(llm, temperature=1.5)


@pytest.mark.parametrize("n", [1, 3])
def test_s13_a_seed_gives_the_same_choices_streamed_and_whole(server: Served, n: int) -> None:
    def drawn(seed: int, stream: bool) -> list[list[int]]:
        answer = server.complete(
            PROMPT, n=n, seed=seed, max_tokens=8, ignore_eos=True, stream=stream, return_token_ids=True
        )
        found: list[list[int]] = [[] for _ in range(n)]
        for part in answer.events() if stream else [answer.json()]:
            for choice in part["choices"]:
                found[choice["index"]] += choice["token_ids"]
        return found

    first = drawn(11, stream=False)
    assert drawn(11, stream=True) == drawn(11, stream=False) == first
    assert drawn(12, stream=False) != first
    assert len({tuple(choice) for choice in first}) == n


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_s14_choices_of_uneven_length_end_one_by_one(server: Served, path: str, is_streamed: bool) -> None:
    asked = (
        {"prompt": [9] * 40} if path == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    )
    body: dict[str, Any] = {
        **asked,
        "n": 3,
        "seed": 3,
        "max_tokens": 60,
        "logit_bias": {str(EOS_ID): 4, str(TURN_END_ID): 4},
        "return_token_ids": True,
        "stream": is_streamed,
    }
    if is_streamed:
        body["stream_options"] = {"include_usage": True}
    answer = server.post(f"/v1/{path}", body)
    token_ids: list[list[int]] = [[], [], []]
    ends: list[list[str]] = [[], [], []]
    parts = answer.events() if is_streamed else [answer.json()]
    for choice in [choice for part in parts for choice in part["choices"]]:
        index = choice["index"]
        assert not ends[index], "a choice goes on after its end"
        token_ids[index] += choice.get("token_ids") or []
        ends[index] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert ends == [["stop"]] * 3
    assert all(choice[-1] in (EOS_ID, TURN_END_ID) for choice in token_ids)
    assert len({len(choice) for choice in token_ids}) == 3, "lengths should be uneven"
    usage = parts[-1]["usage"]
    assert usage["completion_tokens"] == sum(map(len, token_ids))
    if path == "completions":
        assert usage["prompt_tokens"] == 40
    server.assert_alive_and_right()


def test_s14_the_prompt_of_several_choices_lies_in_the_pool_once(tiny: Tiny) -> None:
    with LLM(str(tiny.directory), num_pages=100, max_num_seqs=4) as llm:
        stream = llm.stream([9] * 64, SamplingParams(n=4, max_tokens=8, ignore_eos=True))
        for _ in range(3):
            next(stream)
        stats = llm.stats()
        # Three pages hold all but the prompt's last token, which each choice computes itself.
        assert (stats.num_running, stats.num_shared_pages) == (4, 3)
        assert stats.num_used_pages == 3 + 4 * 2
        list(stream)
        stats = llm.stats()
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_s15_what_the_prompt_says_is_not_penalised(llm: LLM, tiny: Tiny, penalty: str) -> None:
    """Not even in a prompt full of the tokens that come next, and whoever stands before or behind."""
    repeated = tokens(llm, [30] * 40, temperature=0, max_tokens=1)[0]
    prompt = [repeated] * 20 + [30] * 20
    expected = []
    for _ in range(12):
        row = all_logits(tiny.model, [*prompt, *expected])[-1].clone()
        for token in set(expected):
            row[token] -= 2.0 * (expected.count(token) if penalty == "frequency_penalty" else 1)
        expected.append(int(row.argmax()))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, **{penalty: 2.0})
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for place in range(3):
        prompts = [[30] * 40, [30] * 40]
        prompts.insert(place, prompt)
        mixed = [plain, plain]
        mixed.insert(place, params)
        outputs = llm.generate(prompts, mixed, use_tqdm=False)
        assert outputs[place].outputs[0].token_ids == expected


@pytest.mark.parametrize("word", ["the", "quick", "of the"])
def test_s17_a_bad_word_is_blocked_in_both_forms(llm: LLM, word: str) -> None:
    """Random tokens of the word alone: without a ban they soon spell it, after a space and joined."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    spaced, bare = (tokenizer.encode(text, add_special_tokens=False) for text in (f" {word}", word))
    if word == "the":
        assert (len(spaced), len(bare)) == (1, 3), "one form is a token, the other is not"
    allowed = sorted({*spaced, *bare, *tokenizer.encode("!", add_special_tokens=False)})
    options = {"temperature": 100.0, "allowed_token_ids": allowed, "max_tokens": 200}

    def has(token_ids: list[int], form: list[int]) -> bool:
        return any(token_ids[start : start + len(form)] == form for start in range(len(token_ids)))

    free, held = tokens(llm, **options), tokens(llm, **options, bad_words=[word])
    assert has(free, spaced) and has(free, bare)
    assert not has(held, spaced) and not has(held, bare)
    assert set(held) <= set(allowed)
    for other in (f" {word}", f"{word} "):  # a space before the word is no part of it, one behind it is
        assert (tokens(llm, **options, bad_words=[other]) == held) is other.startswith(" ")


@pytest.mark.parametrize("word", ["", " ", "\n", "\t \n", "\u3000", "\x1f", "\u2028"])
def test_s17_bad_words_without_text_are_refused(server: Served, word: str) -> None:
    for path, asked in (
        ("completions", {"prompt": "x"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        answer = server.post(f"/v1/{path}", {**asked, "bad_words": ["fine", word]})
        assert answer.status == 400 and "bad_words" in answer.error["message"]


@pytest.mark.parametrize("word", ["\x07", "\x00", "\u200b", "\ufeff", "é", "🙂", " a", "a\n"])
def test_s17_control_characters_and_odd_words_are_words(server: Served, word: str) -> None:
    answer = server.complete("x", bad_words=[word], max_tokens=40, ignore_eos=True, seed=4)
    assert answer.status == 200


def test_s17_bad_words_that_cover_the_allow_list_leave_it_in_force(server: Served) -> None:
    answer = server.complete(
        "x", bad_words=["a", "b"], allowed_token_ids=[68, 69], max_tokens=8, return_token_ids=True
    )
    assert set(answer.json()["choices"][0]["token_ids"]) <= {68, 69}
