"""Embedding: row `token_ids[t]` of the table for each token.

table [vocab, H], token_ids [T] int64 -> [T, H] of the table's type. Moves 2 * T * H values; no arithmetic.
"""

from __future__ import annotations

from torch import Tensor


def embedding(table: Tensor, token_ids: Tensor) -> Tensor:
    """Gather rows. token_ids must lie in [0, vocab)."""
    return table.index_select(0, token_ids)
