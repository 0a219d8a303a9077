from __future__ import annotations

import gc
import importlib.util
import json
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.fakes import SPEC
from tests.cli.test_bench_decode import CONFIG, LIMIT
from tiny_vllm.cli import bench_rows, bench_throughput
from tiny_vllm.cli.bench_load import STEP_COLUMNS, run_load
from tiny_vllm.cli.bench_throughput import workload_bytes
from tiny_vllm.cli.bench_workloads import make_workload
from tiny_vllm.cli.machine import step_bytes
from tiny_vllm.cli.main import main
from tiny_vllm.engine.engine import Engine
from tiny_vllm.llm import LLM

ALL_AT_ONCE = {"measure": "generate all", "prefix_caching": True, "cached_share": 0}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A directory with nothing but a tiny configuration; the read limit is not measured."""
    monkeypatch.setattr(bench_rows, "measure_read_limit", lambda device: LIMIT)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 2048}))
    return str(folder)


def bench(model: str, arguments: str) -> int:
    start = ["bench", "throughput", "--model", model, "--load-format", "dummy", "--device", "cpu"]
    return main([*start, "--max-num-batched-tokens", "2048", *shlex.split(arguments)])


def rows_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return rows


def test_workloads_through_generate_get_a_line_each(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(model, "--workload nano-vllm,5x8+3 --num-prompts 2 --num-iters 3 --json -") == 0
    nano, shape = rows_of(capsys)
    assert nano.items() >= {**ALL_AT_ONCE, "workload": "nano-vllm", "num_prompts": 2}.items()
    assert shape.items() >= {**ALL_AT_ONCE, "workload": "2x8+3", "prompt_tokens": 16}.items()
    for row in (nano, shape):
        assert row["output_tokens_per_s"] * row["seconds"] == pytest.approx(row["output_tokens"])
        assert row["prompt_tokens_per_s"] * row["seconds"] == pytest.approx(row["prompt_tokens"])
        assert sorted(row["seconds_of_rounds"])[1] == pytest.approx(row["seconds"], abs=1e-4)
        assert 0 < row["first_token_p50_ms"] <= row["end_to_end_p50_ms"] <= row["end_to_end_max_ms"]
        assert row["share"] == pytest.approx(row["gb_per_s"] * 1e9 / LIMIT.bytes_per_second)


class Calls:
    """What LLM.generate was asked for: the number of prompts and the salt of each call. Every call takes a
    hundredth of a second more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, str]] = []
        generate = LLM.generate

        def note(llm: LLM, prompts: list[Any], *args: Any, cache_salt: str, **options: Any) -> Any:
            self.seen.append((len(prompts), cache_salt))
            time.sleep(0.01)
            return generate(llm, prompts, *args, cache_salt=cache_salt, **options)

        monkeypatch.setattr(LLM, "generate", note)


