"""Turns a plan into the tensors of one forward pass, reading the slot table."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
from torch import Tensor

from tiny_vllm.engine.plan import StepPlan
from tiny_vllm.engine.slot_table import SlotTable
from tiny_vllm.kernels.token_inputs import read_tokens
from tiny_vllm.models.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The sizes of a batch's tensors: those of a plan, or larger ones, whose rest is padding.

    num_tokens: of all chunks. decode_width, prefill_width: of the page tables. ends_only: see `ForwardBatch`.
    """

    num_decodes: int
    num_tokens: int
    num_chunks: int
    decode_width: int
    prefill_width: int
    ends_only: bool = False

    @staticmethod
    def of(plan: StepPlan, table: SlotTable) -> BatchShape:
        """Without padding."""
        return BatchShape(
            num_decodes=len(plan.decode_slots),
            num_tokens=sum(len(chunk.token_ids) for chunk in plan.chunks),
            num_chunks=len(plan.chunks),
            decode_width=max((table.num_pages[slot] for slot in plan.decode_slots), default=0),
            prefill_width=max((table.num_pages[chunk.slot] for chunk in plan.chunks), default=0),
            ends_only=not any(chunk.reads_inside for chunk in plan.chunks),
        )

    @property
    def num_rows(self) -> int:
        return self.num_decodes + self.num_tokens

    @property
    def num_outputs(self) -> int:
        """Rows of hidden states that come out: of the decodes, then of the chunks."""
        return self.num_decodes + (self.num_chunks if self.ends_only else self.num_tokens)

    @property
    def parts(self) -> tuple[int, ...]:
        """Sizes of what `pack_batch` puts together: slots of all rows; token ids and positions of the chunks;
        slots, starts and context lengths of the chunks."""
        return self.num_rows, *(self.num_tokens,) * 2, self.num_chunks, self.num_chunks + 1, self.num_chunks


def pack_batch(plan: StepPlan, shape: BatchShape, padding_slot: int) -> np.ndarray:
    """What a batch needs from the host: int64 [sum(shape.parts)].

    One row per token: first the decodes in the plan's order, then the chunks, each in order of position.
    Padding behind either, and chunks without tokens, belong to `padding_slot`, as its position 0.
    """
    chunks = plan.chunks
    lens = np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int64)
    ends = lens.cumsum()
    num_tokens, num_decodes = int(lens.sum()), len(plan.decode_slots)
    chunk_slots = np.array([chunk.slot for chunk in chunks], dtype=np.int64)
    firsts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    packed = np.zeros(sum(shape.parts), dtype=np.int64)
    slots, token_ids, positions, row_slots, starts, context_lens = np.split(
        packed, np.cumsum(shape.parts[:-1])
    )
    slots.fill(padding_slot)
    slots[:num_decodes] = plan.decode_slots
    first_row = shape.num_decodes
    slots[first_row : first_row + num_tokens] = np.repeat(chunk_slots, lens)
    token_ids[:num_tokens] = np.fromiter(
        chain.from_iterable(chunk.token_ids for chunk in chunks), np.int64, num_tokens
    )
    positions[:num_tokens] = np.arange(num_tokens) + np.repeat(firsts - (ends - lens), lens)
    row_slots.fill(padding_slot)
    row_slots[: len(chunks)] = chunk_slots
    starts[1 : len(chunks) + 1] = ends
    starts[len(chunks) + 1 :] = num_tokens
    context_lens.fill(1)
    context_lens[: len(chunks)] = firsts + lens
    return packed


def build_batch(
    packed: Tensor, shape: BatchShape, table: SlotTable, page_size: int, *, is_padded: bool = False
) -> ForwardBatch:
    """packed: `pack_batch` on the device. Nothing here depends on its values on the host."""
    slots, token_ids, positions, chunk_slots, starts, context_lens = packed.split(shape.parts)
    decode_slots = slots[: shape.num_decodes]
    inputs = read_tokens(
        slots,
        token_ids,
        positions,
        table.all_last_token,
        table.all_computed_len,
        table.all_page_table,
        page_size,
    )
    return ForwardBatch(
        token_ids=inputs.tokens,
        positions=inputs.positions,
        cells=inputs.cells,
        decode_page_table=table.all_page_table[decode_slots, : shape.decode_width],
        decode_context_lens=inputs.positions[: shape.num_decodes] + 1,
        prefill_page_table=table.all_page_table[chunk_slots, : shape.prefill_width],
        prefill_query_starts=starts,
        prefill_context_lens=context_lens,
        is_padded=is_padded,
        ends_only=shape.ends_only,
    )
