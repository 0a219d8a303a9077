from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from tiny_vllm.cli.main import main
from tiny_vllm.config import Choice, EngineConfig
from tiny_vllm.engine import build
from tiny_vllm.engine.build import EnginePlan


def test_every_choice_is_shown_with_all_its_reasons(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [option.name for option in fields(EngineConfig)]
    choices = [Choice(name, None, f"why {name}") for name in names]
    plan_engine = build.plan_engine

    def plan_with_choices(config: EngineConfig) -> EnginePlan:
        plan = plan_engine(config)
        return replace(plan, choices=(*choices, Choice("num_pages", None, "not used on a CPU")))

    monkeypatch.setattr(build, "plan_engine", plan_with_choices)
    assert main(["info", "--load-format", "dummy", "--num-pages", "7"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.partition("options\n")[2].splitlines()]
    shown = {words[0]: " ".join(words[1:]) for words in lines if words}
    assert list(shown) == names
    for name in names:
        assert f"(why {name}" in shown[name]
    assert shown["num_pages"] == "7 (why num_pages; not used on a CPU)"


def test_parts_of_a_family_are_shown_in_short_and_absent_traits_not_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Gemma3ForCausalLM"]}')
    assert main(["info", "--model", str(tmp_path), "--load-format", "dummy", "--num-pages", "7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line.startswith("  ")}
    assert shown["sliding_rope"] == "theta 10000.0, rotary_dim 256"
    assert shown["sliding_window"] == "4096"
    assert not {"experts", "attention_softcap", "unrotated_layers"} & shown.keys()


def test_sampling_parameters_that_the_model_recommends_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Gemma3ForCausalLM"]}')
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}')
    command = ["info", str(tmp_path), "--load-format", "dummy", "--num-pages", "7"]
    for more, words in (
        ([], f"auto  (temperature 0.6, top_p 0.9 from {tmp_path / 'generation_config.json'})"),
        (["--generation-config", "none"], "none  (as asked: what requests leave out has OpenAI's defaults)"),
    ):
        assert main([*command, *more]) == 0
        lines = capsys.readouterr().out.splitlines()
        (line,) = (line for line in lines if line.split()[:1] == ["generation_config"])
        assert line.split(maxsplit=1)[1] == words
