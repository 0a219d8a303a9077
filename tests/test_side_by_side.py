"""benchmarks/side_by_side.py from end to end, with a tiny model and a peer that only pretends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.side_by_side import ratios, throughput_ratios
from tests.cli.test_bench_decode import CONFIG

ROOT = Path(__file__).parents[1]
# Every token of a batch takes ten milliseconds for each of its sequences, on a clock that knows nothing else:
# on a busy machine a sleep takes longer than asked.
PRETENDED_VLLM = """
import json, time
from types import SimpleNamespace
now = time.perf_counter()
time.perf_counter = lambda: now
__version__ = "0.0.pretended"
print("noise that is no JSON", flush=True)
print(json.dumps(["noise", "that is"]), flush=True)
class SamplingParams:
    def __init__(self, **options): self.max_tokens = options["max_tokens"]
class LLM:
    def __init__(self, **options):
        assert options["load_format"] == "dummy" and not options["enable_prefix_caching"]
    def generate(self, prompts, params, use_tqdm):
        if FAILS_AT == len(prompts): raise ValueError("no room")
        counts = [one.max_tokens for one in params]
        assert len(counts) == len(prompts)
        print(f"{len(counts)} of {max(counts)} tokens", flush=True)
        global now
        now += 0.01 * sum(counts)
        time.sleep(0.01 * sum(counts))
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * count)]) for count in counts]
"""


def compare(tmp_path: Path, *options: str, fails_at: int = 0) -> tuple[int, dict[str, Any], str]:
    peer = tmp_path / "peer"
    peer.mkdir()
    source = PRETENDED_VLLM.replace("FAILS_AT", str(fails_at))
    (peer / "vllm.py").write_text(source)
    (peer / "install.sh").write_text('set -e\nmkdir "$1"\ncp "$(dirname "$0")/vllm.py" "$1"\n"$PYTHON" -V\n')
    report = tmp_path / "results" / "report.json"
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "benchmarks/side_by_side.py", "--peer", str(peer), "--model", str(tmp_path)]
    command += ["--json", str(report), "--batch-sizes", "1,3", "--input-lens", "8", "--output-len", "6"]
    command += ["--num-iters", "1", "--options", "--device cpu --max-model-len 64", *options]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    content: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
    return run.returncode, content, run.stdout + run.stderr


@pytest.mark.slow
def test_both_engines_and_their_ratio_end_in_one_file(tmp_path: Path) -> None:
    code, report, output = compare(tmp_path)
    assert code == 0, output
    assert report["vllm"]["rows"][0]["version"] == "0.0.pretended"
    assert report["vllm"]["seconds_to_install"] > 0
    assert report["tiny_vllm"]["machine"]["device"] == "cpu"
    assert [(row["input_len"], row["batch_size"]) for row in report["ratios"]] == [(8, 1), (8, 3)]
    for row in report["ratios"]:
        assert row["vllm_us_per_step"] == pytest.approx(10_000 * row["batch_size"])
        assert row["speedup"] == pytest.approx(row["vllm_us_per_step"] / row["us_per_step"])
    assert "prompt 8, batch 3:" in output


@pytest.mark.slow
def test_workloads_are_compared_by_the_time_they_take(tmp_path: Path) -> None:
    options = ["--batch-sizes", "", "--workloads", "3x8+5,2x16+1,2x8+9"]
    code, report, output = compare(tmp_path, *options, fails_at=0)
    assert code == 0, output
    assert report["tiny_vllm"] == {} and report["ratios"] == []
    assert [row["workload"] for row in report["throughput_ratios"]] == ["3x8+5", "2x16+1", "2x8+9"]
    ours, theirs = report["tiny_vllm_throughput"]["rows"], report["vllm"]["rows"][1:]
    for row, mine, peer in zip(report["throughput_ratios"], ours, theirs, strict=True):
        assert row["speedup"] == pytest.approx(peer["seconds"] / mine["seconds"])
        assert row["vllm_output_tokens_per_s"] == pytest.approx(100)
        assert mine["output_tokens"] == peer["output_tokens"]
    assert "2x16+1: " in output


@pytest.mark.slow
@pytest.mark.parametrize(("options", "num_warmup"), [((), 1), (("--num-warmup", "2"), 2)])
def test_both_are_warmed_up_by_as_many_rounds(
    options: tuple[str, ...], num_warmup: int, tmp_path: Path
) -> None:
    code, report, output = compare(tmp_path, "--batch-sizes", "3", "--workloads", "2x16+7", *options)
    assert code == 0, output
    assert report["num_warmup"] == num_warmup
    start, decode, throughput = report["vllm"]["rows"]
    ours = report["tiny_vllm"], report["tiny_vllm_throughput"]
    assert [engine["options"]["num_warmup"] for engine in ours] == [num_warmup] * 2
    assert start["num_warmup"] == num_warmup
    assert decode["seconds_of_warmup"] == pytest.approx(num_warmup * 3 * 6 / 100)
    assert throughput["seconds_of_warmup"] == pytest.approx((1 + 2 * num_warmup) * 7 / 100)
    rows = ours[0]["rows"][1], ours[1]["rows"][0]
    assert all(row["seconds_of_warmup"] > 0 for row in rows)
    # One round is timed of each.
    assert output.count("3 of 6 tokens") == output.count("2 of 7 tokens") == num_warmup + 1


@pytest.mark.slow
def test_what_one_engine_cannot_do_leaves_the_rest(tmp_path: Path) -> None:
    code, report, output = compare(tmp_path, fails_at=3)
    assert code == 1
    assert [row["batch_size"] for row in report["ratios"]] == [1]
    (failure,) = report["failures"]
    assert failure.startswith("vllm: ") and "ended with 1" in failure
    assert "ValueError: no room" in output


@pytest.mark.slow
def test_a_peer_that_is_installed_is_used(tmp_path: Path) -> None:
    site = tmp_path / "kept"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_text(
        PRETENDED_VLLM.replace("0.0.pretended", "kept").replace("FAILS_AT", "0")
    )
    options = ["--engines", "vllm", "--site", str(site)]
    code, report, output = compare(tmp_path, *options)
    assert code == 0, output
    assert report["vllm"]["rows"][0]["version"] == "kept"
    assert "seconds_to_install" not in report["vllm"]


@pytest.mark.slow
def test_an_engine_that_hangs_is_ended(tmp_path: Path) -> None:
    code, report, _ = compare(tmp_path, "--engines", "vllm", "--output-len", "100000", "--limit", "5")
    assert code == 1
    assert "(limit: 5 s)" in report["failures"][0]


def test_an_unknown_engine_is_refused(tmp_path: Path) -> None:
    code, report, output = compare(tmp_path, "--engines", "vllm,other")
    assert code == 2 and report == {}
    assert "--engines names other, but there are tiny-vllm, vllm" in output


def test_fewer_rounds_than_none_are_refused(tmp_path: Path) -> None:
    code, report, output = compare(tmp_path, "--num-warmup", "-1")
    assert code == 2 and report == {}
    assert "--num-warmup is -1, but must be at least 0" in output


def test_nothing_to_compare_is_refused(tmp_path: Path) -> None:
    code, report, output = compare(tmp_path, "--batch-sizes", "")
    assert code == 2 and report == {}
    assert "there is nothing to compare" in output


def test_a_workload_that_found_prefixes_is_not_compared() -> None:
    row = {
        "measure": "generate all",
        "workload": "a",
        "seconds": 2.0,
        "output_tokens_per_s": 3.0,
        "prompt_tokens_per_s": 4.0,
    }
    theirs = {**row, "seconds": 5.0}
    assert [ratio["speedup"] for ratio in throughput_ratios([{**row, "cached_share": 0.0}], [theirs])] == [
        2.5
    ]
    assert throughput_ratios([{**row, "cached_share": 0.5}], [theirs]) == []


def test_only_lines_that_both_have_are_compared() -> None:
    def line(batch_size: int, us: float, **more: Any) -> dict[str, Any]:
        return {"measure": "generate", "input_len": 8, "batch_size": batch_size, "us_per_step": us, **more}

    ours = [{"measure": "start"}, line(1, 500.0), line(2, 600.0)]
    theirs = [line(2, 1500.0), line(4, 100.0), {"measure": "step", "us_per_step": 1.0}]
    assert ratios(ours, theirs) == [
        {"input_len": 8, "batch_size": 2, "us_per_step": 600.0, "vllm_us_per_step": 1500.0, "speedup": 2.5}
    ]


@pytest.mark.parametrize(
    ("shape", "billions"), [("llama-3.2-1b", 1.24), ("llama-3.1-8b", 8.03), ("qwen3-0.6b", 0.6)]
)
def test_the_shapes_are_what_they_say(shape: str, billions: float) -> None:
    from tiny_vllm.models.hf_config import spec_from_hf_config

    config = json.loads((ROOT / "benchmarks" / "shapes" / shape / "config.json").read_text())
    assert round(spec_from_hf_config(config).num_parameters / 1e9, 2) == billions
