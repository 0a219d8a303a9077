"""Compiles decode_product.cu for tiles of a size, chooses these, and launches it.

`split_product` and `gated_product` take what `tiled_linear.split_linear` and `tiled_linear.tiled_linear` do,
where there is no `obstacle`.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tiny_vllm.kernels import hopper_decode, hopper_prefill
from tiny_vllm.kernels.cuda.driver import CudaFunction, load_function
from tiny_vllm.kernels.cuda.errors import CudaKernelError
from tiny_vllm.kernels.cuda.nvrtc import compile_cubin
from tiny_vllm.kernels.cuda.tensor_map import MAP_BYTES, BoxedTensor, encode_tensor_map
from tiny_vllm.kernels.hopper_prefill.launch import WATCHDOG_SECONDS, is_hopper
from tiny_vllm.kernels.triton_support import ceil_div

# Whether decode steps use it, for products alone and for gate and up.
TAKES_SPLIT_PRODUCT = False
TAKES_GATED_PRODUCT = False
# Below, Triton's products read weights at nearly the full rate; above, nobody decodes.
MIN_ROWS, MAX_ROWS = 65, 256
# A matrix of fewer rows (a router) is not worth a cluster.
MIN_WEIGHT_ROWS = 1024
TERMS = 64  # of K at a time
# Blocks of a cluster that share rows of W, rows of x, a tile. Clusters of four do not fill an H200: 128
# blocks then take two rounds.
CLUSTERS = (1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2)
BLOCKS_AT_A_TIME = 132
SHARED_LIMIT = 232448  # bytes a block of an H200 can have
MOST_STAGES = 8
# Products of these widths have their instruction in instructions.cu.
WRITTEN_WIDTHS = (64, 128, 256)
# Rows of W of a tile, and parts of K, that `choose_variant` considers.
WIDTHS = (48, 64, 96, 128, 192)
GATED_WIDTHS = (64, 96, 128, 192, 256)
SPLITS = (1, 2, 3, 4, 6, 8)
# Sums of a thread, by warpgroups: what all threads have of registers leaves room for no more.
MOST_SUMS = {1: 128, 2: 128, 3: 96, 4: 64}
# For `estimate_cycles`: what a block costs beside its steps, and bytes of parts per cycle, written and read.
BLOCK_CYCLES, PART_BYTES_PER_CYCLE = 2000, 1200
# What sums within a cluster cost: two barriers, and bytes of a tile's sums that a block sends in a cycle.
EXCHANGE_CYCLES, EXCHANGED_BYTES_PER_CYCLE = 800, 16


@dataclass(frozen=True, slots=True)
class Variant:
    """warpgroups: of 64 rows of x each. columns: rows of W of a tile (gated: half of gate, half of up).
    splits: of K. row_blocks, column_blocks, split_blocks: of a cluster, with other rows of x, of W, or other
    terms, whose sums are added there. stages: of 64 terms in shared memory."""

    warpgroups: int
    columns: int
    splits: int = 1
    row_blocks: int = 1
    column_blocks: int = 1
    split_blocks: int = 1
    stages: int = MOST_STAGES

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    @property
    def cluster(self) -> int:
        return self.row_blocks * self.column_blocks * self.split_blocks

    @property
    def parts(self) -> int:
        """Of the result."""
        return self.splits // self.split_blocks

    @property
    def kernel(self) -> Variant:
        """What it shares with variants that differ in the number of parts: one binary."""
        return replace(self, splits=self.split_blocks)

    @property
    def stage_bytes(self) -> int:
        return (self.rows + self.columns) * TERMS * 2

    @property
    def shared_bytes(self) -> int:
        """What aligns it, stages, two barriers each."""
        return 1024 + self.stages * (self.stage_bytes + 16)

    @property
    def threads(self) -> int:
        return (self.warpgroups + 1) * 128

    def count_blocks(self, rows: int, width: int, gated: bool) -> int:
        """Of a product with an x of so many rows and a result of so many columns."""
        row_clusters = ceil_div(rows, self.rows * self.row_blocks)
        return row_clusters * self.column_clusters(width, gated) * self.parts * self.cluster

    def column_clusters(self, width: int, gated: bool) -> int:
        return ceil_div(width, self.columns // (2 if gated else 1) * self.column_blocks)

    def fitted(self) -> Variant:
        """With no more stages than fit."""
        stages = (SHARED_LIMIT - 1024) // (self.stage_bytes + 16)
        return replace(self, stages=min(stages, self.stages))


Encode = Callable[[BoxedTensor], bytes]


class Params(ctypes.Structure):
    """`struct Params` of decode_product.cu. The maps want a multiple of 64 as its size."""

    _fields_ = (
        *((name, ctypes.c_char * MAP_BYTES) for name in ("x_map", "weight_map")),
        ("y", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("rows", "width", "steps", "splits", "column_clusters")),
        ("padding", ctypes.c_char * 36),
    )


def obstacle(x: Tensor, weight: Tensor, *, gated: bool = False) -> str | None:
    """Why the kernel cannot or should not take x [M, K] and weight [N, K] (gated: [2N, K]), whatever the
    device; None if it can."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"the type {x.dtype} has no tensor cores of 16 bits"
    if weight.dtype != x.dtype:
        return f"the matrix's type {weight.dtype} is not that of the rows, {x.dtype}"
    if not MIN_ROWS <= x.shape[0] <= MAX_ROWS:
        return f"{x.shape[0]} rows are not {MIN_ROWS} to {MAX_ROWS}"
    if x.shape[1] % TERMS or x.shape[1] == 0:
        return f"{x.shape[1]} terms are no multiple of {TERMS}"
    if weight.shape[0] < MIN_WEIGHT_ROWS:
        return f"{weight.shape[0]} rows of the matrix are fewer than {MIN_WEIGHT_ROWS}"
    if weight.shape[0] % (16 if gated else 8):
        return f"{weight.shape[0] // (2 if gated else 1)} columns are no multiple of 8"
    for name, tensor in (("rows", x), ("matrix", weight)):
        if tensor.stride(1) != 1 or tensor.stride(0) % 8 or tensor.data_ptr() % 16:
            return f"the {name}' values are not contiguous, or rows do not begin at multiples of 16 bytes"
    return None


