from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.tiny_models import edit_json, make_tiny_llama, save_tiny_llama
from tiny_vllm.cli.main import main
from tiny_vllm.config import Choice, EngineConfig
from tiny_vllm.engine import build
from tiny_vllm.engine.available_memory import AvailableMemory
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


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_tiny_llama(tmp_path / "tiny", make_tiny_llama())


def quantise(directory: Path) -> None:
    edit_json(directory / "config.json", quantization_config={"quant_method": "awq"})


def store_eight_bits(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, directory / "model.safetensors")


def lose_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def name_an_unknown_architecture(directory: Path) -> None:
    edit_json(directory / "config.json", architectures=["NoSuchModelForCausalLM"])


def spoil_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")


def keep_sentencepiece_alone(directory: Path) -> None:
    (directory / "tokenizer.json").rename(directory / "tokenizer.model")


def recommend_nonsense(directory: Path) -> None:
    edit_json(directory / "generation_config.json", top_p=7)


def writes(name: str, text: str) -> Callable[[Path], None]:
    return lambda directory: void((directory / name).write_text(text))


def void(_: object) -> None:
    pass


SIDE_FILES = ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json")
BROKEN_SIDE_FILES = [
    *(writes(name, text) for name in SIDE_FILES for text in ("{", "[]", "5", "[" * 100_000)),
    *(writes("generation_config.json", text) for text in ('{"eos_token_id": "a"}', '{"top_k": []}')),
    *(
        writes("tokenizer_config.json", text)
        for text in (
            '{"eos_token": "<|im_end|>", "added_tokens_decoder": [1]}',
            '{"added_tokens_decoder": [1]}',
            '{"additional_special_tokens": 5}',
            '{"eos_token": "\\ud800"}',
            '{"chat_template": 5}',
        )
    ),
]


def leave_as_it_is(directory: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "options", "is_model_known"),
    [
        (quantise, [], False),
        (name_an_unknown_architecture, [], False),
        (store_eight_bits, [], True),
        (lose_weights, [], True),
        (spoil_tokenizer, [], True),
        (keep_sentencepiece_alone, [], True),
        (recommend_nonsense, [], True),
        *((change, [], True) for change in BROKEN_SIDE_FILES),
        (leave_as_it_is, ["--max-model-len", "512"], True),
        (leave_as_it_is, ["--num-pages", "1000000000"], True),
        (leave_as_it_is, ["--tokenizer", "/no/such/tokenizer"], True),
    ],
)
def test_what_loading_would_refuse_is_said_in_the_same_words(
    change: Callable[[Path], None],
    options: list[str],
    is_model_known: bool,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # What other programs leave differs between the two commands.
    monkeypatch.setattr(build, "available_memory", lambda: AvailableMemory(4 * 2**30))
    change(checkpoint)
    arguments = ["--model", str(checkpoint), "--num-pages", "9", *options]
    assert main(["info", *arguments]) == 1
    said = capsys.readouterr()
    assert main(["generate", "x", *arguments]) == 2
    assert said.err == capsys.readouterr().err
    assert said.err.startswith("error: ")
    assert said.out.startswith("machine\n  device  ")
    assert ("\nmodel\n" in said.out, "\nmemory\n" in said.out) == (is_model_known, is_model_known)


@pytest.mark.parametrize("name", SIDE_FILES)
def test_a_broken_file_of_text_hides_nothing_of_the_model_and_its_plan(
    name: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "available_memory", lambda: AvailableMemory(4 * 2**30))
    command = ["info", str(checkpoint), "--num-pages", "9", "--device", "cpu"]
    assert main(command) == 0
    expected = capsys.readouterr().out
    (checkpoint / name).write_text("[]")
    assert main(command) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"error: {checkpoint / name} holds a")
    missing = {line.split()[0] for line in set(expected.splitlines()) - set(said.out.splitlines())}
    # What depends on the file; free memory changes by itself.
    unknown = {"generation_config"} if name == "generation_config.json" else {"tokenizer", "chat"}
    assert missing - {"free_memory_bytes"} == unknown


