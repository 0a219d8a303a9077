"""benchmarks/serve_side_by_side.py from end to end, with a tiny model and a peer that only pretends."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve_side_by_side import OUR_MODULES, PEER_MODULES, missing_modules, ratios
from tests.cli.test_bench_decode import CONFIG

ROOT = Path(__file__).parents[1]
IMPORTED = (
    *("benchmarks/serve", "entrypoints/cli/benchmark/main", "entrypoints/cli/benchmark/serve"),
    *("entrypoints/cli/collect_env", "entrypoints/cli/launch", "entrypoints/cli/openai"),
    *("entrypoints/cli/run_batch", "entrypoints/cli/serve"),
)
# `serve` answers a GET; `bench serve` sends one streaming request and makes up the rest.
PRETENDED_MAIN = """
import http.server, json, os, sys, time, urllib.request
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.answer()
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.answer()
    def answer(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"data: [DONE]")
    def log_message(self, *args): pass
def option(name):  # as argparse does it: the last one counts
    places = [place for place, word in enumerate(sys.argv) if word == name]
    return sys.argv[places[-1] + 1]
def main():
    print("noise")
    if sys.argv[1] == "serve":
        port = int(option("--port"))
        http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
    with open(f"/proc/{os.getppid()}/cmdline") as file:
        if FORKS_FAIL and "vllm_client" in file.read(): sys.exit(3)
    time.sleep(HANGS_SECONDS if option("--request-rate") == "HANGS_AT" else 0)
    body = {"model": option("--model"), "prompt": [1, 2], "max_tokens": 3, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(option("--base-url") + "/v1/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        assert b"[DONE]" in answer.read()
    result = {"completed": int(option("--num-prompts")), "failed": 0, "output_throughput": 10.0,
              "median_ttft_ms": float(option("--seed")), "argv": sys.argv}
    with open(option("--result-dir") + "/" + option("--result-filename"), "w") as file:
        json.dump(result, file)
if __name__ == "__main__":
    main()
"""


def make_peer(folder: Path, main: str) -> Path:
    """A bundle whose vLLM has the modules that the client imports, and stubs of all packages missing here."""
    files = {f"vllm/{name}.py": "" for name in IMPORTED} | {"vllm/entrypoints/cli/main.py": main}
    for name in {*PEER_MODULES, *OUR_MODULES} - {"vllm"}:
        if importlib.util.find_spec(name) is None:
            files[f"{name}.py"] = ""
    for name, text in files.items():
        path = folder / "content" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "install.sh").write_text('set -e\ncp -r "$(dirname "$0")/content" "$1"\n')
    return folder


def start(command: list[str], *, timeout: float) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": "."}
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, env=environment, check=False
    )


def compare(
    tmp_path: Path, *options: str, hangs_at: str = "", seconds: float = 0, forks_fail: bool = False
) -> tuple[int, dict[str, Any], str]:
    main = PRETENDED_MAIN.replace("HANGS_AT", hangs_at).replace("HANGS_SECONDS", str(seconds))
    main = main.replace("FORKS_FAIL", str(forks_fail))
    (tmp_path / "peer").mkdir()
    peer = make_peer(tmp_path / "peer", main)
    shape = tmp_path / "shape"
    shape.mkdir()
    (shape / "config.json").write_text(json.dumps(CONFIG))
    report = tmp_path / "results" / "report.json"
    command = [sys.executable, "benchmarks/serve_side_by_side.py", "--peer", str(peer), "--shape", str(shape)]
    command += ["--json", str(report), "--rates", "8,inf", "--seconds", "3", "--num-prompts", "30"]
    command += ["--max-model-len", "64", "--options", "--device cpu --no-fused-cpu-decode", *options]
    run = start(command, timeout=300)
    content: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
    return run.returncode, content, run.stdout + run.stderr


@pytest.mark.slow
def test_both_servers_and_their_ratios_end_in_one_file(tmp_path: Path) -> None:
    code, report, output = compare(tmp_path)
    assert code == 0, output
    for engine in ("tiny-vllm", "vllm"):
        rows = report[engine]["rows"]
        assert [(row["rate"], row["num_prompts"], row["completed"]) for row in rows] == [
            ("8", 24, 24),
            ("inf", 30, 30),
        ]
        # Different seeds, so that no run finds the prompts of another in the cache.
        assert [row["median_ttft_ms"] for row in rows] == [1.0, 2.0]
        assert report[engine]["seconds_to_ready"] > 0
    assert report["ratios"] == [
        {"rate": "8", "output_throughput": 1.0, "median_ttft_ms": 1.0},
        {"rate": "inf", "output_throughput": 1.0, "median_ttft_ms": 1.0},
    ]
    assert "rate inf  output_throughput 1.00x" in output


@pytest.mark.slow
def test_what_was_measured_before_the_time_is_up_is_kept(tmp_path: Path) -> None:
    options = ["--engines", "vllm", "--max-time", "25", "--rates", "8,16"]
    code, report, _ = compare(tmp_path, *options, hangs_at="16", seconds=60)
    assert code == 1
    assert [row["rate"] for row in report["vllm"]["rows"]] == ["8"]
    (failure,) = report["failures"]
    assert "vllm bench serve ended with -14" in failure


@pytest.mark.slow
def test_a_client_that_cannot_be_forked_runs_by_itself(tmp_path: Path) -> None:
    code, report, output = compare(tmp_path, "--engines", "vllm", forks_fail=True)
    assert code == 0, output
    assert [row["rate"] for row in report["vllm"]["rows"]] == ["8", "inf"]
    assert output.count("a fork ended with 3") == 1


@pytest.mark.slow
def test_a_server_that_does_not_start_leaves_the_other_one(tmp_path: Path) -> None:
    options = ["--options", "--device cpu --max-num-seqs 0", "--rates", "inf"]
    code, report, output = compare(tmp_path, *options)
    assert code == 1
    assert "is 0, but must be" in report["failures"][0]
    assert [row["rate"] for row in report["vllm"]["rows"]] == ["inf"], output


def test_missing_packages_are_named_before_anything_starts(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "vllm").mkdir(parents=True)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    absent = [name for name in PEER_MODULES if importlib.util.find_spec(name) is None and name != "vllm"]
    with zipfile.ZipFile(wheels / "carried-1-py3-none-any.whl", "w") as wheel:
        for name in absent[1:]:
            wheel.writestr(f"{name}/__init__.py", "")
    command = [
        sys.executable,
        "benchmarks/serve_side_by_side.py",
        "--site",
        str(site),
        "--wheels",
        str(wheels),
    ]
    run = start([*command, "--check"], timeout=60)
    assert absent and run.returncode == 1, run.stderr
    assert run.stdout.count("MISSING") == 1
    assert f"vllm imports {absent[0]}," in run.stdout


def test_missing_modules_are_those_that_nothing_provides() -> None:
    assert missing_modules(["json", "no_such_module", "zmq"], {}) == ["no_such_module"]


def test_ratios_above_one_mean_that_ours_is_better() -> None:
    ours = [{"rate": "1", "output_throughput": 30.0, "p99_itl_ms": 2.0, "median_ttft_ms": None}]
    theirs = [
        {"rate": "1", "output_throughput": 10.0, "p99_itl_ms": 8.0, "median_ttft_ms": 3.0},
        {"rate": "8"},
    ]
    assert ratios(ours, theirs) == [{"rate": "1", "output_throughput": 3.0, "p99_itl_ms": 4.0}]
    assert ratios(ours, []) == []
