"""Embedding: row `token_ids[t]` of the table for each token.

table [vocab, H], token_ids [T] int64 -> [T, H] of the table's type. Moves 2 * T * H values; no arithmetic.
The decode step of a GPU gathers rows in its first kernel instead, see `slot_inputs`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
from torch import Tensor

from tiny_vllm.kernels.triton_support import ceil_div, jit, launch_options, runs_triton, tl, with_fallback

# Eight values per thread: 16-byte loads of BF16.
BLOCK = 1024
NUM_WARPS = 4


def embedding_ref(table: Tensor, token_ids: Tensor) -> Tensor:
    """table [vocab, H], token_ids [T] -> [T, H]."""
    return table.index_select(0, token_ids)


@jit
def _embedding_kernel(output_ptr, table_ptr, token_ids_ptr, H, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(token_ids_ptr + token).to(tl.int64)
    values = tl.load(table_ptr + row * H + column, mask=column < H)
    tl.store(output_ptr + token * H + column, values, mask=column < H)


@with_fallback(embedding_ref)
def _launch_embedding(table: Tensor, token_ids: Tensor) -> Tensor:
    num_tokens, width = token_ids.shape[0], table.shape[1]
    output = torch.empty(num_tokens, width, dtype=table.dtype, device=table.device)
    _embedding_kernel[(num_tokens, ceil_div(width, BLOCK))](
        output, table, token_ids, width, BLOCK=BLOCK, **launch_options(NUM_WARPS)
    )
    return output


def embedding(table: Tensor, token_ids: Tensor) -> Tensor:
    """Gather rows. token_ids must lie in [0, vocab)."""
    if runs_triton(table) and token_ids.numel():
        return _launch_embedding(table, token_ids)
    return embedding_ref(table, token_ids)
