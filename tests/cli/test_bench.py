from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.fakes import SPEC, FakeLLM
from tiny_vllm.cli import bench_report
from tiny_vllm.cli.machine import measure_read_bandwidth, step_bytes
from tiny_vllm.cli.main import main
from tiny_vllm.models.spec import ExpertsSpec

SMALL = ("--input-len", "8", "--output-len", "3")


@pytest.fixture(autouse=True)
def bandwidth(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(bench_report, "measure_read_bandwidth", lambda device: 1e9)
    return 1e9


def test_latency_reports_the_share_of_the_memory_limit(
    llm: FakeLLM, bandwidth: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "latency", *SMALL, "--num-iters", "2", "--json", "-"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    # The fake's tokens are half a second apart; keys and values of 8 prompt and 2 generated tokens are read.
    rate = report["results"]["decode_tokens_per_second"]
    assert rate == pytest.approx(2.0)
    num_bytes = 2 * (SPEC.num_parameters + 10 * SPEC.kv_values_per_token)
    assert report["limit"]["bytes_per_token"] == num_bytes
    assert report["limit"]["share"] == pytest.approx(rate * num_bytes / bandwidth)
    assert report["results"]["time_to_first_token_ms"]["p50"] == pytest.approx(500)
    assert report["engine"]["dtype"] == "bfloat16"
    assert "share of the memory limit" in captured.err


def test_no_run_finds_the_prefix_of_another(llm: FakeLLM) -> None:
    main(["bench", "latency", *SMALL, "--num-iters", "3"])
    prompts = {tuple(prompt) for prompt, _ in llm.asked}
    assert len(prompts) == 4
    assert all(len(prompt) == 8 and max(prompt) < SPEC.vocab_size for prompt in prompts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["latency", "--input-len", "0"], "--input-len is 0"),
        (["latency", "--batch-size", "0"], "--batch-size is 0"),
        (["latency", "--input-len", "250", "--output-len", "7"], "--input-len + --output-len is 257"),
        (["latency", "--json", "/no/such/place/x.json"], "/no/such/place/x.json cannot be written"),
    ],
)
def test_impossible_workloads_are_refused(
    arguments: list[str], message: str, llm: FakeLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert llm.asked == []


def test_a_report_that_cannot_be_written_is_told_without_blame(
    llm: FakeLLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "latency", *SMALL, "--num-iters", "1", "--json", str(tmp_path)]) == 2
    message, hint = capsys.readouterr().err.splitlines()
    assert message == f"error: {tmp_path} cannot be written: Is a directory"
    assert hint.startswith("hint: ")


def test_an_untied_embedding_is_not_read_as_a_whole() -> None:
    untied = replace(SPEC, tie_word_embeddings=False)
    assert step_bytes(untied, "bfloat16", 1, 0) == step_bytes(SPEC, "bfloat16", 1, 0)
    assert step_bytes(SPEC, "float32", 1, 0) == 4 * SPEC.num_parameters


def test_layers_with_a_window_read_no_more_than_that() -> None:
    windowed = replace(SPEC, sliding_window=8, sliding_layers=(1,))
    assert step_bytes(windowed, "bfloat16", 3, 5) == step_bytes(SPEC, "bfloat16", 3, 5)
    saved = 2 * 3 * (20 - 8) * 2 * SPEC.kv_size
    assert step_bytes(windowed, "bfloat16", 3, 20) == step_bytes(SPEC, "bfloat16", 3, 20) - saved


def test_keys_and_values_in_fp8_are_read_with_their_scales() -> None:
    rows = 3 * 20 * 2 * SPEC.num_kv_heads * SPEC.num_layers
    weights = step_bytes(SPEC, "bfloat16", 3, 0)
    assert step_bytes(SPEC, "bfloat16", 3, 20, kv_cache_dtype="fp8") == weights + rows * (SPEC.head_dim + 2)


def test_experts_that_no_sequence_can_pick_are_not_read() -> None:
    experts = ExpertsSpec(num_experts=8, num_active=2, intermediate_size=32, dense_layers=(0,))
    mixed = replace(SPEC, experts=experts)
    one_expert = 2 * 3 * SPEC.hidden_size * 32
    everything = 2 * mixed.num_parameters
    assert step_bytes(mixed, "bfloat16", 1, 0) == everything - 6 * one_expert
    assert step_bytes(mixed, "bfloat16", 3, 0) == everything - 2 * one_expert
    assert step_bytes(mixed, "bfloat16", 100, 0) == everything


def test_bandwidth_is_positive() -> None:
    assert measure_read_bandwidth("cpu", num_bytes=1 << 20, repeats=1) > 0
