from __future__ import annotations

import argparse
import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from tiny_vllm.cli.main import main
from tiny_vllm.cli.options import (
    add_engine_options,
    add_model_argument,
    add_sampling_options,
    engine_config,
    sampling_params,
    spelt_as_options,
)
from tiny_vllm.config import OPTION_KINDS, EngineConfig
from tiny_vllm.errors import ConfigError, RequestError
from tiny_vllm.types import SamplingParams


def engine(*arguments: str, **defaults: object) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_options(parser, defaults)
    return engine_config(parser.parse_args(arguments))


def sampling(*arguments: str, **defaults: object) -> SamplingParams:
    parser = argparse.ArgumentParser()
    add_sampling_options(parser, defaults)
    return sampling_params(parser.parse_args(arguments))


def test_no_arguments_give_the_defaults_of_both_classes() -> None:
    assert engine() == EngineConfig()
    assert sampling() == SamplingParams()


@pytest.mark.parametrize("arguments", [("a/b",), ("--model", "a/b"), ("--num-pages", "7", "a/b")])
def test_the_model_may_be_named_without_its_option(arguments: tuple[str, ...]) -> None:
    parser = argparse.ArgumentParser()
    add_model_argument(parser)
    add_engine_options(parser)
    assert engine_config(parser.parse_args(arguments)).model == "a/b"
    with pytest.raises(ConfigError, match="the model is given twice"):
        engine_config(parser.parse_args(["a", "--model", "b"]))


