"""benchmarks/step_overhead.py, which leaves the decoder out of the engine."""

from __future__ import annotations

import json
from typing import Any

from tests.helpers.scripts import run_script


def run(*options: str) -> dict[str, Any]:
    done = run_script("step_overhead.py", *options, "--repeats", "1")
    assert done.returncode == 0, done.stderr
    line: dict[str, Any] = json.loads(done.stdout)
    return line


def test_prompts_are_timed_without_a_decoder() -> None:
    report = run("prompts", "--prompts", "90", "--length", "100", "200")
    assert report["prompts"] == 90 and report["steps"] > 1
    assert report["per_step_ms"] > 0


def test_steps_of_decodes_are_timed_in_parts() -> None:
    report = run("--sequences", "3", "--steps", "4")
    assert report.pop("sequences") == 3 and report.pop("device") == "cpu"
    assert set(report) == {"step_us", "schedule_us", "submit_us", "read_us", "commit_us"}
    assert min(report.values()) > 0
