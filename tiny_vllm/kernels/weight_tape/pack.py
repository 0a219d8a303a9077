"""Writes a model's matrices onto a tape, see `layout`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_vllm.kernels.weight_tape.layout import NUM_BLOCKS, UNIT_ROWS, MatrixLayout, TapeLayout


@dataclass(frozen=True, slots=True)
class TapeMatrices:
    """One layer's: qkv [qkv_size, hidden], output [hidden, q_size], gate_up [2 * intermediate, hidden], rows
    of gate first, down [hidden, intermediate]."""

    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor


def pack_tape(layout: TapeLayout, layers: Iterable[TapeMatrices], lm_head: Tensor) -> Tensor:
    """The tape [values] BF16, on the device of lm_head [vocab, hidden]. A matrix whose rows must be padded
    or interleaved needs its memory once more for a moment."""
    tape = torch.empty(layout.num_bytes // 2, dtype=torch.bfloat16, device=lm_head.device)
    start = 0
    for layer in layers:
        for matrix, rows in (
            (layout.qkv, layer.qkv),
            (layout.output, layer.output),
            (layout.gate_up, _interleave(layer.gate_up)),
            (layout.down, layer.down),
        ):
            start = _append(tape, start, matrix, rows)
    end = _append(tape, start, layout.lm_head, lm_head)
    assert end == tape.numel()
    return tape


def _interleave(gate_up: Tensor) -> Tensor:
    """Rows in units of 4 of gate and their 4 of up."""
    half = UNIT_ROWS // 2
    gate, up = gate_up.chunk(2)
    missing = -gate.shape[0] % half
    pair = torch.stack((_pad(gate, missing, 0), _pad(up, missing, 0)))
    return pair.view(2, -1, half, gate.shape[1]).transpose(0, 1).reshape(-1, gate.shape[1])


def _append(tape: Tensor, start: int, layout: MatrixLayout, rows: Tensor) -> int:
    end = start + layout.num_values
    ordered = _in_order(layout, rows)
    tape[start:end].view(ordered.shape).copy_(ordered)
    return end


def pack_matrix(layout: MatrixLayout, rows: Tensor) -> Tensor:
    """rows [rows, columns] in the order of the tape: [values].

    In a chunk of one block: quarter of the columns, 32 columns of each half of the quarter, 16-byte word,
    row, lane of four, pair of columns, half, column of the pair.
    """
    return _in_order(layout, rows).reshape(-1)


def _in_order(layout: MatrixLayout, rows: Tensor) -> Tensor:
    """A view of the padded rows with one dimension for each step of the order."""
    num_units = NUM_BLOCKS * layout.units
    missing_rows = num_units * UNIT_ROWS - rows.shape[0]
    missing_columns = layout.num_column_chunks * layout.chunk_columns - rows.shape[1]
    padded = _pad(rows, missing_rows, missing_columns).contiguous()
    # block, unit, row | column chunk, quarter, half, 32 columns, lane, word, pair, column of the pair
    blocks = layout.chunk_columns // 256
    whole = padded.view(
        NUM_BLOCKS, layout.units, UNIT_ROWS, layout.num_column_chunks, 4, 2, blocks, 4, 2, 2, 2
    )
    outer = (1, 3) if layout.by_unit else (3, 1)
    return whole.permute(*outer, 0, 4, 6, 8, 2, 7, 9, 5, 10)


def _pad(rows: Tensor, num_rows: int, num_columns: int) -> Tensor:
    if num_rows == 0 and num_columns == 0:
        return rows
    return torch.nn.functional.pad(rows, (0, num_columns, 0, num_rows))