def test_rounds_before_the_clock_runs_are_whole_and_share_nothing_with_those_timed(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = Calls(monkeypatch)
    arguments = "--workload shared-prefix --num-prompts 4 --num-warmup 2 --num-iters 2 --json -"
    assert bench(model, arguments) == 0
    cached, plain, _ = rows_of(capsys)
    # One request alone, two rounds of warm-up, two that are timed; then again without the cache.
    assert [count for count, _ in calls.seen] == [1, 4, 4, 4, 4] * 2
    assert len({salt for _, salt in calls.seen[:5]}) == 5
    assert cached["cached_share"] == pytest.approx(3 * 57 * 16 / 4096)
    for row in (cached, plain):
        assert row["seconds_of_warmup"] >= 0.03 and len(row["seconds_of_rounds"]) == 2


def test_a_cpu_is_warmed_up_by_one_request(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = Calls(monkeypatch)
    assert bench(model, "--workload 3x8+2 --json -") == 0
    report = json.loads(capsys.readouterr().out)
    assert [count for count, _ in calls.seen] == [1, 3]
    assert report["options"]["num_warmup"] == 0
    assert report["rows"][0]["seconds_of_warmup"] >= 0.01


def test_every_rate_is_warmed_up_by_its_own_arrivals(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    salts: list[tuple[str, float]] = []

    def note(engine: Any, items: Any, *, temperature: float, salt: str) -> Any:
        salts.append((salt, items[-1].arrival))
        return run_load(engine, items, temperature=temperature, salt=salt)

    monkeypatch.setattr(bench_throughput, "run_load", note)
    arguments = "--workload 3x8+3 --request-rate 50,inf --num-warmup 1 --num-iters 2 --json -"
    assert bench(model, arguments) == 0
    rows = rows_of(capsys)
    _, at_50, *timed_at_50, at_once, _, _ = salts
    assert len({salt for salt, _ in salts}) == 7
    assert at_50[1] > 0 and {arrival for _, arrival in timed_at_50} == {at_50[1]} and at_once[1] == 0
    # The arrivals of the slow rate take that long in the warm-up, too.
    assert rows[0]["seconds_of_warmup"] == rows[1]["seconds_of_warmup"] > at_50[1]
    assert rows[2]["seconds_of_warmup"] == rows[3]["seconds_of_warmup"] > 0


@pytest.mark.gpu
def test_a_gpu_is_warmed_up_by_a_whole_round(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    calls = Calls(monkeypatch)
    assert bench(model, "--workload 3x8+2 --device cuda --json -") == 0
    assert json.loads(capsys.readouterr().out)["options"]["num_warmup"] == 1
    assert [count for count, _ in calls.seen] == [1, 3, 3]


@pytest.mark.parametrize("path", ["", "--request-rate inf"])
def test_a_line_says_how_long_garbage_was_collected(
    path: str, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Engine.step

    def step_and_collect(engine: Engine) -> Any:
        gc.collect()
        return step(engine)

    monkeypatch.setattr(Engine, "step", step_and_collect)
    assert bench(model, f"--workload 1x8+3 {path} --json -") == 0
    (row,) = rows_of(capsys)
    # Three collections, all alike: none takes all of the time.
    assert 0 < row["gc_longest_ms"] < row["gc_seconds"] * 1e3 < row["seconds"] * 1e3


def test_the_report_names_machine_command_and_options(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    assert bench(model, f"--workload 2x8+3 --request-rate 100,inf --json {path}") == 0
    report = json.loads(path.read_text())
    assert report["machine"]["device"] == "cpu" and report["command"].startswith("tiny-vllm")
    assert report["options"]["request_rate"] == [100.0, "inf"]
    assert report["engine"]["max_num_batched_tokens"] == 2048
    assert "output tokens per s" in capsys.readouterr().out


def test_a_shared_prefix_is_measured_with_and_without_the_cache(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(model, "--workload shared-prefix,2x8+3 --num-prompts 4 --json -") == 0
    cached, shape, plain, comparison = rows_of(capsys)
    # Three of four prompts find the 57 full pages of their common 921 tokens.
    assert cached["cached_share"] == pytest.approx(3 * 57 * 16 / 4096)
    assert (plain["workload"], plain["cached_share"], plain["prefix_caching"]) == ("shared-prefix", 0, False)
    assert shape["workload"] == "4x8+3"
    assert comparison["speedup"] == pytest.approx(plain["seconds"] / cached["seconds"])


def test_caching_that_is_off_stays_off(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(model, "--workload shared-prefix --num-prompts 2 --no-enable-prefix-caching --json -") == 0
    (row,) = rows_of(capsys)
    assert (row["prefix_caching"], row["cached_share"]) == (False, 0)


def test_arrivals_have_latencies_and_steps(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--workload sharegpt-like --num-prompts 3 --request-rate 50,inf --keep-steps --json -"
    assert bench(model, arguments) == 0
    rows = rows_of(capsys)
    assert [row["request_rate"] for row in rows] == [50, "inf"]
    for row in rows:
        for name in ("first_token", "inter_token", "end_to_end"):
            values = [row[f"{name}_{share}_ms"] for share in ("p50", "p95", "p99", "max")]
            assert values == sorted(values) and values[0] > 0
        assert sum(row["steps"]["num_tokens"]) == row["output_tokens"]
        assert len(row["steps"]["end_s"]) == row["num_steps"]


def test_a_shared_prefix_also_helps_those_who_arrive(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(model, "--workload shared-prefix --num-prompts 3 --request-rate inf --json -") == 0
    cached, plain, comparison = rows_of(capsys)
    assert cached["cached_share"] == pytest.approx(2 * 57 * 16 / 3072)
    assert plain["cached_share"] == 0
    assert comparison["speedup"] == pytest.approx(plain["seconds"] / cached["seconds"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--workload nano", "the workload is 'nano'"),
        ("--workload 2x8+3,", "the workload is ''"),
        ("--num-prompts 0", "--num-prompts is 0"),
        ("--num-iters 0", "--num-iters is 0"),
        ("--num-warmup -1", "--num-warmup is -1, but must be at least 0"),
        ("--workload 1x2000+100", "1x2000+100 has 2100 tokens, more than --max-model-len (2048)"),
        ("--keep-steps", "--keep-steps needs --request-rate"),
        ("--plot x.png", "--plot needs --request-rate"),
        ("--request-rate 1 --plot x.pdf", "x.pdf does not end in .png"),
        ("--request-rate 1 --plot /no/such/place/x.png", "/no/such/place/x.png cannot be written"),
        ("--json /no/such/place/x.json", "/no/such/place/x.json cannot be written"),
    ],
)
def test_what_cannot_run_is_refused(
    arguments: str, message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(model, arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "x", "1,,2"])
def test_a_rate_is_positive(rate: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench(model, f"--request-rate {rate}")
    assert "list of positive rates" in capsys.readouterr().err


def test_without_matplotlib_the_plot_is_refused_at_once(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert bench(model, "--request-rate 1 --plot x.png") == 2
    assert "matplotlib is not installed" in capsys.readouterr().err


def test_the_plot_of_a_run_and_of_its_report_are_the_same_picture(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    report, now, later = tmp_path / "r.json", tmp_path / "now.png", tmp_path / "later.png"
    arguments = f"--workload 3x8+3 --request-rate 99,inf --keep-steps --plot {now} --json {report}"
    assert bench(model, arguments) == 0
    assert main(["bench", "plot", str(report), str(later)]) == 0
    assert now.read_bytes().startswith(b"\x89PNG") and now.read_bytes() == later.read_bytes()


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("seconds", None),
        ("num_running", []),
        ("num_waiting", [0, "x"]),
        ("num_used_pages", [[1], 2]),
        ("end_s", [0, None]),
        ("end_s", {"0": 1, "1": 2}),
        ("seconds", [1, 10**400]),
        ("seconds", [1, float("nan")]),
    ],
)
def test_a_report_whose_steps_are_no_numbers_is_not_drawn(
    column: str, values: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    steps = {**{name: [1, 2] for name in STEP_COLUMNS}, column: values}
    row = {"workload": "1x1+1", "request_rate": 1, "prefix_caching": True, "steps": steps}
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"rows": [row]}))
    assert main(["bench", "plot", str(report), str(tmp_path / "picture.png")]) == 2
    message, hint = capsys.readouterr().err.splitlines()
    assert message.startswith(f"error: {report} is no report: ") and column in message
    assert hint == "hint: measure with --request-rate and --keep-steps"


@pytest.mark.parametrize(
    ("text", "message"),
    [("no json", "is no report"), ("[]", "is no report"), ('{"rows": [{}]}', "has no steps")],
)
def test_a_report_without_steps_is_not_drawn(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    assert main(["bench", "plot", str(path), str(tmp_path / "x.png")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["folder.png", "full.png"])
def test_a_picture_that_cannot_be_written_is_one_error(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "full.png").symlink_to("/dev/full")
    row = {"workload": "1x1+1", "request_rate": 1, "prefix_caching": True}
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"rows": [{**row, "steps": {name: [1, 2] for name in STEP_COLUMNS}}]}))
    assert main(["bench", "plot", str(report), str(tmp_path / name)]) == 2
    message, hint = capsys.readouterr().err.splitlines()
    assert message.startswith(f"error: {tmp_path / name} cannot be written: ")
    assert hint == "hint: name another file for the picture"


def test_a_workload_reads_the_weights_once_a_step_and_every_context_once() -> None:
    one = make_workload("4x10+6", 100)
    # Four together in six steps, at contexts 11 to 16; two at a time need twice the steps.
    assert workload_bytes(SPEC, "bfloat16", one, 4) == 6 * step_bytes(SPEC, "bfloat16", 4, 13.5)
    assert workload_bytes(SPEC, "bfloat16", one, 2) == 12 * step_bytes(SPEC, "bfloat16", 2, 13.5)
