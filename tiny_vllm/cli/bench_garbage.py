"""How long Python's search for reference cycles held up a measurement."""

from __future__ import annotations

import gc
import time
from typing import Any


class GarbageClock:
    """Counts the collections of every generation, of this process, between entering and leaving it.
    Entered again, it counts on."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._longest = 0.0
        self._start: float | None = None

    def __enter__(self) -> GarbageClock:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, Any]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._start = now
        elif self._start is not None:
            self._seconds += now - self._start
            self._longest = max(self._longest, now - self._start)
            self._start = None

    def columns(self) -> dict[str, float]:
        """Columns of a row: seconds of all collections, milliseconds of the longest."""
        return {"gc_seconds": self._seconds, "gc_longest_ms": self._longest * 1e3}
