"""Settings that every test shares, and the bundled model."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tiny_vllm import LLM

# One thread per test process: `make test` runs several. Must happen before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Those of the tests that ask for more sleep meanwhile: spinning, they keep the other processes' from working.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Nothing in the tests may wait for a network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

try:
    import hypothesis
except ModuleNotFoundError:  # a GPU machine that only runs the GPU tests
    pass
else:
    # Nor may anything depend on how busy the machine is.
    TIMELESS = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
    hypothesis.settings.register_profile("default", **TIMELESS)
    # A merge must not depend on luck: CI always draws the same examples.
    hypothesis.settings.register_profile("ci", **TIMELESS, derandomize=True)
    hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_collection_finish() -> None:
    """What is there before the first test stays: looking for cycles in torch and all modules again and again
    took a second each time that a test asked for it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def bundled_llm() -> Iterator[LLM]:
    """The bundled model, loaded once per test process. Earlier tests leave their prefixes in its cache."""
    from tiny_vllm import LLM

    with LLM(num_pages=256, max_num_seqs=8) as llm:
        yield llm
