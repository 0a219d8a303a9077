"""Settings that every test shares."""

from __future__ import annotations

import os

# One thread per test process: `make test` runs several. Must happen before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing in the tests may wait for a network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

try:
    import hypothesis
except ModuleNotFoundError:  # a GPU machine that only runs the GPU tests
    pass
else:
    hypothesis.settings.register_profile("default", deadline=None)
    # A merge must not depend on luck: CI always draws the same examples.
    hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")
