from __future__ import annotations

from typing import Any

import pytest

from tests.cli.fakes import FakeLLM
from tiny_vllm.cli.demo import QUESTIONS, WordWrap, shortened, stream_together
from tiny_vllm.cli.main import main
from tiny_vllm.errors import RequestError
from tiny_vllm.types import SamplingParams


def test_the_demo_fits_80_columns_without_colours(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "\x1b" not in captured.out
    assert max(map(len, captured.out.splitlines())) <= 80
    for question in QUESTIONS:
        assert f"> {question}" in captured.out
    assert captured.out.count("Hello big world") == len(QUESTIONS) + 1
    assert "tokens/s" in captured.out
    assert "32 of 48 prompt tokens found" in captured.out
    assert ". free 22" in captured.out


def test_questions_that_do_not_fit_are_refused_before_anything_is_shown(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse_the_last(prompt: Any, params: SamplingParams) -> Any:
        if prompt[-1]["content"] == QUESTIONS[-1]:
            raise RequestError("the prompt has 90 tokens", hint="raise max_model_len")
        return FakeLLM.stream(llm, prompt, params)

    monkeypatch.setattr(llm, "stream", refuse_the_last)
    assert main(["demo"]) == 2
    assert capsys.readouterr() == (
        "",
        "error: the demo's questions do not suit this model: the prompt has 90 tokens\n"
        "hint: raise --max-model-len\n",
    )
    assert llm.num_open == 0


def test_streams_run_side_by_side() -> None:
    llm = FakeLLM()
    num_open: list[int] = []
    outputs = stream_together(
        llm,  # type: ignore[arg-type]
        [([{"role": "user", "content": str(index)}], SamplingParams()) for index in range(3)],
        lambda outputs: num_open.append(llm.num_open),
    )
    assert num_open == [3, 3, 3, 0]
    assert [output.outputs[0].text for output in outputs] == ["Hello big world"] * 3


def test_wrapped_text_breaks_between_words_and_loses_nothing() -> None:
    pieces = ["One", " two", " three\nfour", " five", " six"]
    wrap = WordWrap(width=10)
    wrapped = "".join(map(wrap, pieces))
    assert wrapped == "One two\nthree\nfour five\nsix"


def test_answers_are_shortened_within_the_asked_limits() -> None:
    params = SamplingParams(max_tokens=64)
    assert [shortened(params, quarters=part).max_tokens for part in range(3)] == [64, 48, 32]
    assert shortened(SamplingParams(max_tokens=8, min_tokens=7), quarters=2).max_tokens == 7
    for max_tokens in (None, 0):
        assert shortened(SamplingParams(max_tokens=max_tokens), quarters=2).max_tokens == max_tokens
