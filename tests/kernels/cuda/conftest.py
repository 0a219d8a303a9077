"""A cache of its own for every test, so that nothing compiled elsewhere hides a compiler's failure; and no
warning is withheld because another test had it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_vllm.kernels.cuda import fallback
from tiny_vllm.kernels.cuda.errors import CompileError
from tiny_vllm.kernels.cuda.nvrtc import nvrtc_version


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINY_VLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cuda"


@pytest.fixture(autouse=True)
def nothing_told() -> None:
    fallback._warn.cache_clear()


@pytest.fixture
def needs_nvrtc() -> None:
    try:
        nvrtc_version()
    except CompileError as error:
        pytest.skip(f"nothing can be compiled here: {error.message}")
