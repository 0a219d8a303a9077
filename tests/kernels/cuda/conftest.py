"""What was compiled is kept in build/cubins, as emulations are in build/emulated; and no warning is withheld
because another test had it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_vllm.kernels.cuda import fallback
from tiny_vllm.kernels.cuda.errors import CompileError
from tiny_vllm.kernels.cuda.nvrtc import nvrtc_version

# An entry's name tells the source, the options and the compiler's version.
KEPT = Path(__file__).parents[3] / "build" / "cubins"


@pytest.fixture(autouse=True)
def kept_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_VLLM_CACHE", str(KEPT))


@pytest.fixture
def own_cache(kept_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, for tests of the cache and of the compiler."""
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
