"""Where the tokens of paged sequences lie: the gather both attention ops share on a CPU.

A cache [num_pages, Hkv, page_size, D] is seen as rows [num_pages * Hkv * page_size, D]; a row is one token's
head. Padding repeats the sequence's own last token, so that no cell outside a sequence is ever read: such
a cell may hold anything, NaN included, and 0 * NaN would be NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor


def context_rows(
    page_table: Tensor, context_lens: Tensor, max_context_len: int, num_kv_heads: int, page_size: int
) -> Tensor:
    """Row of each context token of each head: [B, Hkv, max_context_len] int64.

    page_table: [B, W] int64, context_lens: [B] int64, each at least 1 and at most W * page_size.
    """
    positions = torch.arange(max_context_len, device=page_table.device)
    positions = torch.minimum(positions, (context_lens - 1).unsqueeze(1))
    pages = page_table.gather(1, positions // page_size)
    first_rows = pages * (num_kv_heads * page_size) + positions % page_size
    heads = torch.arange(0, num_kv_heads * page_size, page_size, device=page_table.device)
    return first_rows.unsqueeze(1) + heads.unsqueeze(1)


def gather_rows(cache: Tensor, rows: Tensor) -> Tensor:
    """cache [num_pages, Hkv, page_size, D], rows of any shape -> rows' shape + [D]."""
    head_dim = cache.shape[-1]
    return cache.view(-1, head_dim).index_select(0, rows.flatten()).view(*rows.shape, head_dim)
