"""benchmarks/startup.py with a tiny model on the CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.startup import PARTS, Clock
from tests.cli.test_bench_decode import CONFIG
from tests.helpers.scripts import run_script
from tests.serving.support import assert_once_below
from tiny_vllm.kernels.cpu_decode import has_numba


def run(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    report = tmp_path / "results" / "startup.json"
    arguments = ["--model", str(tmp_path), "--json", str(report)]
    arguments += ["--device", "cpu", "--repeats", "1", "--input-len", "9", *options]
    done = run_script("startup.py", *arguments)
    content: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
    return done.returncode, content, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not has_numba(), reason="only numba compiles anything on a CPU")
def test_a_second_start_finds_what_the_first_has_compiled(tmp_path: Path) -> None:

    def share_between_the_parts() -> float:
        """Infinite if the second start has not been quicker."""
        code, report, output = run(tmp_path)
        assert code == 0, output
        assert report["engine"]["device"] == "cpu"
        cold, warm = report["rows"]
        assert (cold["caches"], warm["caches"]) == ("cold", "warm")
        shares = []
        for row in (cold, warm):
            seconds = row["seconds_to_first_token"]
            assert seconds < row["seconds_to_second_token"]
            shares.append(abs(sum(row[name] for name in PARTS[:-1]) - seconds) / seconds)
        return max(shares) if cold["engine"] > 2 * warm["engine"] else math.inf

    # The parts are one after another, and nothing else comes before the first token.
    assert_once_below(0.2, share_between_the_parts, tries=3)


@pytest.mark.slow
def test_a_start_that_fails_is_no_row(tmp_path: Path) -> None:
    code, report, output = run(tmp_path, "--engine", '{"max_num_seqs": 0}')
    assert code == 1 and report == {}
    assert "max_num_seqs" in output and "ended with 1 after 0 tokens" in output


def test_parts_that_happen_several_times_are_added_up() -> None:
    clock = Clock()
    clock.add("compile", 1.0)
    assert clock.timed("compile", lambda value, more: value + more)(1, more=2) == 3
    with clock.part("other"):
        pass
    assert clock.counts == {"compile": 2, "other": 1}
    assert 1.0 <= clock.seconds["compile"] < 2.0