def estimate_cycles(variant: Variant, rows: int, width: int, terms: int, gated: bool) -> float:
    """What a product may take, to compare variants: not a time.

    A step is bound by the tensor cores (2,048 products a cycle), by shared memory (128 bytes a cycle: what is
    copied, and what products read of it) or by what a multiprocessor gets from the L2 cache (64 bytes a
    cycle). Parts are written, and read by the next kernel."""
    tile_rows, columns = variant.rows, variant.columns
    copied = variant.stage_bytes / 128
    step = max(
        tile_rows * columns * TERMS / 2048,
        copied + 4 * variant.warpgroups * (64 * 32 + columns * 32) / 128,
        2 * copied,
    )
    rounds = ceil_div(variant.count_blocks(rows, width, gated), BLOCKS_AT_A_TIME)
    block = ceil_div(terms // TERMS, variant.splits) * step + BLOCK_CYCLES
    if variant.split_blocks > 1:
        block += EXCHANGE_CYCLES + tile_rows * columns * 4 / EXCHANGED_BYTES_PER_CYCLE
    return rounds * block + rows * width * 4 * variant.parts / PART_BYTES_PER_CYCLE


def candidates(rows: int, width: int, terms: int, gated: bool) -> Iterator[Variant]:
    """Tiles that hold all rows, or two of half as many."""
    groups = ceil_div(rows, 64)
    for warpgroups in sorted({groups, ceil_div(groups, 2)}):
        for columns in GATED_WIDTHS if gated else WIDTHS:
            half = columns // 2 if gated else columns
            for splits in SPLITS:
                for row_blocks, column_blocks, split_blocks in CLUSTERS:
                    variant = Variant(warpgroups, columns, splits, row_blocks, column_blocks, split_blocks)
                    if columns // 2 > MOST_SUMS[warpgroups] or half % (8 * row_blocks):
                        continue
                    if (row_blocks > 1 and warpgroups == groups) or width <= half * (column_blocks - 1):
                        continue
                    if splits % split_blocks or splits > terms // TERMS or (gated and variant.parts > 1):
                        continue
                    yield variant.fitted()


def choose_variant(rows: int, width: int, terms: int, gated: bool = False) -> Variant:
    """For x [rows, terms] and a result of `width` columns; the same for all that take as many tiles."""
    return _best_variant(ceil_div(rows, 64) * 64, width, terms, gated)


@functools.cache
def _best_variant(rows: int, width: int, terms: int, gated: bool) -> Variant:
    return min(
        candidates(rows, width, terms, gated),
        key=lambda variant: estimate_cycles(variant, rows, width, terms, gated),
    )


def product_instruction(width: int) -> str:
    """`multiply_shared` of so many columns, a multiple of 8."""
    count = width // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        f"template <>\nDEV void multiply_shared<{width}>"
        f"(float (&d)[{count}], u64 a, u64 b, int accumulate) {{\n"
        f'  asm volatile("{{.reg .pred p; setp.ne.b32 p, %{count + 2}, 0; "\n'
        f'    "wgmma.mma_async.sync.aligned.m64n{width}k16.f32." TYPE "." TYPE " "\n'
        f'    "{{{registers}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0;}}"\n'
        f'    : {outputs}\n    : "l"(a), "l"(b), "r"(accumulate));\n}}\n'
    )


