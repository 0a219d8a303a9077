"""What a prompt may be, and that one that may not hurts no other."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.llm_checks import assert_pool_is_whole, greedy, tokens_of
from tests.helpers.oracle import greedy_tokens
from tests.helpers.tiny_models import VOCAB_SIZE
from tiny_vllm import LLM, CapacityError, RequestError, SamplingParams


def test_prompt_forms_of_vllm_are_accepted(llm: LLM) -> None:
    params = greedy(3)
    expected = tokens_of(llm.generate([[5, 6]], params))
    for prompts in (
        [5, 6],
        {"prompt_token_ids": [5, 6]},
        [{"prompt_token_ids": [5, 6]}],
        torch.tensor([5, 6]),
    ):
        assert tokens_of(llm.generate(prompts, params)) == expected
    assert llm.generate([], params) == []
    with pytest.raises(RequestError, match="2 entries for 1"):
        llm.generate([[5, 6]], [params, params])


def test_chat_text_and_token_ids_agree_on_the_prompt(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    (chat,) = llm.chat(messages, greedy(4))
    (text,) = llm.generate(chat.prompt, greedy(4))
    (ids,) = llm.generate(chat.prompt_token_ids, greedy(4))
    assert chat.prompt_token_ids == text.prompt_token_ids == ids.prompt_token_ids
    assert tokens_of([chat]) == tokens_of([text]) == tokens_of([ids])
    many = llm.chat([messages, messages], greedy(4))
    assert tokens_of(many) == tokens_of([chat, chat])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5] * 256, "256 tokens.*256"),
        ([5] * 2560, "2560 tokens.*256"),
        ("", "empty"),
        ([[]], "empty"),
        ([[5, -1]], "-1"),
        ([[5, VOCAB_SIZE]], str(VOCAB_SIZE)),
        ([[5, 2**63]], str(2**63)),
        ([["a"]], "not a token id"),
        ([[1.5]], "not a token id"),
        ([[True]], "not a token id"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "keys"),
        ({"text": "a"}, "keys"),
        (7, "int"),
        (None, "NoneType"),
    ],
)
def test_bad_prompts_are_refused_and_a_running_request_is_undisturbed(
    model: Any, llm: LLM, prompt: Any, message: str
) -> None:
    running = llm.stream([5, 6, 7], greedy(10, ignore_eos=True))
    next(running)
    with pytest.raises(RequestError, match=message):
        llm.generate(
            ["fine", *prompt] if isinstance(prompt, list) and isinstance(prompt[0], list) else prompt
        )
    for update in running:
        last = update
    assert last.output.outputs[0].token_ids == greedy_tokens(model, [5, 6, 7], 10)
    assert_pool_is_whole(llm)


def test_one_bad_prompt_of_many_runs_nothing(llm: LLM) -> None:
    steps = llm.stats().num_steps
    with pytest.raises(RequestError):
        llm.generate([[5], [6], [10_000]])
    assert llm.stats().num_steps == steps
    assert_pool_is_whole(llm)


@pytest.mark.parametrize("prompt", [b"ab", bytearray(b"ab"), {5, 6}, memoryview(b"ab"), {1: 2, "a": 3}])
def test_containers_without_a_meaning_as_prompts_are_refused(llm: LLM, prompt: Any) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(RequestError):
            call(prompt)
    for wrong in ({"prompt_token_ids": "abc"}, {"prompt": [5, 6]}):
        with pytest.raises(RequestError, match="prompt"):
            llm.generate(wrong)
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.generate([[5]], "abc")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="priority"):
        llm.generate([[5]], priority="")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="role"):
        llm.chat([{}])


def test_a_batch_that_exceeds_the_queue_leaves_nothing_behind(directory: Path) -> None:
    with LLM(str(directory), max_num_seqs=1, max_queue_len=2, num_pages=16) as llm:
        with pytest.raises(CapacityError, match="max_queue_len"):
            llm.generate([[5], [6], [7], [8]], greedy(2))
        stats = llm.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert len(llm.generate([[5], [6], [7]], greedy(2))) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, str(VOCAB_SIZE)),
        ({"allowed_token_ids": [VOCAB_SIZE]}, str(VOCAB_SIZE)),
        ({"stop_token_ids": [VOCAB_SIZE]}, str(VOCAB_SIZE)),
        ({"n": 10**6}, "at most 128"),
        ({"stop": ["x"] * 10**4}, "at most 64"),
        ({"min_tokens": 300, "max_tokens": None}, "min_tokens"),
    ],
)
def test_sampling_parameters_beyond_the_models_limits_are_refused(
    llm: LLM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([5], SamplingParams(**options))


def test_unknown_sampling_parameters_are_request_errors() -> None:
    with pytest.raises(RequestError, match=r"max_token'(.|\n)*did you mean max_tokens"):
        SamplingParams(max_token=3)  # type: ignore[call-arg]
    assert copy.deepcopy(SamplingParams(n=2)) == pickle.loads(pickle.dumps(SamplingParams(n=2)))


@pytest.mark.parametrize("value", [b"x", 5, None, {5, 6}, memoryview(b"x")])
def test_what_is_no_prompt_is_told_what_would_be_one(value: Any, llm: LLM) -> None:
    kind = type(value).__name__
    for call in (llm.generate, llm.embed):
        with pytest.raises(RequestError) as error:
            call(value)
        assert error.value.message == f"prompts is of type {kind}, but must be a prompt or a list of prompts"
        assert error.value.hint == (
            "a prompt is a string, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"
        )
    with pytest.raises(RequestError) as error:
        llm.chat(value)
    assert error.value.message == (
        f"messages is of type {kind}, but must be a conversation or a list of conversations"
    )
    assert error.value.hint == "a conversation is a list of {'role': ..., 'content': ...}"


def test_later_prompts_are_tokenised_while_the_first_step_is_under_way(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as no priorities say who comes first."""
    prompts = [[5 + i] * 20 for i in range(6)]
    alone = [llm.generate(prompt, greedy(4))[0].outputs[0].token_ids for prompt in prompts]
    order: list[str] = []
    build, step = llm._builder.build, llm._step

    def noted_build(*args: Any, **options: Any) -> Any:
        order.append("build")
        return build(*args, **options)

    def noted_step(*args: Any) -> Any:
        order.append("step")
        return step(*args)

    monkeypatch.setattr(llm._builder, "build", noted_build)
    monkeypatch.setattr(llm, "_step", noted_step)
    outputs = llm.generate(prompts, greedy(4))
    # A step has 32 tokens.
    assert order[:8] == ["build"] * 2 + ["step"] + ["build"] * 4 + ["step"]
    assert [output.outputs[0].token_ids for output in outputs] == alone
    order.clear()
    llm.generate(prompts, greedy(4), priority=[1, 1, 1, 1, 1, 0])
    assert order[:7] == ["build"] * 6 + ["step"]


def test_a_bad_prompt_behind_the_first_step_leaves_nothing_behind(model: Any, llm: LLM) -> None:
    running = llm.stream([5, 6, 7], greedy(10, ignore_eos=True))
    next(running)
    with pytest.raises(RequestError, match="10000"):
        llm.generate([*([[5] * 20] * 5), [10_000]], greedy(200))
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 0)
    for update in running:
        last = update
    assert last.output.outputs[0].token_ids == greedy_tokens(model, [5, 6, 7], 10)
    assert_pool_is_whole(llm)
