"""Turns a plan into the tensors of one forward pass, reading the slot table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tiny_vllm.engine.plan import Chunk, StepPlan
from tiny_vllm.engine.slot_table import SlotTable
from tiny_vllm.models.batch import ForwardBatch


def build_batch(plan: StepPlan, table: SlotTable, page_size: int) -> ForwardBatch:
    """One row per token: first the decodes in the plan's order, then the chunks, each in order of
    position."""
    device = table.page_table.device
    decode_slots = torch.tensor(plan.decode_slots, dtype=torch.int64, device=device)
    decode_table = _rows(table, plan.decode_slots, decode_slots)
    decode_positions = table.computed_len[decode_slots]

    chunk_slots = [chunk.slot for chunk in plan.chunks]
    prefill_table = _rows(table, chunk_slots, torch.tensor(chunk_slots, dtype=torch.int64, device=device))
    query_starts, context_lens = [0], []
    token_ids: list[int] = []
    for chunk in plan.chunks:
        token_ids.extend(chunk.token_ids)
        query_starts.append(len(token_ids))
        context_lens.append(chunk.start + len(chunk.token_ids))

    positions = torch.cat([decode_positions, *(_positions(chunk, device) for chunk in plan.chunks)])
    tokens = torch.tensor(token_ids, dtype=torch.int64, device=device)
    return ForwardBatch(
        token_ids=torch.cat([table.last_token[decode_slots], tokens]),
        positions=positions,
        cells=_cells(plan, decode_table, prefill_table, positions, page_size),
        decode_page_table=decode_table,
        decode_context_lens=decode_positions + 1,
        prefill_page_table=prefill_table,
        prefill_query_starts=torch.tensor(query_starts, dtype=torch.int64, device=device),
        prefill_context_lens=torch.tensor(context_lens, dtype=torch.int64, device=device),
    )


def _rows(table: SlotTable, slots: Sequence[int], index: Tensor) -> Tensor:
    """Page tables of these slots, cut to the widest."""
    width = max((table.num_pages[slot] for slot in slots), default=0)
    return table.page_table[index, :width]


def _positions(chunk: Chunk, device: torch.device) -> Tensor:
    return torch.arange(chunk.start, chunk.start + len(chunk.token_ids), device=device)


def _cells(
    plan: StepPlan, decode_table: Tensor, prefill_table: Tensor, positions: Tensor, page_size: int
) -> Tensor:
    """Where each token's K/V goes: page * page_size + offset."""
    page_index = positions // page_size
    num_decodes = len(plan.decode_slots)
    pages = [decode_table.gather(1, page_index[:num_decodes, None])[:, 0]] if num_decodes else []
    row_start = num_decodes
    for row, chunk in enumerate(plan.chunks):
        row_end = row_start + len(chunk.token_ids)
        pages.append(prefill_table[row, page_index[row_start:row_end]])
        row_start = row_end
    return torch.cat(pages) * page_size + positions % page_size
