"""The whole decode step of a few sequences as one function that all CPU threads run together."""

from __future__ import annotations

from importlib.util import find_spec

MAX_ROWS = 8
"""Most sequences of a fused step."""


def has_numba() -> bool:
    """Whether the packages that compile the step are installed."""
    return find_spec("numba") is not None
