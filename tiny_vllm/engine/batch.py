"""Turns a plan into the tensors of one forward pass, reading the slot table."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch

from tiny_vllm.engine.plan import StepPlan
from tiny_vllm.engine.slot_table import SlotTable
from tiny_vllm.engine.transfers import Upload
from tiny_vllm.models.batch import ForwardBatch


class StagedBatch:
    """What a batch needs from the host, added to an upload; `build` reads the rest on the device.

    One row per token: first the decodes in the plan's order, then the chunks, each in order of position.
    """

    def __init__(self, plan: StepPlan, table: SlotTable, upload: Upload) -> None:
        self._table = table
        chunks = plan.chunks
        chunk_slots = [chunk.slot for chunk in chunks]
        lens = np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int64)
        num_tokens = int(lens.sum())
        token_ids = np.fromiter(chain.from_iterable(c.token_ids for c in chunks), np.int64, num_tokens)
        starts = np.concatenate(([0], lens.cumsum()))
        first_positions = np.array([chunk.start for chunk in chunks], dtype=np.int64) - starts[:-1]
        self._decode_width = max((table.num_pages[slot] for slot in plan.decode_slots), default=0)
        self._prefill_width = max((table.num_pages[slot] for slot in chunk_slots), default=0)
        self._decode_slots = upload.integers(plan.decode_slots)
        self._chunk_slots = upload.integers(chunk_slots)
        self._token_ids = upload.integers(token_ids)
        self._token_slots = upload.integers(np.repeat(np.array(chunk_slots, dtype=np.int64), lens))
        self._positions = upload.integers(np.arange(num_tokens) + np.repeat(first_positions, lens))
        self._query_starts = upload.integers(starts)
        self._context_lens = upload.integers([chunk.start + len(chunk.token_ids) for chunk in chunks])

    def build(self, page_size: int) -> ForwardBatch:
        """After the upload."""
        table, decode_slots, chunk_slots = self._table, self._decode_slots.tensor, self._chunk_slots.tensor
        decode_positions = table.computed_len[decode_slots]
        slots = torch.cat((decode_slots, self._token_slots.tensor))
        positions = torch.cat((decode_positions, self._positions.tensor))
        cells = table.page_table[slots, positions // page_size] * page_size + positions % page_size
        return ForwardBatch(
            token_ids=torch.cat((table.last_token[decode_slots], self._token_ids.tensor)),
            positions=positions,
            cells=cells,
            decode_page_table=table.page_table[decode_slots, : self._decode_width],
            decode_context_lens=decode_positions + 1,
            prefill_page_table=table.page_table[chunk_slots, : self._prefill_width],
            prefill_query_starts=self._query_starts.tensor,
            prefill_context_lens=self._context_lens.tensor,
        )
