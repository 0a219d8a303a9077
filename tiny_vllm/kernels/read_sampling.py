"""What a draw needs of its slots, gathered from the sampling tables, with the keys of its noise.

For row b with slot s = slots[b]: temperature[s], top_k[s], top_p[s], min_p[s], and the keys of (stream[s],
position[s]), see `sampling_noise`. slots [B] int64; columns [S], int64 or FP32 as in `SamplingRows`. One
launch on a GPU in place of some fifteen; moves 48 bytes a row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_vllm.kernels.sampling import SamplingRows
from tiny_vllm.kernels.sampling_noise import GAMMA, MIX_64, noise_keys
from tiny_vllm.kernels.triton_support import ceil_div, jit, launch_options, runs_triton, tl, with_fallback

BLOCK = 64
NUM_WARPS = 2
GAMMA_64 = tl.constexpr(GAMMA)
MIX_64_A = tl.constexpr(MIX_64[0])
MIX_64_B = tl.constexpr(MIX_64[1])


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """One entry per slot: stream, position, top_k [S] int64; temperature, top_p, min_p [S] FP32."""

    stream: Tensor
    position: Tensor
    top_k: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor


def read_sampling_ref(columns: SamplingColumns, slots: Tensor) -> SamplingRows:
    return SamplingRows(
        temperature=columns.temperature[slots],
        top_k=columns.top_k[slots],
        top_p=columns.top_p[slots],
        min_p=columns.min_p[slots],
        keys=noise_keys(columns.stream[slots], columns.position[slots]),
    )


@jit(do_not_specialize=("out_top_p_ptr", "out_min_p_ptr", "slots_ptr", "num_rows"))
def _read_sampling_kernel(
    out_temperature_ptr,
    out_top_k_ptr,
    out_top_p_ptr,
    out_min_p_ptr,
    keys_ptr,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    stream_ptr,
    position_ptr,
    num_rows,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    slot = tl.load(slots_ptr + row, mask=is_row, other=0)
    tl.store(out_temperature_ptr + row, tl.load(temperature_ptr + slot, mask=is_row), mask=is_row)
    tl.store(out_top_k_ptr + row, tl.load(top_k_ptr + slot, mask=is_row), mask=is_row)
    tl.store(out_top_p_ptr + row, tl.load(top_p_ptr + slot, mask=is_row), mask=is_row)
    tl.store(out_min_p_ptr + row, tl.load(min_p_ptr + slot, mask=is_row), mask=is_row)

    z = tl.load(stream_ptr + slot, mask=is_row, other=0).to(tl.uint64)
    position = tl.load(position_ptr + slot, mask=is_row, other=0).to(tl.uint64)
    z = z + position * tl.full((), GAMMA_64, tl.uint64)
    z = (z ^ (z >> 30)) * tl.full((), MIX_64_A, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full((), MIX_64_B, tl.uint64)
    z = z ^ (z >> 31)
    tl.store(keys_ptr + row * 2, (z & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True), mask=is_row)
    tl.store(keys_ptr + row * 2 + 1, (z >> 32).to(tl.uint32).to(tl.int32, bitcast=True), mask=is_row)


@with_fallback(read_sampling_ref)
def _launch_read_sampling(columns: SamplingColumns, slots: Tensor) -> SamplingRows:
    num_rows, device = slots.shape[0], slots.device
    reals = torch.empty(3, num_rows, dtype=torch.float32, device=device)
    rows = SamplingRows(
        temperature=reals[0],
        top_k=torch.empty(num_rows, dtype=torch.int64, device=device),
        top_p=reals[1],
        min_p=reals[2],
        keys=torch.empty(num_rows, 2, dtype=torch.int32, device=device),
    )
    _read_sampling_kernel[(ceil_div(num_rows, BLOCK),)](
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.keys,
        slots,
        columns.temperature,
        columns.top_k,
        columns.top_p,
        columns.min_p,
        columns.stream,
        columns.position,
        num_rows,
        BLOCK=BLOCK,
        **launch_options(NUM_WARPS),
    )
    return rows


def read_sampling(columns: SamplingColumns, slots: Tensor) -> SamplingRows:
    """slots: [B] int64, B at least 1."""
    op = _launch_read_sampling if runs_triton(slots) else read_sampling_ref
    return op(columns, slots)
