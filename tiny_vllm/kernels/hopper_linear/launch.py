"""Compiles prompt_product.cu for what a product is, chooses its tiles, and launches it."""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tiny_vllm.kernels import hopper_decode, hopper_prefill
from tiny_vllm.kernels.cuda.driver import CudaFunction, load_function
from tiny_vllm.kernels.cuda.errors import CudaKernelError
from tiny_vllm.kernels.cuda.nvrtc import compile_cubin
from tiny_vllm.kernels.cuda.tensor_map import MAP_BYTES, BoxedTensor, encode_tensor_map
from tiny_vllm.kernels.hopper_linear.decode_launch import WRITTEN_WIDTHS, product_instruction
from tiny_vllm.kernels.hopper_prefill.launch import WATCHDOG_SECONDS, count_multiprocessors, is_hopper
from tiny_vllm.kernels.triton_support import ceil_div

ROWS, TERMS = 128, 64  # of a block's tile, and of K at a time
THREADS = 3 * 128
# Where gate and up with SiLU pay: 512 rows of Llama-3.2-1B's shape took 49 us, cuBLAS and the activation
# kernel 54, those of Llama-3.1-8B's as long as they. Fewer were not measured.
MIN_ROWS = 512
# Rows for which the engine takes plain products from here, too, and not from cuBLAS. What was not measured is
# not taken: none.
PLAIN_ROWS = range(0)
CLUSTER = 2  # blocks that share what they copy of W
GROUP = 8  # rows of a cluster's tiles that are gone through together
SHARED_LIMIT = 232448  # bytes a block of an H200 can have
# Registers per thread of the copying warpgroup and of the two that compute.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
# Of tiles: rows of W. The most read the least of shared memory, fewer may leave fewer multiprocessors idle.
TILE_COLUMNS = (256, 192, 128)
# For `estimate_cycles`: per cycle, multiplications of a multiprocessor's tensor cores and bytes of its shared
# memory, the hardware's; and a guess at what a tile takes beside its steps.
PRODUCTS_PER_CYCLE, SHARED_BYTES_PER_CYCLE, TILE_CYCLES = 2048, 128, 1500


@dataclass(frozen=True, slots=True)
class Variant:
    """What the kernel is compiled for. gated: gate and up with SiLU. adds: a residual. tile_columns: rows of
    W of a tile, gated half of them of gate."""

    gated: bool = False
    adds: bool = False
    tile_columns: int = 256

    @property
    def kernel(self) -> str:
        return "multiply_gated" if self.gated else "multiply_and_add" if self.adds else "multiply_plain"

    @property
    def columns(self) -> int:
        """Of a tile of y."""
        return self.tile_columns // 2 if self.gated else self.tile_columns

    @property
    def stage_bytes(self) -> int:
        return (ROWS + self.tile_columns) * TERMS * 2

    @property
    def fixed_bytes(self) -> int:
        """Of a block: what aligns its memory, and columns of y that are stored at a time."""
        return 1024 + ROWS * (64 if self.columns % 128 else 128) * 2

    @property
    def stages(self) -> int:
        """As many as there is room for, with two barriers each."""
        return (SHARED_LIMIT - self.fixed_bytes) // (self.stage_bytes + 2 * 8)

    @property
    def shared_bytes(self) -> int:
        return self.fixed_bytes + self.stages * (self.stage_bytes + 2 * 8)

    def count_tiles(self, rows: int, width: int) -> tuple[int, int]:
        """Of clusters, for y [rows, width]: below and beside one another."""
        return ceil_div(rows, CLUSTER * ROWS), ceil_div(width, self.columns)


GATED = Variant(gated=True)


Encode = Callable[[BoxedTensor], bytes]


class Params(ctypes.Structure):
    """`struct Params` of prompt_product.cu. The maps want a multiple of 64 as its size."""

    _fields_ = (
        *((name, ctypes.c_char * MAP_BYTES) for name in ("x_map", "weight_map", "y_map", "residual_map")),
        *((name, ctypes.c_int) for name in ("width", "steps", "row_tiles", "column_tiles", "whole_tiles")),
        ("padding", ctypes.c_char * 44),
    )


