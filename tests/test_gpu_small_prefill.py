"""benchmarks/gpu_small_prefill.py: all of it on the CPU, without graphs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.cli.test_bench_decode import CONFIG

ROOT = Path(__file__).parents[1]


def test_prompts_are_timed_alone_and_beside_decodes_with_graphs_and_without(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    report = tmp_path / "report.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_small_prefill.py"), "--device", "cpu"]
    options = ["--model", str(tmp_path / "model"), "--input-lens", "5,20", "--num-decodes", "3"]
    numbers = ["--num-steps", "2", "--num-pages", "60", "--json", str(report)]
    run = subprocess.run(
        [*command, *options, *numbers],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(report.read_text())["rows"]
    kinds = {(row["input_len"], row["num_decodes"], row["is_eager"]) for row in rows}
    assert kinds == {
        (length, count, eager) for length in (5, 20) for count in (0, 3) for eager in (True, False)
    }
    for row in rows:
        names = ("beside_us", "decode_us") if row["num_decodes"] else ("step_us", "host_us")
        assert all(row[name] > 0 for name in names)
