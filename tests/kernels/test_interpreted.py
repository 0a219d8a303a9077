"""The tests of the Triton kernels, in processes of their own where Triton interprets kernels on the CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Whole models, and attention in all its shapes: minutes.
SLOW = {
    *("test_attention", "test_chain_families", "test_engine", "test_experts", "test_forward_graphs"),
    *("test_fp8_attention", "test_fp8_chain"),
}
# Up to a minute each.
LONG = {"test_decode_chain", "test_draw_tokens", "test_small_ops"}
FILES = sorted((Path(__file__).parent / "gpu").glob("test_*.py"))
# Half of these have nothing to do without a GPU, and a process takes seconds to start: they share one.
PROCESSES = [
    *(pytest.param([path], marks=pytest.mark.slow, id=path.stem) for path in FILES if path.stem in SLOW),
    *(pytest.param([path], id=path.stem) for path in FILES if path.stem in LONG),
    pytest.param([path for path in FILES if path.stem not in SLOW | LONG], id="others"),
]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("paths", PROCESSES)
def test_kernels_compute_what_their_references_do(paths: list[Path]) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *map(str, paths)],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