@pytest.mark.parametrize("command", ["info", "chat", "serve"])
def test_commands_that_take_no_other_argument_take_the_model(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # `info` has found out what it was asked: that this would be refused.
    assert main([command, "no/such/model"]) == (1 if command == "info" else 2)
    assert "error: there is no model at 'no/such/model'" in capsys.readouterr().err


ENGINE_CASES = {
    "model": ("some/dir", "some/dir"),
    "tokenizer": ("t.json", "t.json"),
    "load_format": ("dummy", "dummy"),
    "generation_config": ("none", "none"),
    "dtype": ("float32", "float32"),
    "kv_cache_dtype": ("fp8", "fp8"),
    "device": ("cpu", "cpu"),
    "seed": ("7", 7),
    "max_model_len": ("64", 64),
    "max_num_seqs": ("3", 3),
    "max_num_batched_tokens": ("99", 99),
    "gpu_memory_utilization": ("0.5", 0.5),
    "kv_cache_memory_bytes": ("1000000", 1000000),
    "page_size": ("32", 32),
    "mean_sequence_len": ("100", 100),
    "num_pages": ("12", 12),
    "prefill_policy": ("exclusive", "exclusive"),
    "max_prefill_tokens_per_decode": ("64", 64),
    "ageing_seconds": ("2.5", 2.5),
    "max_queue_len": ("8", 8),
    "max_logprobs": ("-1", -1),
    "max_n": ("4", 4),
    "pool_sizing": ("memory", "memory"),
}


@pytest.mark.parametrize("name", [option.name for option in fields(EngineConfig)])
def test_every_engine_option_arrives(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    if OPTION_KINDS[str(EngineConfig.__dataclass_fields__[name].type)].type is bool:
        assert getattr(engine(flag), name) is True
        assert getattr(engine(flag.replace("--", "--no-", 1)), name) is False
    else:
        text, value = ENGINE_CASES[name]
        needed = ["--pool-sizing=formula"] if name == "mean_sequence_len" else []
        assert getattr(engine(f"{flag}={text}", *needed), name) == value


def test_the_word_none_clears_an_optional_value() -> None:
    assert engine("--num-pages", "none", num_pages=128).num_pages is None
    assert sampling("--max-tokens", "none").max_tokens is None


SAMPLING_CASES = {
    "n": (["--n", "3"], 3),
    "max_tokens": (["--max-tokens", "5"], 5),
    "min_tokens": (["--min-tokens", "2"], 2),
    "temperature": (["--temperature", "0.5"], 0.5),
    "top_p": (["--top-p", "0.9"], 0.9),
    "top_k": (["--top-k", "-1"], -1),
    "min_p": (["--min-p", "0.1"], 0.1),
    "presence_penalty": (["--presence-penalty", "-1.5"], -1.5),
    "frequency_penalty": (["--frequency-penalty", "1"], 1.0),
    "repetition_penalty": (["--repetition-penalty", "1.1"], 1.1),
    "stop": (["--stop", "a b", "--stop", ","], ("a b", ",")),
    "stop_token_ids": (["--stop-token-ids", "1,2"], (1, 2)),
    "include_stop_str_in_output": (["--include-stop-str-in-output"], True),
    "ignore_eos": (["--ignore-eos"], True),
    "bad_words": (["--bad-words", "no", "--bad-words", "never"], ("no", "never")),
    "allowed_token_ids": (["--allowed-token-ids", "4"], (4,)),
    "logit_bias": (["--logit-bias", "4=-100", "--logit-bias", "5=1.5"], {4: -100.0, 5: 1.5}),
    "logprobs": (["--logprobs", "2"], 2),
    "prompt_logprobs": (["--prompt-logprobs", "0"], 0),
    "detokenize": (["--no-detokenize"], False),
    "skip_special_tokens": (["--no-skip-special-tokens"], False),
}


@pytest.mark.parametrize("name", [option.name for option in fields(SamplingParams) if option.name != "seed"])
def test_every_sampling_option_arrives(name: str) -> None:
    arguments, value = SAMPLING_CASES[name]
    assert getattr(sampling(*arguments), name) == value


def test_a_command_can_have_defaults_of_its_own() -> None:
    assert sampling(max_tokens=128).max_tokens == 128
    assert sampling("--max-tokens", "3", max_tokens=128).max_tokens == 3


def test_limits_are_those_of_the_classes() -> None:
    with pytest.raises(ConfigError, match="page_size is 24"):
        engine("--page-size", "24")
    with pytest.raises(RequestError, match=r"top_p is 1\.5"):
        sampling("--top-p", "1.5")


def test_an_unreadable_value_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        engine("--num-pages", "many")
    assert exit_.value.code == 2
    assert "--num-pages: invalid int value: 'many'" in capsys.readouterr().err


def test_every_option_has_a_help_text() -> None:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    add_sampling_options(parser)
    for action in parser._actions:
        assert action.help and not action.help.startswith("("), action.option_strings
    parser.format_help()


def test_errors_name_options_as_they_are_typed() -> None:
    names = ["max_n", "load_format", "weight_tape", "seed", "page_size"]
    text = "max_n is 5 (not my_max_n or 'max_n'); use load_format='dummy', weight_tape=False or a seed"
    assert spelt_as_options(text, names) == (
        "--max-n is 5 (not my_max_n or 'max_n'); use --load-format dummy, --no-weight-tape or a seed"
    )
    assert spelt_as_options("weight_tape=True; /a/page_size/b", names) == "--weight-tape; /a/page_size/b"
    assert spelt_as_options(text, ["max_tokens"]) == text


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("use device='cpu' or device='auto'", "use --device cpu or --device auto"),
        ("a smaller model, or dtype='bfloat16' (half)", "a smaller model, or --dtype bfloat16 (half)"),
        ("pass tokenizer=", "pass --tokenizer"),
        ("without model= the bundled model is used", "without --model the bundled model is used"),
        ("stop strings need detokenize=True", "stop strings need --detokenize"),
        ("n is 5, but n may be 3", "--n is 5, but n may be 3"),
        ("stop has 70 entries, and seed is a word", "--stop has 70 entries, and seed is a word"),
        ("the model is a model", "the model is a model"),
        ("/a/model=b 'model=b' other_model=b", "/a/model=b 'model=b' other_model=b"),
    ],
)
def test_words_that_are_options_are_told_by_their_place(text: str, typed: str) -> None:
    names = ["device", "dtype", "tokenizer", "model", "detokenize", "n", "stop", "seed"]
    assert spelt_as_options(text, names) == typed
    assert spelt_as_options(text, []) == text


def python_spellings() -> set[str]:
    """Every text of the package's errors that holds `name=` of an option."""
    found = set()
    names = {option.name for option in (*fields(EngineConfig), *fields(SamplingParams))}
    for path in (Path(__file__).parents[2] / "tiny_vllm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise):
                constants = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                texts = [text for text in constants if isinstance(text, str)]
                found |= {text for text in texts if re.search(rf"\b({'|'.join(names)})=", text)}
    return found


def test_no_message_keeps_pythons_spelling() -> None:
    names = [option.name for option in (*fields(EngineConfig), *fields(SamplingParams))]
    texts = python_spellings()
    assert len(texts) > 10
    for text in texts:
        typed = spelt_as_options(text, names)
        assert not re.search(rf"(?<!-)\b({'|'.join(names)})=", typed), typed
        assert not re.search(r"--[\w-]+ \w+ or '", typed), typed
