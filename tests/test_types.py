"""Validation of SamplingParams: everything a client may send, checked in one place."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

from tiny_vllm.errors import RequestError, TinyVLLMError
from tiny_vllm.types import MAX_SEED, SamplingParams

HUGE = 10**5000  # more digits than Python prints

ACCEPTED: list[dict[str, Any]] = [
    {"n": 1},
    {"n": 128},
    {"max_tokens": None},
    {"max_tokens": 0},
    {"max_tokens": 5, "min_tokens": 5},
    {"max_tokens": None, "min_tokens": 100},
    {"temperature": 0},
    {"temperature": 1e-7},
    {"temperature": 1e30},
    {"top_p": 0},
    {"top_p": 1e-9},
    {"top_p": 1},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": 1},
    {"top_k": 10**9},
    {"min_p": 0},
    {"min_p": 1.0},
    {"presence_penalty": -2},
    {"frequency_penalty": 2.0},
    {"repetition_penalty": 1e-3},
    {"seed": None},
    {"seed": -(2**63)},
    {"seed": MAX_SEED},
    {"stop": "end"},
    {"stop": ["a", "b"]},
    {"stop": " "},
    {"stop": []},
    {"stop_token_ids": []},
    {"stop_token_ids": (0, 7)},
    {"bad_words": ["word", " spaced "]},
    {"allowed_token_ids": [3]},
    {"logit_bias": {}},
    {"logit_bias": {5: 100, 6: -100.0}},
    {"logprobs": 0},
    {"logprobs": -1},
    {"prompt_logprobs": -1},
    {"detokenize": False},
]

REFUSED: list[dict[str, Any]] = [
    {"n": 0},
    {"n": -1},
    {"n": 1.0},
    {"n": True},
    {"n": None},
    {"n": HUGE},
    {"max_tokens": -1},
    {"max_tokens": 1.5},
    {"max_tokens": "16"},
    {"max_tokens": True},
    {"max_tokens": -HUGE},
    {"min_tokens": -1},
    {"min_tokens": None},
    {"max_tokens": 4, "min_tokens": 5},
    {"temperature": -0.1},
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"temperature": 10**400},
    {"temperature": "1"},
    {"temperature": None},
    {"temperature": True},
    {"top_p": 1.1},
    {"top_p": -1e-9},
    {"top_p": math.nan},
    {"top_k": -2},
    {"top_k": 1.0},
    {"top_k": HUGE},
    {"min_p": 1.01},
    {"min_p": -0.01},
    {"presence_penalty": 2.01},
    {"presence_penalty": math.nan},
    {"frequency_penalty": -2.01},
    {"repetition_penalty": 0},
    {"repetition_penalty": -1.0},
    {"repetition_penalty": math.inf},
    {"seed": 2**64},
    {"seed": -(2**63) - 1},
    {"seed": 1.0},
    {"seed": False},
    {"stop": ""},
    {"stop": ["a", ""]},
    {"stop": [1]},
    {"stop": 5},
    {"stop": {"a": 1}},
    {"stop": "x", "detokenize": False},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": ["3"]},
    {"stop_token_ids": "345"},
    {"stop_token_ids": b"345"},
    {"stop_token_ids": 3},
    {"stop_token_ids": [True]},
    {"stop_token_ids": [HUGE]},
    {"bad_words": "word"},
    {"bad_words": [""]},
    {"bad_words": [" \n"]},
    {"bad_words": [None]},
    {"allowed_token_ids": []},
    {"allowed_token_ids": [1.0]},
    {"logit_bias": {5: 100.5}},
    {"logit_bias": {5: math.nan}},
    {"logit_bias": {5: 1e9}},
    {"logit_bias": {5: "1"}},
    {"logit_bias": {-1: 1.0}},
    {"logit_bias": {"-1": 1.0}},
    {"logit_bias": {"five": 1.0}},
    {"logit_bias": {"²": 1.0}},
    {"logit_bias": {"9" * 5000: 1.0}},
    {"logit_bias": {None: 1.0}},
    {"logit_bias": [(5, 1.0)]},
    {"logprobs": -2},
    {"logprobs": True},
    {"prompt_logprobs": 1.0},
    {"ignore_eos": 1},
    {"detokenize": None},
    {"skip_special_tokens": "false"},
    {"include_stop_str_in_output": 0},
]


def label(options: dict[str, Any]) -> str:
    try:
        return ",".join(f"{name}={str(value)[:20]}" for name, value in options.items())
    except ValueError:
        return ",".join(f"{name}=huge" for name in options)


@pytest.mark.parametrize("options", ACCEPTED, ids=label)
def test_values_within_the_limits_are_accepted(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    for name, value in options.items():
        kept = getattr(params, name)
        assert kept == (tuple(value) if isinstance(value, list) else (value,) if name == "stop" else value)


@pytest.mark.parametrize("options", REFUSED, ids=label)
def test_values_outside_the_limits_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**options)
    assert any(name in str(caught.value) for name in options)
    assert len(str(caught.value)) < 400
    assert isinstance(caught.value, TinyVLLMError) and caught.value.hint
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", ["n", "temperature", "stop", "stop_token_ids", "logit_bias", "detokenize"])
def test_an_error_never_repeats_a_long_value_in_full(name: str) -> None:
    values = {"stop": 1j, "stop_token_ids": "x" * 10_000, "logit_bias": "x" * 10_000}
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: values.get(name, "x" * 10_000)})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["stop", "bad_words", "stop_token_ids", "logit_bias"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_integer_that_python_refuses_to_print_is_told_in_words(name: str, depth: int) -> None:
    value: Any = HUGE
    for _ in range(depth):
        value = [value]
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert len(str(caught.value)) < 400


def test_a_long_value_is_marked_where_it_is_cut() -> None:
    with pytest.raises(RequestError, match=r"temperature is 'x+ \.\.\., but must be a number"):
        SamplingParams(temperature="x" * 100)  # type: ignore[arg-type]


def test_an_unknown_parameter_is_an_error() -> None:
    with pytest.raises(RequestError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_the_error_names_value_limit_and_hint() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(top_p=1.5)
    assert str(caught.value) == "top_p is 1.5, but must be from 0 to 1\nhint: 1 keeps every token"


def test_lists_become_tuples_and_later_changes_to_them_have_no_effect() -> None:
    stop, bias = ["a"], {1: 2.0}
    params = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("b")
    bias[2] = 1.0
    assert params.stop == params.stop_strings == ("a",)
    assert params.logit_bias == {1: 2.0}


def test_logit_bias_keys_may_be_text_as_in_json() -> None:
    assert SamplingParams(logit_bias={"42": 1}).logit_bias == {42: 1.0}  # type: ignore[dict-item]


def test_one_stop_string_is_not_taken_for_a_list_of_characters() -> None:
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams().stop_strings == ()


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (1e-7, True), (1e-5, False), (1.0, False)])
def test_temperatures_under_the_threshold_are_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is greedy


@pytest.mark.parametrize(
    ("options", "uses"),
    [
        ({}, False),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"repetition_penalty": 0.9}, True),
        ({"repetition_penalty": 1}, False),
    ],
)
def test_penalties_are_used_only_when_they_differ_from_off(options: dict[str, Any], uses: bool) -> None:
    assert SamplingParams(**options).uses_penalties is uses


def test_params_are_frozen_and_survive_pickling() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, seed=3)
    with pytest.raises(AttributeError):
        params.seed = 4  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(params)) == params
