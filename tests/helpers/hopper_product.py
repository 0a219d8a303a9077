"""Runs the Hopper kernel for products of decode steps on the CPU, see hopper_cluster_emulator.h."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from tests.helpers.emulator import Written, load_emulator
from tests.helpers.hopper_prefill import emulated_map
from tiny_vllm.kernels.hopper_linear import decode_launch
from tiny_vllm.kernels.hopper_linear.decode_launch import Params, Variant, make_params

HERE = Path(__file__).parent


@functools.cache
def emulated_library(
    dtype: torch.dtype, variant: Variant, gated: bool, mistake: tuple[str, str] | None
) -> ctypes.CDLL:
    folder = Path(decode_launch.__file__).parent
    product = (folder / "decode_product.cu").read_text(encoding="utf-8")
    if mistake is not None:
        assert product.count(mistake[0]) == 1, f"not once in decode_product.cu: {mistake[0]}"
        product = product.replace(*mistake)
    ring, silu = ((folder / name).read_text(encoding="utf-8") for name in ("ring.cu", "silu.cu"))
    decode, entry = (
        (HERE / name).read_text(encoding="utf-8")
        for name in ("hopper_decode_emulator.h", "hopper_product_entry.h")
    )
    text = "\n".join(['#include "hopper_cluster_emulator.h"', decode, ring, silu, product, entry])
    return load_emulator(text, decode_launch.macros(dtype, variant, gated), Params)


def multiply_emulated(
    x: Tensor,
    weight: Tensor,
    variant: Variant,
    *,
    gated: bool = False,
    seed: int = 0,
    mistake: tuple[str, str] | None = None,
) -> Tensor:
    """As `launch_product`, on the CPU. x [M, K] is a view of what is NaN until the preceding kernel is
    complete. mistake: a text of decode_product.cu and what to put in its place.

    Raises RuntimeError when a rule of the device is broken."""
    library = emulated_library(x.dtype, variant.kernel, gated, mistake)
    rows, width = x.shape[0], weight.shape[0] // (2 if gated else 1)
    # Rows of guards around the result show what is written beyond it.
    parts = variant.splits
    guarded = torch.full((parts * rows + 2, width), torch.nan, dtype=x.dtype if gated else torch.float32)
    y = guarded[1:-1] if gated else guarded[1:-1].view(parts, rows, width)
    params = make_params(y, x, weight, variant, gated, encode=emulated_map)
    # Aligned as the device's parameters are.
    space = ctypes.create_string_buffer(ctypes.sizeof(params) + 64)
    place = -(-ctypes.addressof(space) // 64) * 64
    ctypes.memmove(place, ctypes.byref(params), ctypes.sizeof(params))
    kept = x.clone()
    row_bytes = x.shape[1] * x.element_size()
    written = (Written * rows)(*((x[row].data_ptr(), kept[row].data_ptr(), row_bytes) for row in range(rows)))
    clusters = variant.count_blocks(width, gated) // variant.row_blocks
    problem = library.run_emulated(
        ctypes.c_void_p(place), clusters, variant.shared_bytes, seed, written, rows
    )
    if problem:
        raise RuntimeError(problem.decode())
    if not guarded[[0, -1]].isnan().all():
        raise RuntimeError("written beyond the result")
    return y