def test_a_directory_without_weights_is_planned_by_its_config(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "available_memory", lambda: AvailableMemory(4 * 2**30))
    command = ["info", str(checkpoint), "--num-pages", "9"]

    def shown() -> list[str]:
        lines = capsys.readouterr().out.splitlines()
        return [line for line in lines if "free_memory_bytes" not in line]

    assert main(command) == 0
    with_weights = shown()
    assert {"machine", "model", "memory", "options"} <= set(with_weights)
    lose_weights(checkpoint)
    assert main(command) == 1
    assert shown() == with_weights


def test_a_model_that_is_too_large_for_this_machine_is_shown_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "available_memory", lambda: AvailableMemory(2**30))
    shape = Path(__file__).parents[2] / "benchmarks" / "shapes" / "qwen3-30b-a3b"
    command = ["info", str(shape), "--load-format", "dummy", "--device", "cpu", "--kv-cache-dtype", "fp8"]
    assert main(command) == 1
    said = capsys.readouterr()
    rows = {line[2:33].strip(): line[34:] for line in said.out.splitlines()}
    assert rows["parameters"] == "30,532,122,624" and rows["experts"].startswith("num_experts 128")
    assert rows["weights"] == "56.871 GiB"
    # 48 layers, 4 KV heads of 128, keys and values, and two bytes of scale for each head.
    assert rows["one page"] == f"{16 * 48 * 2 * 4 * 130 / 1024:.0f} KiB for 16 tokens over all layers"
    assert "page pool" not in rows and "options" not in said.out
    assert said.err.startswith("error: the weights need 56.87 GiB")


def test_a_wrong_option_is_still_a_wrong_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--page-size", "3"]) == 2
    assert "--page-size is 3" in capsys.readouterr().err


def shown_rows(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The rows of the section on the model."""
    section = capsys.readouterr().out.partition("\nmodel\n")[2].partition("\n\n")[0]
    return {line[2:33].strip(): line[34:] for line in section.splitlines()}


def test_no_terminal_obeys_the_names_of_files(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = checkpoint.rename(checkpoint.with_name("tiny\x1b[31m\x07\nname"))
    command = ["info", str(directory), "--num-pages", "9"]
    assert main(command) == 0
    assert shown_rows(capsys)["name"] == r"tiny\x1b[31m\x07\nname"
    (directory / "generation_config.json").write_text('{"temperature": 0.5}')
    assert main(command) == 0
    assert "\x1b" not in capsys.readouterr().out
    (directory / "generation_config.json").write_text('{"temperature": -1}')
    for name in ("info", "generate"):
        assert main([name, "--model", str(directory), "--num-pages", "9", *(["Hi"] * (name == "generate"))])
        told = capsys.readouterr()
        assert not {"\x1b", "\x07"} & {*told.out, *told.err}
        assert r"tiny\x1b[31m\x07" in told.err and "\nhint: " in told.err


def test_ids_that_the_model_does_not_have_are_told(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["info", str(checkpoint), "--num-pages", "9", "--load-format", "dummy"]
    assert main(command) == 0
    assert "end of text" not in shown_rows(capsys)
    edit_json(checkpoint / "config.json", eos_token_id=384)
    assert main(command) == 0
    assert shown_rows(capsys)["end of text"].startswith("384 is beyond the model's ids (0 to 383)")
    edit_json(checkpoint / "config.json", vocab_size=300, eos_token_id=None)
    assert main(command) == 0
    rows = shown_rows(capsys)
    assert rows["tokenizer"] == "320 ids, more than the model's 300: prompts with the others are refused"


def test_the_tokenizer_and_its_template_are_shown(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["info", str(checkpoint), "--num-pages", "9"]
    assert main(command) == 0
    rows = shown_rows(capsys)
    assert (rows["tokenizer"], rows["chat template"]) == ("320 ids", "yes")
    edit_json(checkpoint / "tokenizer_config.json", chat_template="{% for %}")
    assert main(command) == 0
    assert shown_rows(capsys)["chat template"].startswith(
        "this model's chat template is not valid Jinja: line 1"
    )
    edit_json(checkpoint / "tokenizer_config.json", chat_template=None)
    assert main(command) == 0
    assert shown_rows(capsys)["chat template"] == "none: no conversations"
    (checkpoint / "tokenizer.json").unlink()
    assert main(command) == 0
    rows = shown_rows(capsys)
    assert rows["tokenizer"] == "none: prompts are token ids" and "chat template" not in rows
