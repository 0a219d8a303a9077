"""Embeddings: what can be asked of them, and what is made of a pooled hidden state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np

from tiny_vllm.errors import SWITCH, RequestError, shown
from tiny_vllm.types import Pooling


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingParams:
    """pooling: the mean over all tokens of the prompt, or its last token. normalize: to length 1.

    dimensions: keep the first so many values, before normalising; None keeps all. Only models trained for it
    (Matryoshka) put what matters there.
    """

    pooling: Pooling = "mean"
    normalize: bool = True
    dimensions: int | None = None

    def check(self, hidden_size: int) -> None:
        """Raises RequestError for what a model with hidden states of this size cannot give."""
        if self.pooling not in get_args(Pooling):
            raise RequestError(
                f"pooling is {shown(self.pooling)}, but must be {' or '.join(get_args(Pooling))}",
                hint="mean averages over all tokens",
            )
        if not isinstance(self.normalize, bool):
            raise RequestError(
                f"normalize is {shown(self.normalize)}, but must be true or false", hint=SWITCH
            )
        if self.dimensions is None:
            return
        if type(self.dimensions) is not int or not 1 <= self.dimensions <= hidden_size:
            raise RequestError(
                f"dimensions is {shown(self.dimensions)}, but must be from 1 to {hidden_size}",
                hint="leave it out for all",
            )

    def values(self, pooled: bytes) -> np.ndarray:
        """pooled: FP32 [hidden] of PromptInfo -> FP32 [dimensions]. Zeros stay zeros."""
        values = np.frombuffer(pooled, np.float32)[: self.dimensions]
        if self.normalize:
            # Squares of FP32 values may overflow FP32.
            length = np.linalg.norm(values.astype(np.float64))
            values = (values / max(length, np.finfo(np.float64).tiny)).astype(np.float32)
        return values