def source(variant: Variant) -> str:
    here = Path(__file__).parent
    folders = Path(hopper_prefill.__file__).parent, Path(hopper_decode.__file__).parent, here
    texts = [(folder / "instructions.cu").read_text(encoding="utf-8") for folder in folders]
    if variant.columns not in WRITTEN_WIDTHS:
        texts.append(product_instruction(variant.columns))
    texts += ((here / name).read_text(encoding="utf-8") for name in ("silu.cu", "decode_product.cu"))
    return "".join(texts)


def macros(dtype: torch.dtype, variant: Variant, gated: bool) -> dict[str, int | str]:
    return {
        "HALF": int(dtype == torch.float16),
        "GATED": int(gated),
        "WARPGROUPS": variant.warpgroups,
        "TILE_COLUMNS": variant.columns,
        "ROW_BLOCKS": variant.row_blocks,
        "COLUMN_BLOCKS": variant.column_blocks,
        "SPLIT_BLOCKS": variant.split_blocks,
        "CLUSTER": variant.cluster,
        "STAGES": variant.stages,
        "WATCHDOG_NS": f"{WATCHDOG_SECONDS * 10**9}ull",
    }


def compile_product(dtype: torch.dtype, variant: Variant, gated: bool) -> bytes:
    """The binary for Hopper, of a `Variant.kernel`. Raises CompileError."""
    defines = macros(dtype, variant, gated)
    return compile_cubin(source(variant), name="decode_product", defines=defines, arch="sm_90a")


@functools.cache
def load_product(dtype: torch.dtype, variant: Variant, gated: bool, device: torch.device) -> CudaFunction:
    """variant: a `Variant.kernel`. Raises CudaKernelError."""
    cubin = compile_product(dtype, variant, gated)
    return load_function(cubin, "multiply_rows", shared_bytes=variant.shared_bytes, device=device)


@functools.cache
def _warn(problem: str) -> None:
    """Once, not for each of the kernels that have it."""
    warnings.warn(
        "the Hopper kernel for products of decode steps cannot be used on this machine; cuBLAS and Triton "
        f"take its place ({problem})",
        RuntimeWarning,
        stacklevel=2,
    )


