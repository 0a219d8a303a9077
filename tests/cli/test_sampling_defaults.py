"""A sampling option that is not given is the model's: what its generation_config.json recommends."""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.fakes import FakeLLM
from tests.helpers.tiny_models import edit_json, make_tiny_llama, save_tiny_llama
from tiny_vllm import LLM, SamplingParams
from tiny_vllm.cli.main import main
from tiny_vllm.cli.options import add_sampling_options, sampling_params

RECOMMENDED = dict(temperature=1.0, top_k=5, top_p=0.8, min_p=0.1, repetition_penalty=1.1, max_tokens=7)


def asked(llm: FakeLLM, command: str, *options: str, monkeypatch: pytest.MonkeyPatch) -> SamplingParams:
    """What the model gets when the command is run."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once\n"))
    assert main([command, *options]) == 0
    return llm.asked[-1][1]


@pytest.mark.parametrize(
    ("command", "own"),
    [("generate", dict(max_tokens=128)), ("chat", dict(max_tokens=None, temperature=0.7))],
)
def test_options_that_are_not_given_are_the_models_or_else_the_commands(
    command: str, own: dict[str, Any], llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked(llm, command, monkeypatch=monkeypatch) == SamplingParams(**own)
    llm._sampling_defaults = dict(top_k=5)
    assert asked(llm, command, monkeypatch=monkeypatch) == SamplingParams(**own, top_k=5)
    llm._sampling_defaults = RECOMMENDED
    assert asked(llm, command, monkeypatch=monkeypatch) == SamplingParams(**RECOMMENDED)


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0", 0.0),
        ("top_k", "0", 0),
        ("top_p", "1", 1.0),
        ("min_p", "0", 0.0),
        ("repetition_penalty", "1", 1.0),
        ("max_tokens", "128", 128),
        ("max_tokens", "none", None),
    ],
)
def test_an_option_that_is_given_wins(
    command: str, name: str, text: str, value: object, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm._sampling_defaults = RECOMMENDED
    flag = "--" + name.replace("_", "-")
    params = asked(llm, command, flag, text, monkeypatch=monkeypatch)
    assert params == SamplingParams(**{**RECOMMENDED, name: value})


def test_the_demo_does_as_it_always_does(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm._sampling_defaults = RECOMMENDED
    assert asked(llm, "demo", monkeypatch=monkeypatch).is_greedy
    assert llm.asked[0][1] == SamplingParams(max_tokens=64, temperature=0.0)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("generate", {"temperature": "the model's, else 1.0", "max-tokens": "the model's, else 128"}),
        ("chat", {"temperature": "the model's, else 0.7", "max-tokens": "the model's, else none"}),
        ("demo", {"temperature": "0.0", "max-tokens": "64"}),
    ],
)
def test_the_help_tells_where_a_default_comes_from(
    command: str, words: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    for name, default in {**words, "presence-penalty": "0.0", "n": "1"}.items():
        (shown,) = re.findall(rf" --{name} [NX] [^(]*(?:\(or [^(]*)?\(default: ([^)]*)\)", text)
        assert shown == default
    assert "have their own" not in text


def test_min_tokens_may_be_more_than_a_limit_that_the_model_lifts(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm._sampling_defaults = dict(max_tokens=2048)
    params = asked(llm, "generate", "--min-tokens", "200", monkeypatch=monkeypatch)
    assert (params.min_tokens, params.max_tokens) == (200, 2048)
    llm._sampling_defaults = {}
    assert main(["generate", "x", "--min-tokens", "200"]) == 2
    assert "--min-tokens is 200, more than --max-tokens (128)" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_wrong_option_is_refused_before_a_model_is_loaded(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--model", "no/such/model", "--top-p", "2"]) == 2
    assert "error: --top-p is 2.0" in capsys.readouterr().err


def test_without_a_model_the_fallbacks_count() -> None:
    parser = argparse.ArgumentParser()
    add_sampling_options(parser, dict(max_tokens=3), follows_model=True)
    assert sampling_params(parser.parse_args([])) == SamplingParams(max_tokens=3)


def test_a_real_models_file_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = str(save_tiny_llama(tmp_path, make_tiny_llama()))
    edit_json(tmp_path / "generation_config.json", temperature=0.0, max_new_tokens=5)
    with LLM(directory, num_pages=16) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        expected = llm.generate("Hello", params, use_tqdm=False)[0].outputs[0].token_ids

    def generated(*options: str) -> list[int]:
        command = ["generate", "Hello", "--model", directory, "--num-pages", "16", "--ignore-eos", "--json"]
        assert main([*command, *options]) == 0
        tokens: list[int] = json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"]
        return tokens

    assert generated() == list(expected)
    assert generated("--max-tokens", "3") == list(expected[:3])
    assert len(generated("--generation-config", "none")) == 128
