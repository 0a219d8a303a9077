"""The commands with the real model: what a newcomer meets first."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from tiny_vllm import LLM, SamplingParams
from tiny_vllm.cli import bench_report, session
from tiny_vllm.cli.main import main
from tiny_vllm.config import DTYPE_BYTES
from tiny_vllm.engine.available_memory import AvailableMemory

ROOT = Path(__file__).parents[2]


@pytest.fixture
def llm(bundled_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    def open_bundled(args: argparse.Namespace) -> nullcontext[LLM]:
        return nullcontext(bundled_llm)

    monkeypatch.setattr(session, "open_llm", open_bundled)
    return bundled_llm


def test_generate_prints_what_the_offline_api_generates(llm: LLM) -> None:
    prompt = "The capital of France is"
    expected = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text
    command = [
        sys.executable,
        "-m",
        "tiny_vllm",
        "generate",
        prompt,
        "--temperature",
        "0",
        "--max-tokens",
        "8",
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == expected + "\n"
    assert run.stderr == ""


def test_json_and_text_agree(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "One, two,", "Red, green,", "--temperature", "0", "--max-tokens", "4"]
    main(arguments)
    text = capsys.readouterr().out
    main([*arguments, "--json", "--logprobs", "1"])
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "".join(record["outputs"][0]["text"] + "\n" for record in records) == text
    for record in records:
        choice = record["outputs"][0]
        assert len(choice["token_ids"]) == len(choice["logprobs"]) == 4
        assert choice["finish_reason"] == "length"
        assert record["metrics"]["num_generated_tokens"] == 4


def test_the_second_turn_of_a_chat_reuses_the_pages_of_the_first(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    question = "Name three colours that can be seen in a rainbow, and say which of them is the warmest one."
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{question}\nWhy?\n"))
    before = llm.stats().prefix_hit_tokens
    assert main(["chat", "--temperature", "0", "--max-tokens", "8", "--stats"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.split()) > 2
    assert captured.err.count("8 tokens, ") == 2
    assert llm.stats().prefix_hit_tokens >= before + 2 * llm.config.page_size


def test_the_demo_shows_shared_pages_in_the_middle_and_cached_ones_at_the_end(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--max-tokens", "8"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    midway, afterwards = out.split("The page pool while they run:")[1].split("The page pool afterwards:")
    assert "# shared" in midway
    assert "o in use" in midway
    assert "# shared" not in afterwards
    assert "+ cached" in afterwards
    stats = llm.stats()
    assert (stats.num_used_pages, stats.num_running, stats.num_waiting) == (0, 0, 0)


def test_bench_measures_the_real_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A measured limit depends on who else reads memory at that moment.
    monkeypatch.setattr(bench_report, "measure_read_bandwidth", lambda device: 1e15)
    workload = ["--input-len", "8", "--output-len", "4", "--num-iters", "1"]
    assert main(["bench", "latency", *workload, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    # Every parameter once, and keys and values of 30 layers, 3 heads of 64, and 8 to 13 tokens.
    values = 134_515_008 + 10.5 * 2 * 30 * 3 * 64
    assert report["limit"]["bytes_per_token"] == values * DTYPE_BYTES[llm.config.dtype]
    rate = report["results"]["decode_tokens_per_second"]
    assert report["limit"]["share"] == pytest.approx(rate * report["limit"]["bytes_per_token"] / 1e15)
    assert 0 < report["limit"]["share"] < 1
    assert report["results"]["time_to_first_token_ms"]["mean"] > 0


@pytest.mark.parametrize(
    ("has_bf16", "reason"),
    [
        (True, "bfloat16  (the checkpoint's own type)"),
        (False, "float32  (prompts are faster: this CPU has no BF16 instructions)"),
    ],
)
def test_info_explains_its_choices_without_loading_weights(
    has_bf16: bool, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tiny_vllm.engine.build.load_weights", None)
    monkeypatch.setattr("tiny_vllm.engine.build._has_bf16_instructions", lambda: has_bf16)
    memory = AvailableMemory(4 << 30)
    monkeypatch.setattr("tiny_vllm.engine.build.available_memory", lambda: memory)
    assert main(["info", "--num-pages", "100", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "SmolLM2-135M-Instruct" in out
    assert "100 pages" in out
    assert reason in out


def test_a_prompt_beyond_the_context_is_refused(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "word " * 9000]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert "8192" in captured.err


def test_a_prompt_that_is_not_unicode_is_refused(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "\udcff"]) == 2
    error = capsys.readouterr().err
    assert "text is not valid Unicode: U+DCFF at position 0 is a lone surrogate\nhint: " in error
    assert "a byte that is not UTF-8" in error
    assert "half of a \\u escape pair" in error
