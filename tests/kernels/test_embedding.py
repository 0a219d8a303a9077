"""Embedding rows."""

from __future__ import annotations

import torch

from tiny_vllm.kernels.embedding import embedding


def test_gathers_rows_in_order_and_repeats_them() -> None:
    table = torch.randn(5, 3).bfloat16()
    token_ids = torch.tensor([4, 0, 4])
    assert torch.equal(embedding(table, token_ids), torch.stack([table[4], table[0], table[4]]))


def test_no_tokens_give_no_rows() -> None:
    assert embedding(torch.randn(5, 3), torch.empty(0, dtype=torch.int64)).shape == (0, 3)
