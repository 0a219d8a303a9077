from __future__ import annotations

from dataclasses import fields, replace

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
