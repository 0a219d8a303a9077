from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.test_bench_decode import CONFIG, LIMIT
from tiny_vllm.cli import bench_rows, kernel_cases
from tiny_vllm.cli.main import main
from tiny_vllm.engine import build

BATCHES = (1, 3)
CONTEXTS = (9, 30)
PRODUCTS = {
    # Rows times columns.
    "qkv": (64 + 2 * 32) * 64,
    "output": 64 * 64,
    "gate_up": 2 * 128 * 64,
    "down": 64 * 128,
    "lm_head": 256 * 64,
}


def bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold_bytes: int, device: str, *more: str
) -> dict[str, Any]:
    monkeypatch.setattr(bench_rows, "measure_read_limit", lambda device: LIMIT)
    monkeypatch.setattr(kernel_cases, "COLD_BYTES", cold_bytes)
    # The model's type counts, which is BF16.
    monkeypatch.setattr(build, "_has_bf16_instructions", lambda: True)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "report.json"
    arguments = ["--model", str(tmp_path), "--load-format", "dummy", "--device", device]
    lines = ["--batch-sizes", "1,3", "--contexts", "9,30", "--json", str(path)]
    assert main(["bench", "kernels", *arguments, *lines, *more]) == 0
    report: dict[str, Any] = json.loads(path.read_text())
    assert report["failures"] == []
    return report


def check_lines(report: dict[str, Any], bytes_per_head: int = 2 * 16) -> None:
    """Every kernel is there with every batch, and its rate is what it must read over its time."""
    expected: dict[tuple[str, int, int | None], int] = {}
    for batch in BATCHES:
        for name, count in PRODUCTS.items():
            expected[name, batch, None] = 2 * count
        for context in CONTEXTS:
            expected["attention", batch, context] = 2 * batch * context * (32 // 16) * bytes_per_head
        expected["draw", batch, None] = 4 * batch * 256
    rows = {(row["kernel"], row["batch_size"], row.get("context")): row for row in report["rows"]}
    assert rows.keys() == expected.keys() and len(rows) == len(report["rows"])
    for key, num_bytes in expected.items():
        assert rows[key]["gb_per_s"] * rows[key]["us"] * 1e3 == pytest.approx(num_bytes)
        assert rows[key]["share"] == pytest.approx(rows[key]["gb_per_s"] / 2)


def test_every_kernel_of_a_step_gets_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = bench(tmp_path, monkeypatch, 20_000, "cpu")
    check_lines(report)
    assert all(row["is_cold"] for row in report["rows"])
    assert all("us_torch" in row for row in report["rows"] if row["kernel"] != "attention")


def test_keys_and_values_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_lines(bench(tmp_path, monkeypatch, 20_000, "cpu", "--kv-cache-dtype", "fp8"), 16 + 2)


def test_what_a_cache_may_hold_is_not_called_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cases, "MAX_COPIES", 2)
    report = bench(tmp_path, monkeypatch, 40_000, "cpu")
    assert {row["kernel"] for row in report["rows"] if row["is_cold"]} == {"gate_up", "lm_head"}


@pytest.mark.gpu
def test_a_gpu_times_the_same_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    check_lines(bench(tmp_path, monkeypatch, 20_000, "cuda"))
