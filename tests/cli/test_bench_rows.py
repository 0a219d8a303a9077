from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from tiny_vllm.cli import bench_rows
from tiny_vllm.cli.bench_rows import RowReport, check_report_options
from tiny_vllm.cli.machine import ReadLimit
from tiny_vllm.config import EngineConfig
from tiny_vllm.errors import ConfigError
from tiny_vllm.models.spec import ModelSpec, RopeSpec


def make_report(monkeypatch: pytest.MonkeyPatch) -> RowReport:
    monkeypatch.setattr(bench_rows, "measure_read_limit", lambda device: ReadLimit(1e10, "a guess", {}))
    spec = ModelSpec(
        family="llama", vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=8, max_position_embeddings=8, rms_norm_eps=1e-5,
        rope=RopeSpec(theta=1e4, rotary_dim=8),
    )  # fmt: skip
    return RowReport("test", None, spec=spec, config=EngineConfig(device="cpu"), options={})


def test_a_file_that_can_be_written_is_not_left_behind_empty(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    check_report_options(argparse.Namespace(json=str(path)))
    assert not path.exists()
    path.write_text("kept")
    check_report_options(argparse.Namespace(json=str(path)))
    assert path.read_text() == "kept"
    with pytest.raises(ConfigError, match="cannot be written"):
        check_report_options(argparse.Namespace(json=str(tmp_path / "missing" / "report.json")))


def test_a_measurement_that_fails_costs_one_line_and_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = make_report(monkeypatch)

    def fail() -> None:
        raise RuntimeError("no memory\nand a long tale")

    report.add(measure="step", seconds=1.0)
    assert report.finish() == 0
    report.attempt(fail, measure="step")
    shown: Any = capsys.readouterr()
    assert "FAILED: RuntimeError: no memory" in shown.out
    assert "long tale" not in shown.out and "Traceback" not in shown.out + shown.err
    assert report.finish() == 1


def test_nothing_but_skipped_lines_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    report = make_report(monkeypatch)
    report.skip("too large", measure="step")
    assert report.finish() == 1
