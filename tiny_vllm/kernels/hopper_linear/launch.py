"""Compiles gated_product.cu, and launches it."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from tiny_vllm.kernels.cuda.driver import CudaFunction, load_function
from tiny_vllm.kernels.cuda.fallback import load_or_warn
from tiny_vllm.kernels.cuda.nvrtc import compile_cubin
from tiny_vllm.kernels.cuda.tensor_map import MAP_BYTES, Encode, encode_tensor_map, set_maps
from tiny_vllm.kernels.hopper_linear.common import TERMS, encode_matrices, join_sources, operand_obstacle
from tiny_vllm.kernels.hopper_prefill.launch import WATCHDOG_SECONDS, count_multiprocessors
from tiny_vllm.kernels.triton_support import ceil_div

ROWS, COLUMNS = 128, 128  # of a tile of y
THREADS = 3 * 128
# Where it pays: 512 rows of Llama-3.2-1B's shape took 49 us, cuBLAS and the activation kernel 54, those of
# Llama-3.1-8B's as long as they. Fewer were not measured.
MIN_ROWS = 512
CLUSTER = 2  # blocks that share what they copy of W
GROUP = 8  # rows of a cluster's tiles that are gone through together
STAGES = 4  # of 48 KB in shared memory
# Registers per thread of the copying warpgroup and of the two that compute.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
# Of a block: what aligns it, stages, a tile of y, barriers.
SHARED_BYTES = 1024 + STAGES * (ROWS + 2 * COLUMNS) * TERMS * 2 + ROWS * COLUMNS * 2 + 2 * STAGES * 8


class Params(ctypes.Structure):
    """`struct Params` of gated_product.cu. The maps want a multiple of 64 as its size."""

    _fields_ = (
        *((name, ctypes.c_char * MAP_BYTES) for name in ("x_map", "weight_map", "y_map")),
        *((name, ctypes.c_int) for name in ("width", "steps", "row_tiles", "column_tiles", "whole_tiles")),
        ("padding", ctypes.c_char * 44),
    )


def obstacle(x: Tensor, weight: Tensor) -> str | None:
    """Why the kernel cannot take x [M, K] and weight [2N, K], whatever the device; None if it can."""
    if weight.shape[0] % 16:
        return f"{weight.shape[0] // 2} columns are no multiple of 8"
    return operand_obstacle(x, weight)


def source() -> str:
    return join_sources("ring.cu", "silu.cu", "gated_product.cu")


def macros(dtype: torch.dtype) -> dict[str, int | str]:
    return {
        "HALF": int(dtype == torch.float16),
        "CLUSTER": CLUSTER,
        "GROUP": GROUP,
        "STAGES": STAGES,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "CONSUMER_REGISTERS": CONSUMER_REGISTERS,
        "WATCHDOG_NS": f"{WATCHDOG_SECONDS * 10**9}ull",
    }


def compile_gated(dtype: torch.dtype) -> bytes:
    """The binary for Hopper. Raises CompileError."""
    return compile_cubin(source(), name="gated_product", defines=macros(dtype), arch="sm_90a")


def load_gated(dtype: torch.dtype, device: torch.device) -> CudaFunction:
    """Raises CudaKernelError."""
    cubin = compile_gated(dtype)
    return load_function(cubin, "multiply_gated", shared_bytes=SHARED_BYTES, device=device)


@functools.cache
def _loaded(dtype: torch.dtype, device: torch.device) -> CudaFunction | None:
    """None, after a warning, where the kernel cannot be had."""
    load = functools.partial(load_gated, dtype, device)
    return load_or_warn(load, "the Hopper kernel of gate and up", "cuBLAS and a kernel for the activation")


def make_params(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    max_clusters: int,
    encode: Encode = encode_tensor_map,
) -> tuple[Params, int]:
    """The kernel's argument, and how many clusters to launch. encode: makes a tensor map."""
    row_tiles, column_tiles = ceil_div(x.shape[0], CLUSTER * ROWS), ceil_div(y.shape[1], COLUMNS)
    tiles = row_tiles * column_tiles
    left = tiles % max_clusters
    # A last round that is at most half full has tiles of half the rows.
    halved = left if 2 * left <= max_clusters else 0
    params = Params(
        width=y.shape[1],
        steps=x.shape[1] // TERMS,
        row_tiles=row_tiles,
        column_tiles=column_tiles,
        whole_tiles=tiles - halved,
    )
    boxes = (x, ROWS), (weight, COLUMNS), (y, 64)
    set_maps(params, encode_matrices(encode, boxes))
    return params, min(tiles + halved, max_clusters)


def multiply_gated(x: Tensor, weight: Tensor) -> Tensor | None:
    """x [M, K], weight [2N, K] (gate rows, then up rows) -> silu(x Wg^T) * (x Wu^T), [M, N]; None where the
    kernel cannot be compiled.

    M > 0, both on a Hopper GPU, with no `obstacle`; rows may lie apart."""
    function = _loaded(x.dtype, x.device)
    if function is None:
        return None
    y = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    params, clusters = make_params(y, x, weight, count_multiprocessors(x.device) // CLUSTER)
    function.launch(clusters * CLUSTER, THREADS, (params,))
    return y
