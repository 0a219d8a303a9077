"""Keeps Python's search for cycles out of the way of running sequences."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 1 << 30


@contextmanager
def without_full_collections() -> Iterator[None]:
    """Young objects are still searched; what torch and the model consist of is not.

    A full collection goes through every container of the process, 0.1 s and more once torch is loaded, and
    nothing decodes meanwhile. What older cycles there are is found after the block.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
