"""Runs the Hopper kernel of decode attention on the CPU, see hopper_decode_emulator.h."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tests.helpers.emulator import Written, load_emulator
from tests.helpers.hopper_prefill import emulated_map
from tiny_vllm.kernels.fp8_cache import Cache
from tiny_vllm.kernels.hopper_decode import launch
from tiny_vllm.kernels.hopper_decode.launch import (
    Params,
    QueryParts,
    Shape,
    Variant,
    Workspace,
    make_params,
    part_floats,
    shape_of,
    shared_bytes,
)

HERE = Path(__file__).parent


@functools.cache
def emulated_library(shape: Shape, variant: Variant, mistake: tuple[str, str] | None) -> ctypes.CDLL:
    attention = (Path(launch.__file__).parent / "attention.cu").read_text(encoding="utf-8")
    if mistake is not None:
        assert attention.count(mistake[0]) == 1, f"not once in attention.cu: {mistake[0]}"
        attention = attention.replace(*mistake)
    files = ("hopper_emulator.h", "hopper_decode_emulator.h", "hopper_decode_entry.h")
    parts = [(HERE / name).read_text(encoding="utf-8") for name in files]
    parts.insert(2, attention)
    return load_emulator("\n".join(parts), launch.macros(shape, variant), Params)


def attend_emulated(
    q: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    page_table: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    variant: Variant,
    table_rows: Tensor | None = None,
    late: Sequence[Tensor] = (),
    blocks: int = 5,
    seed: int = 0,
    mistake: tuple[str, str] | None = None,
) -> Tensor:
    """As `attend`, on the CPU. late: contiguous tensors, or rows of them, that are NaN until the preceding
    kernel is complete. mistake: a text of attention.cu and what to put in its place.

    Raises RuntimeError when a rule of the device is broken."""
    shape = shape_of(q.shape[1], k_cache, page_table, context_lens)
    output = torch.full_like(q, torch.nan)
    arguments = k_cache, v_cache, page_table, context_lens, table_rows, scale
    return _run(output, q, *arguments, shape, variant, late, blocks, seed, mistake)


def attend_from_parts_emulated(
    made: QueryParts,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    num_heads: int,
    scale: float,
    *,
    variant: Variant,
    table_rows: Tensor | None = None,
    blocks: int = 5,
    seed: int = 0,
    mistake: tuple[str, str] | None = None,
) -> Tensor:
    """As `attend_from_parts`, on the CPU: parts are NaN until the preceding kernel is complete."""
    shape = shape_of(num_heads, k_cache, page_table, context_lens, made)
    output = torch.full((len(context_lens), num_heads, k_cache.shape[3]), torch.nan).bfloat16()
    arguments = k_cache, v_cache, page_table, context_lens, table_rows, scale
    return _run(output, made, *arguments, shape, variant, [made.parts], blocks, seed, mistake)


def _run(
    output: Tensor,
    queries: Tensor | QueryParts,
    k_cache: Cache,
    v_cache: Cache,
    page_table: Tensor,
    context_lens: Tensor,
    table_rows: Tensor | None,
    scale: float,
    shape: Shape,
    variant: Variant,
    late: Sequence[Tensor],
    blocks: int,
    seed: int,
    mistake: tuple[str, str] | None,
) -> Tensor:
    """Returns `output`."""
    library = emulated_library(shape, variant, mistake)
    workspace = Workspace(
        torch.full((blocks, part_floats(shape.head_dim)), torch.nan), torch.zeros(blocks, dtype=torch.int32)
    )
    params = make_params(
        output, queries, k_cache, v_cache, page_table, context_lens, table_rows, scale, workspace, variant,
        encode=emulated_map,
    )  # fmt: skip
    # Aligned as the device's parameters are.
    space = ctypes.create_string_buffer(ctypes.sizeof(params) + 64)
    place = -(-ctypes.addressof(space) // 64) * 64
    ctypes.memmove(place, ctypes.byref(params), ctypes.sizeof(params))
    copies = [tensor.clone() for tensor in late]
    written = (Written * len(copies))(
        *(
            (tensor.data_ptr(), copy.data_ptr(), copy.nbytes)
            for tensor, copy in zip(late, copies, strict=True)
        )
    )
    size = shared_bytes(shape, variant)
    problem = library.run_emulated(ctypes.c_void_p(place), blocks, size, seed, written, len(copies))
    if problem:
        raise RuntimeError(problem.decode())
    assert not workspace.flags.any(), "a flag stays raised"
    words = output.numel() // 2
    if isinstance(queries, QueryParts):
        # Keys and values, but not of padding.
        num_real = int((queries.cells >= shape.page_size).sum())
        words += num_real * shape.num_kv_heads * shape.head_dim
    assert library.count_stored_words() == words, "a word is stored twice, or not at all"
    return output