@functools.cache
def _loaded(dtype: torch.dtype, kernel: Variant, gated: bool, device: torch.device) -> CudaFunction | None:
    """None, after a warning, where the kernel cannot be had."""
    try:
        return load_product(dtype, kernel, gated, device)
    except CudaKernelError as error:
        _warn(str(error)[:300])
        return None


@functools.lru_cache(maxsize=4096)
def _map(
    encode: Encode, address: int, dtype: torch.dtype, shape: tuple[int, ...], stride: int, rows: int
) -> bytes:
    """shape, stride of rows: of a matrix. rows: of a box."""
    sizes, steps = (shape[1], shape[0]), (stride * dtype.itemsize,)
    return encode(BoxedTensor(address, dtype, sizes, steps, (TERMS, rows)))


def make_params(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    variant: Variant,
    gated: bool,
    encode: Encode = encode_tensor_map,
) -> Params:
    """The kernel's argument. y: [parts, M, N], gated [M, N]. encode: makes a tensor map."""
    width = y.shape[-1]
    params = Params(
        y=y.data_ptr(),
        rows=x.shape[0],
        width=width,
        steps=x.shape[1] // TERMS,
        splits=variant.splits,
        column_clusters=variant.column_clusters(width, gated),
    )
    weight_rows = variant.columns // (2 if gated else 1) // variant.row_blocks
    boxes = (x, variant.rows // variant.column_blocks), (weight, weight_rows)
    maps = b"".join(
        _map(encode, matrix.data_ptr(), matrix.dtype, matrix.shape, matrix.stride(0), rows)
        for matrix, rows in boxes
    )
    # They are the first fields, and a copy of bytes: assigning a field would stop at the first zero.
    ctypes.memmove(ctypes.addressof(params), maps, 2 * MAP_BYTES)
    return params


def launch_product(
    function: CudaFunction, x: Tensor, weight: Tensor, variant: Variant, *, gated: bool, pdl: bool
) -> Tensor:
    """[parts, M, N] FP32; gated: [M, N] of x's type. function: of `load_product`."""
    assert variant.parts == 1 or not gated, "parts are sums, nothing else"
    rows, width = x.shape[0], weight.shape[0] // (2 if gated else 1)
    if gated:
        y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    else:
        y = torch.empty(variant.parts, rows, width, dtype=torch.float32, device=x.device)
    params = make_params(y, x, weight, variant, gated)
    function.launch(variant.count_blocks(rows, width, gated), variant.threads, (params,), pdl=pdl)
    return y


def _multiply(x: Tensor, weight: Tensor, gated: bool, pdl: bool) -> Tensor | None:
    width = weight.shape[0] // (2 if gated else 1)
    variant = choose_variant(x.shape[0], width, x.shape[1], gated)
    function = _loaded(x.dtype, variant.kernel, gated, x.device)
    return None if function is None else launch_product(function, x, weight, variant, gated=gated, pdl=pdl)


def split_product(x: Tensor, weight: Tensor, pdl: bool = False) -> Tensor | None:
    """x [M, K], weight [N, K] -> [S, M, N] FP32, to be summed over S; None where it is not taken."""
    if not (TAKES_SPLIT_PRODUCT and is_hopper(x.device)) or obstacle(x, weight) is not None:
        return None
    return _multiply(x, weight, False, pdl)


def gated_product(x: Tensor, weight: Tensor, pdl: bool = False) -> Tensor | None:
    """x [M, K], weight [2N, K] (gate rows, then up rows) -> silu(x Wg^T) * (x Wu^T), [M, N]; None where it is
    not taken."""
    if not (TAKES_GATED_PRODUCT and is_hopper(x.device)) or obstacle(x, weight, gated=True) is not None:
        return None
    return _multiply(x, weight, True, pdl)
