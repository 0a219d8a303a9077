"""Runs the Hopper kernel of prefill attention on the CPU, see hopper_emulator.h."""

from __future__ import annotations

import ctypes
import functools
import shutil
import struct
from pathlib import Path

import torch
from torch import Tensor

from tests.helpers.emulator import load_emulator
from tiny_vllm.kernels.cuda.tensor_map import BoxedTensor
from tiny_vllm.kernels.fp8_cache import Cache, Fp8Cache
from tiny_vllm.kernels.hopper_prefill import launch
from tiny_vllm.kernels.hopper_prefill.launch import Params, Shape, Variant, make_params, shared_bytes

HERE = Path(__file__).parent


def missing_compiler() -> str | None:
    return None if shutil.which("g++") else "g++ is not installed"


@functools.cache
def emulated_library(shape: Shape, variant: Variant, mistake: tuple[str, str] | None) -> ctypes.CDLL:
    attention = (Path(launch.__file__).parent / "attention.cu").read_text(encoding="utf-8")
    if mistake is not None:
        assert attention.count(mistake[0]) == 1, f"not once in attention.cu: {mistake[0]}"
        attention = attention.replace(*mistake)
    files = ("hopper_emulator.h", "hopper_fp8_emulator.h", "hopper_emulator_entry.h")
    parts = [(HERE / name).read_text(encoding="utf-8") for name in files]
    parts.insert(2, attention)
    return load_emulator("\n".join(parts), launch.macros(shape, variant), Params)


def emulated_map(tensor: BoxedTensor) -> bytes:
    rank = len(tensor.sizes)
    pad = (0,) * (3 - rank)
    words = (tensor.address, rank, *tensor.sizes, *pad, 2, *tensor.steps, *pad, *tensor.box, *pad)
    return struct.pack("<16Q", *words, *(0,) * (16 - len(words)))


def attend_emulated(
    q: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    page_table: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    variant: Variant,
    window: int | None = None,
    sinks: Tensor | None = None,
    blocks: int = 3,
    seed: int = 0,
    mistake: tuple[str, str] | None = None,
) -> Tensor:
    """As `attend`, on the CPU. mistake: a text of attention.cu and what to put in its place.

    Raises RuntimeError when a rule of the device is broken."""
    num_kv_heads, page_size, head_dim = k_cache.shape[1:]
    group = q.shape[1] // num_kv_heads
    types = page_table.dtype, query_starts.dtype, context_lens.dtype
    variants = window is not None, sinks is not None
    is_fp8 = isinstance(k_cache, Fp8Cache)
    shape = Shape(head_dim, group, num_kv_heads, page_size, q.dtype, *variants, *types, is_fp8)
    library = emulated_library(shape, variant, mistake)
    output = torch.full_like(q, torch.nan)
    tables = page_table, query_starts, context_lens
    counter = torch.zeros(1, dtype=torch.int32)
    params = make_params(
        output, q, k_cache, v_cache, *tables, scale, window, sinks, counter, variant, encode=emulated_map
    )
    # Aligned as the device's parameters are.
    space = ctypes.create_string_buffer(ctypes.sizeof(params) + 64)
    place = -(-ctypes.addressof(space) // 64) * 64
    ctypes.memmove(place, ctypes.byref(params), ctypes.sizeof(params))
    size = shared_bytes(shape, variant)
    problem = library.run_emulated(ctypes.c_void_p(place), blocks, size, seed)
    if problem:
        raise RuntimeError(problem.decode())
    assert counter == 0, "the next launch would begin elsewhere"
    return output
