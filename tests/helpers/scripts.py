"""Runs a benchmark as a user would: a process of its own, in the project's root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """name: of a file in benchmarks/."""
    return subprocess.run(
        [sys.executable, f"benchmarks/{name}", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
