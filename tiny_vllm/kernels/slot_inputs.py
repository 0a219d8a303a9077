"""The first kernel of a decode step: what the step needs of its slots, read from the slot tables.

For row b with slot s = slots[b]:
    hidden[b] = embedding[last_token[s]]        position = computed_len[s]        context_len = position + 1
    cell = page_table[s, position // page_size] * page_size + position % page_size
    keys[b] = noise keys of (stream[s], sample_position[s]), see `sampling_noise`

slots [B]; last_token, computed_len, stream, sample_position [S] int64; page_table [S, W] int32 or int64. A
slot of S or more is padding, which lets a graph made for B rows serve fewer: such a row computes with token 0
at position 0 of the null page, and its results mean nothing. Moves B * H values.

It is launched without programmatic dependence, and so is the next kernel: everything it writes, and
everything earlier steps wrote, may then be read by all later kernels of the step before their waits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_vllm.kernels.sampling_noise import GAMMA, MIX_64, noise_keys
from tiny_vllm.kernels.triton_support import ceil_div, jit, launch_options, runs_triton, tl, with_fallback

# Eight values per thread: 16-byte loads of BF16.
BLOCK = 1024
NUM_WARPS = 4
GAMMA_64 = tl.constexpr(GAMMA)
MIX_64_A = tl.constexpr(MIX_64[0])
MIX_64_B = tl.constexpr(MIX_64[1])


@dataclass(frozen=True, slots=True)
class SlotState:
    """Columns of the slot tables, on the device, for S slots; shapes above."""

    page_table: Tensor
    computed_len: Tensor
    last_token: Tensor
    stream: Tensor
    sample_position: Tensor


@dataclass(frozen=True, slots=True)
class SlotInputs:
    """hidden [B, H]; positions, cells, context_lens [B] int64; keys [B, 2] int32; table_rows [B]: rows of the
    page table, 0 for padding."""

    hidden: Tensor
    positions: Tensor
    cells: Tensor
    context_lens: Tensor
    keys: Tensor
    table_rows: Tensor


def read_slots_ref(embedding: Tensor, state: SlotState, slots: Tensor, page_size: int) -> SlotInputs:
    """embedding [vocab, H], slots [B]."""
    is_real = slots < state.computed_len.shape[0]
    rows = torch.where(is_real, slots, 0).long()
    positions = torch.where(is_real, state.computed_len[rows], 0)
    pages = state.page_table[rows, positions // page_size].long()
    cells = torch.where(is_real, pages * page_size + positions % page_size, 0)
    tokens = torch.where(is_real, state.last_token[rows], 0)
    keys = noise_keys(state.stream[rows], state.sample_position[rows])
    return SlotInputs(embedding.index_select(0, tokens), positions, cells, positions + 1, keys, rows)


@jit
def _read_slots_kernel(
    hidden_ptr,
    positions_ptr,
    cells_ptr,
    context_lens_ptr,
    keys_ptr,
    table_rows_ptr,
    embedding_ptr,
    slots_ptr,
    page_table_ptr,
    computed_len_ptr,
    last_token_ptr,
    stream_ptr,
    sample_position_ptr,
    num_slots,
    table_width,
    H,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    is_real = slot < num_slots
    token = tl.load(last_token_ptr + slot, mask=is_real, other=0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(embedding_ptr + token * H + column, mask=column < H)
    tl.store(hidden_ptr + row * H + column, values, mask=column < H)

    if tl.program_id(1) == 0:
        table_row = tl.where(is_real, slot, 0)
        position = tl.load(computed_len_ptr + slot, mask=is_real, other=0)
        page = tl.load(
            page_table_ptr + table_row * table_width + position // PAGE_SIZE, mask=is_real, other=0
        ).to(tl.int64)
        tl.store(positions_ptr + row, position)
        tl.store(cells_ptr + row, page * PAGE_SIZE + position % PAGE_SIZE)
        tl.store(context_lens_ptr + row, position + 1)
        tl.store(table_rows_ptr + row, table_row)

        stream = tl.load(stream_ptr + table_row).to(tl.uint64)
        drawn = tl.load(sample_position_ptr + table_row).to(tl.uint64)
        gamma = tl.full((), GAMMA_64, tl.uint64)
        z = stream + drawn * gamma
        z = (z ^ (z >> 30)) * tl.full((), MIX_64_A, tl.uint64)
        z = (z ^ (z >> 27)) * tl.full((), MIX_64_B, tl.uint64)
        z = z ^ (z >> 31)
        tl.store(keys_ptr + row * 2, (z & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True))
        tl.store(keys_ptr + row * 2 + 1, (z >> 32).to(tl.uint32).to(tl.int32, bitcast=True))


@with_fallback(read_slots_ref)
def _launch_read_slots(embedding: Tensor, state: SlotState, slots: Tensor, page_size: int) -> SlotInputs:
    num_rows, width, device = slots.shape[0], embedding.shape[1], embedding.device
    assert embedding.is_contiguous()
    inputs = SlotInputs(
        hidden=torch.empty(num_rows, width, dtype=embedding.dtype, device=device),
        positions=torch.empty(num_rows, dtype=torch.int64, device=device),
        cells=torch.empty(num_rows, dtype=torch.int64, device=device),
        context_lens=torch.empty(num_rows, dtype=torch.int64, device=device),
        keys=torch.empty(num_rows, 2, dtype=torch.int32, device=device),
        table_rows=torch.empty(num_rows, dtype=torch.int64, device=device),
    )
    _read_slots_kernel[(num_rows, ceil_div(width, BLOCK))](
        inputs.hidden,
        inputs.positions,
        inputs.cells,
        inputs.context_lens,
        inputs.keys,
        inputs.table_rows,
        embedding,
        slots,
        state.page_table,
        state.computed_len,
        state.last_token,
        state.stream,
        state.sample_position,
        state.computed_len.shape[0],
        state.page_table.stride(0),
        width,
        PAGE_SIZE=page_size,
        BLOCK=BLOCK,
        **launch_options(NUM_WARPS),
    )
    return inputs


def read_slots(embedding: Tensor, state: SlotState, slots: Tensor, page_size: int) -> SlotInputs:
    """embedding [vocab, H], slots [B] int64."""
    op = _launch_read_slots if runs_triton(embedding) else read_slots_ref
    return op(embedding, state, slots, page_size)
