"""What an installed package must contain besides its modules."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tiny_vllm"


def test_every_file_that_is_no_module_is_declared_as_package_data() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["tiny_vllm"]
    declared = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    data = {
        path
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    assert PACKAGE / "kernels" / "cuda" / "read_probe.cu" in data
    assert data <= declared, f"not in package-data: {sorted(map(str, data - declared))}"
