"""What the loader needs of a weight file format: names and shapes for nothing, data one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from torch import Tensor


class TensorSource(Protocol):
    """Tensors of a checkpoint, by the names of its own format. Reading the header has read no data."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape, rows first."""
        ...

    def read(self, names: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (canonical name, tensor) for each canonical name -> stored name, in the order of the files.

        A tensor may be a view of the mapped file: copy it before asking for the next, and do not write to it.
        """
        ...
