"""The tests of the Triton kernels, in processes of their own where Triton interprets kernels on the CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Whole models, and attention in all its shapes: minutes.
SLOW = {"test_attention", "test_chain_families", "test_forward_graphs", "test_fp8_chain"}
GPU_TESTS = [
    pytest.param(path, marks=[pytest.mark.slow] if path.stem in SLOW else [], id=path.stem)
    for path in sorted((Path(__file__).parent / "gpu").glob("test_*.py"))
]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("path", GPU_TESTS)
def test_kernels_compute_what_their_references_do(path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", str(path)],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
