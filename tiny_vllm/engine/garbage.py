"""Keeps Python's search for cycles out of the way of running sequences."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 1 << 30
YOUNG_OBJECTS = 50_000
"""New containers that are let live before the young are searched. Many searches bring a full one nearer: with
Python's own number, 700 or 2000, a call with some hundred requests ended with one."""


@contextmanager
def without_full_collections() -> Iterator[None]:
    """Young objects are still searched, seldom; what torch and the model consist of is not.

    A full collection goes through every container of the process, 0.1 s and more once torch is loaded, and
    nothing decodes meanwhile. What older cycles there are is found after the block.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, thresholds[1], NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