def obstacle(x: Tensor, weight: Tensor, residual: Tensor | None = None, *, gated: bool = False) -> str | None:
    """Why the kernel cannot take x [M, K], weight [N, K] (gated: [2N, K]) and residual [M, N], whatever the
    device; None if it can."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"the type {x.dtype} has no tensor cores of 16 bits"
    if weight.dtype != x.dtype:
        return f"the matrix's type {weight.dtype} is not that of the rows, {x.dtype}"
    if residual is not None and residual.dtype != x.dtype:
        return f"the residual's type {residual.dtype} is not that of the rows, {x.dtype}"
    if x.shape[1] % TERMS:
        return f"{x.shape[1]} terms are no multiple of {TERMS}"
    if weight.shape[0] % (16 if gated else 8):
        return f"{weight.shape[0] // (2 if gated else 1)} columns are no multiple of 8"
    for name, tensor in (("rows", x), ("matrix", weight), ("residual", residual)):
        if tensor is not None and (tensor.stride(1) != 1 or tensor.stride(0) % 8 or tensor.data_ptr() % 16):
            return f"the {name}' values are not contiguous, or rows do not begin at multiples of 16 bytes"
    return None


def split_tiles(tiles: int, max_clusters: int) -> tuple[int, int]:
    """How many of so many tiles are whole, and how many are halved: a last round that is at most half full
    has tiles of half the rows."""
    left = tiles % max_clusters
    halved = left if 2 * left <= max_clusters else 0
    return tiles - halved, halved


def estimate_cycles(variant: Variant, rows: int, width: int, terms: int, max_clusters: int) -> float:
    """What a product may take, to compare variants: not a time.

    A step is bound by the tensor cores, or by shared memory: what is copied, and what products read of it."""

    def tile_cycles(warpgroups: int) -> float:
        read = TERMS // 16 * warpgroups * (64 + variant.tile_columns) * 32
        step = max(
            warpgroups * 64 * variant.tile_columns * TERMS / PRODUCTS_PER_CYCLE,
            (variant.stage_bytes + read) / SHARED_BYTES_PER_CYCLE,
        )
        return terms // TERMS * step + TILE_CYCLES

    row_tiles, column_tiles = variant.count_tiles(rows, width)
    whole, halved = split_tiles(row_tiles * column_tiles, max_clusters)
    return ceil_div(whole, max_clusters) * tile_cycles(2) + bool(halved) * tile_cycles(1)


@functools.lru_cache(maxsize=4096)
def choose_variant(rows: int, width: int, terms: int, adds: bool, max_clusters: int) -> Variant:
    """Of a product that is not gated, for y [rows, width]."""
    variants = (Variant(adds=adds, tile_columns=columns) for columns in TILE_COLUMNS)
    return min(variants, key=lambda variant: estimate_cycles(variant, rows, width, terms, max_clusters))


def source(variant: Variant) -> str:
    here = Path(__file__).parent
    folders = Path(hopper_prefill.__file__).parent, Path(hopper_decode.__file__).parent, here
    texts = [(folder / "instructions.cu").read_text(encoding="utf-8") for folder in folders]
    if variant.tile_columns not in WRITTEN_WIDTHS:
        texts.append(product_instruction(variant.tile_columns))
    texts += ((here / name).read_text(encoding="utf-8") for name in ("silu.cu", "prompt_product.cu"))
    return "".join(texts)


def macros(dtype: torch.dtype, variant: Variant) -> dict[str, int | str]:
    return {
        "KERNEL": variant.kernel,
        "HALF": int(dtype == torch.float16),
        "GATED": int(variant.gated),
        "ADDS": int(variant.adds),
        "TILE_COLUMNS": variant.tile_columns,
        "CLUSTER": CLUSTER,
        "GROUP": GROUP,
        "STAGES": variant.stages,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "CONSUMER_REGISTERS": CONSUMER_REGISTERS,
        "WATCHDOG_NS": f"{WATCHDOG_SECONDS * 10**9}ull",
    }


def compile_product(dtype: torch.dtype, variant: Variant) -> bytes:
    """The binary for Hopper. Raises CompileError."""
    defines = macros(dtype, variant)
    return compile_cubin(source(variant), name="prompt_product", defines=defines, arch="sm_90a")


@functools.cache
def _warn(problem: str) -> None:
    """Once, not for each of the kernels that have it."""
    warnings.warn(
        "the Hopper kernel for products of prompts cannot be used on this machine; cuBLAS and a kernel for "
        f"activations take its place ({problem})",
        RuntimeWarning,
        stacklevel=2,
    )


@functools.cache
def _compiled(dtype: torch.dtype, variant: Variant, device: torch.device) -> CudaFunction | None:
    """None, after a warning, where the kernel cannot be had."""
    try:
        cubin = compile_product(dtype, variant)
        return load_function(cubin, variant.kernel, shared_bytes=variant.shared_bytes, device=device)
    except CudaKernelError as error:
        _warn(str(error)[:300])
        return None


@functools.lru_cache(maxsize=1024)
def _map(
    encode: Encode, address: int, dtype: torch.dtype, shape: tuple[int, ...], stride: int, rows: int
) -> bytes:
    """shape, stride of rows: of a matrix. rows: of a box."""
    sizes, steps = (shape[1], shape[0]), (stride * dtype.itemsize,)
    return encode(BoxedTensor(address, dtype, sizes, steps, (64, rows)))


def make_params(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    variant: Variant,
    max_clusters: int,
    encode: Encode = encode_tensor_map,
) -> tuple[Params, int]:
    """The kernel's argument, and how many clusters to launch. residual: given if the variant adds one.
    encode: makes a tensor map."""
    row_tiles, column_tiles = variant.count_tiles(*y.shape)
    whole, halved = split_tiles(row_tiles * column_tiles, max_clusters)
    params = Params(
        width=y.shape[1],
        steps=x.shape[1] // TERMS,
        row_tiles=row_tiles,
        column_tiles=column_tiles,
        whole_tiles=whole,
    )
    boxes = [(x, ROWS), (weight, variant.tile_columns // CLUSTER), (y, 64)]
    if residual is not None:
        boxes.append((residual, ROWS))
    maps = b"".join(
        _map(encode, matrix.data_ptr(), matrix.dtype, matrix.shape, matrix.stride(0), rows)
        for matrix, rows in boxes
    )
    # They are the first fields, and a copy of bytes: assigning a field would stop at the first zero.
    ctypes.memmove(ctypes.addressof(params), maps, len(maps))
    return params, min(whole + 2 * halved, max_clusters)


def _launch(
    y: Tensor, x: Tensor, weight: Tensor, residual: Tensor | None, variant: Variant, *, pdl: bool
) -> Tensor | None:
    """y; None where the kernel cannot be compiled."""
    function = _compiled(x.dtype, variant, x.device)
    if function is None:
        return None
    max_clusters = count_multiprocessors(x.device) // CLUSTER
    params, clusters = make_params(y, x, weight, residual, variant, max_clusters)
    function.launch(clusters * CLUSTER, THREADS, (params,), pdl=pdl)
    return y


def multiply_gated(x: Tensor, weight: Tensor, pdl: bool = False) -> Tensor | None:
    """x [M, K], weight [2N, K] (gate rows, then up rows) -> silu(x Wg^T) * (x Wu^T), [M, N]; None where the
    kernel cannot be compiled.

    M > 0, both on a Hopper GPU, with no `obstacle`; rows may lie apart. pdl: see `triton_support`; the weight
    must be complete before the preceding kernel starts."""
    y = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    return _launch(y, x, weight, None, GATED, pdl=pdl)


def multiply_plain(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    *,
    in_place: bool = False,
    pdl: bool = False,
    variant: Variant | None = None,
) -> Tensor | None:
    """x [M, K], weight [N, K] -> x W^T, or residual [M, N] + x W^T, in_place: written over residual; None
    where the kernel cannot be compiled.

    As `multiply_gated` otherwise. variant: for measurements."""
    rows, width = x.shape[0], weight.shape[0]
    if variant is None:
        max_clusters = count_multiprocessors(x.device) // CLUSTER
        variant = choose_variant(rows, width, x.shape[1], residual is not None, max_clusters)
    if in_place:
        assert residual is not None
        y = residual
    else:
        y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    return _launch(y, x, weight, residual, variant, pdl=pdl)


def take_product(
    x: Tensor, weight: Tensor, residual: Tensor | None = None, pdl: bool = False
) -> Tensor | None:
    """x [M, K], weight [N, K] -> x W^T, or residual [M, N] + x W^T, written over residual; None where the
    engine takes another way."""
    if len(x) not in PLAIN_ROWS or not is_hopper(x.device) or obstacle(x, weight, residual) is not None:
        return None
    return multiply_plain(x, weight, residual, in_place=residual is not None, pdl=pdl)
