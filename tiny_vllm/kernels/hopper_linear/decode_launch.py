"""Compiles decode_product.cu for tiles of a size, chooses these, and launches it.

`split_product` and `gated_product` take what `tiled_linear.split_linear` and `tiled_linear.tiled_linear` do,
where there is no `obstacle`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tiny_vllm.kernels.cuda.driver import CudaFunction, load_function
from tiny_vllm.kernels.cuda.fallback import load_or_warn
from tiny_vllm.kernels.cuda.nvrtc import compile_cubin
from tiny_vllm.kernels.cuda.tensor_map import MAP_BYTES, Encode, encode_tensor_map, set_maps
from tiny_vllm.kernels.hopper_linear.common import (
    SHARED_LIMIT,
    TERMS,
    encode_matrices,
    join_sources,
    operand_obstacle,
)
from tiny_vllm.kernels.hopper_prefill.launch import WATCHDOG_SECONDS, is_hopper
from tiny_vllm.kernels.triton_support import ceil_div

# Rows it is for. A layer of Llama-3.2-1B with 16 / 32 rows takes 41.7 / 42.4 us by Triton's products and 39.5
# / 38.8 here, with what follows output and down; of Qwen3-0.6B with 32 rows 20.6 and 16.3.
MIN_ROWS, MAX_ROWS = 9, 256
# A matrix of fewer rows (a router) is not worth a cluster.
MIN_WEIGHT_ROWS = 1024
BLOCKS_AT_A_TIME = 132
MOST_STAGES = 8
# Products of these widths have their instruction in instructions.cu.
WRITTEN_WIDTHS = (64, 128, 256)
# Rows of W of a tile, and parts of K, that `choose_variant` considers.
WIDTHS = (48, 64, 96, 128, 192)
GATED_WIDTHS = (64, 96, 112, 128, 192, 224, 256)
SPLITS = (1, 2, 3, 4)
# Of 128 rows, pairs of blocks with 64 each are slower by themselves; but whole steps of Llama-3.1-8B, which
# run at the card's power limit, take 3 % less with them. Those of smaller models, with no larger matrix than
# this, take up to 5 % more.
PAIRED_WEIGHTS = 4096 * 4096
# Sums of a thread, by warpgroups: what all threads have of registers leaves room for no more.
MOST_SUMS = {1: 128, 2: 128, 3: 96, 4: 64}
# For `estimate_cycles`, per cycle: products of a multiprocessor's tensor cores, bytes of its shared memory
# and of what it gets from the L2 cache; bytes of W that all get from memory, bytes of parts written and read.
# The first and the second are the hardware's. The others, and the factor by which products take longer, are
# fitted to 1,000 cases of three models on an H200: what is then chosen takes 1.5 % longer than the best on
# average, at worst 13 %, with the kernel that adds the parts of output and down. Of 52 products timed within
# whole steps (gpu_step_products.py) it makes a step 0.3 % longer than the best on average, at worst 2.6 %.
PRODUCTS_PER_CYCLE, PRODUCTS_TAKE = 2048, 1.2
SHARED_BYTES_PER_CYCLE, L2_BYTES_PER_CYCLE = 128, 40
WEIGHT_BYTES_PER_CYCLE, PART_BYTES_PER_CYCLE = 2600, 500


@dataclass(frozen=True, slots=True)
class Variant:
    """warpgroups: of 64 rows of x each. columns: rows of W of a tile (gated: half of gate, half of up).
    splits: of K. row_blocks: of a cluster, 1 or 2, with other rows of x and the same of W; together they have
    all rows of x. stages: of 64 terms in shared memory."""

    warpgroups: int
    columns: int
    splits: int = 1
    row_blocks: int = 1
    stages: int = MOST_STAGES

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    @property
    def kernel(self) -> Variant:
        """What it shares with variants that differ in the number of parts: one binary."""
        return replace(self, splits=1)

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

    def count_column_tiles(self, width: int, gated: bool) -> int:
        """Of a result of so many columns."""
        return ceil_div(width, self.columns // (2 if gated else 1))

    def count_blocks(self, width: int, gated: bool) -> int:
        return self.count_column_tiles(width, gated) * self.splits * self.row_blocks

    def fitted(self) -> Variant:
        """With no more stages than fit."""
        stages = (SHARED_LIMIT - 1024) // (self.stage_bytes + 16)
        return replace(self, stages=min(stages, self.stages))


class Params(ctypes.Structure):
    """`struct Params` of decode_product.cu. The maps want a multiple of 64 as its size."""

    _fields_ = (
        *((name, ctypes.c_char * MAP_BYTES) for name in ("x_map", "weight_map")),
        ("y", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("rows", "width", "steps", "splits", "column_tiles", "x_rows")),
        ("padding", ctypes.c_char * 32),
    )


def obstacle(x: Tensor, weight: Tensor, *, gated: bool = False) -> str | None:
    """Why the kernel cannot or should not take x [M, K] and weight [N, K] (gated: [2N, K]), whatever the
    device; None if it can."""
    if not MIN_ROWS <= x.shape[0] <= MAX_ROWS:
        return f"{x.shape[0]} rows are not {MIN_ROWS} to {MAX_ROWS}"
    if weight.shape[0] < MIN_WEIGHT_ROWS:
        return f"{weight.shape[0]} rows of the matrix are fewer than {MIN_WEIGHT_ROWS}"
    if weight.shape[0] % (16 if gated else 8):
        return f"{weight.shape[0] // (2 if gated else 1)} columns are no multiple of 8"
    return operand_obstacle(x, weight)


def estimate_cycles(variant: Variant, rows: int, width: int, terms: int, gated: bool) -> float:
    """What a product may take, to compare variants: not a time.

    A step is bound by the tensor cores, by shared memory (what is copied, and what products read of it) or by
    what comes from the L2 cache; all steps together, by the rate at which memory gives W. Parts are written,
    and read by the next kernel."""
    tile_rows, columns = variant.rows, variant.columns
    read = TERMS // 16 * variant.warpgroups * (64 + columns) * 32
    step = max(
        tile_rows * columns * TERMS / PRODUCTS_PER_CYCLE * PRODUCTS_TAKE,
        (variant.stage_bytes + read) / SHARED_BYTES_PER_CYCLE,
        (tile_rows + columns / variant.row_blocks) * TERMS * 2 / L2_BYTES_PER_CYCLE,
    )
    block = ceil_div(terms // TERMS, variant.splits) * step
    rounds = ceil_div(variant.count_blocks(width, gated), BLOCKS_AT_A_TIME)
    weight_bytes = width * (2 if gated else 1) * terms * 2
    part_bytes = ceil_div(rows, 64) * 64 * width * 4 * variant.splits
    product = max(rounds * block, weight_bytes / WEIGHT_BYTES_PER_CYCLE)
    return product + part_bytes / PART_BYTES_PER_CYCLE


def candidates(rows: int, width: int, terms: int, gated: bool) -> Iterator[Variant]:
    """Tiles that hold all rows, and pairs with half of them each."""
    groups = ceil_div(rows, 64)
    has_pairs = groups == 4 or (groups == 2 and not gated and width * terms > PAIRED_WEIGHTS)
    for row_blocks in (1, 2) if has_pairs else (1,):
        warpgroups = groups // row_blocks
        for columns in GATED_WIDTHS if gated else WIDTHS:
            if columns // 2 > MOST_SUMS[warpgroups] or columns // (2 if gated else 1) % (8 * row_blocks):
                continue
            for splits in (1,) if gated else SPLITS:
                if splits <= terms // TERMS:
                    yield Variant(warpgroups, columns, splits, row_blocks).fitted()


@functools.cache
def choose_variant(rows: int, width: int, terms: int, gated: bool = False) -> Variant:
    """For x [rows, terms] and a result of `width` columns; the same for all that need as many warpgroups."""

    def order(variant: Variant) -> tuple[float, float, int, int, int]:
        # Where memory or tensor cores bind, estimates are equal. Of these the fastest left the fewest
        # multiprocessors without work, then had the fewest blocks, the smallest tiles, and shared rows of W
        # (gate and up of two models, 64, 128 and 256 rows).
        cycles = estimate_cycles(variant, rows, width, terms, gated)
        blocks = variant.count_blocks(width, gated)
        idle = 1 - blocks / (ceil_div(blocks, BLOCKS_AT_A_TIME) * BLOCKS_AT_A_TIME)
        return cycles, idle, blocks, variant.stage_bytes, -variant.row_blocks

    return min(candidates(rows, width, terms, gated), key=order)


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
    is_written = variant.columns in WRITTEN_WIDTHS
    instruction = "" if is_written else product_instruction(variant.columns)
    return join_sources("ring.cu", "silu.cu", "decode_product.cu", instruction=instruction)


def macros(dtype: torch.dtype, variant: Variant, gated: bool) -> dict[str, int | str]:
    return {
        "HALF": int(dtype == torch.float16),
        "GATED": int(gated),
        "WARPGROUPS": variant.warpgroups,
        "TILE_COLUMNS": variant.columns,
        "CLUSTER": variant.row_blocks,
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
def _loaded(dtype: torch.dtype, kernel: Variant, gated: bool, device: torch.device) -> CudaFunction | None:
    """None, after a warning, where the kernel cannot be had."""
    load = functools.partial(load_product, dtype, kernel, gated, device)
    return load_or_warn(load, "the Hopper kernel for products of decode steps", "cuBLAS and Triton")


def make_params(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    variant: Variant,
    gated: bool,
    encode: Encode = encode_tensor_map,
) -> Params:
    """The kernel's argument. y: [splits, M, N], gated [M, N]. encode: makes a tensor map."""
    width = y.shape[-1]
    params = Params(
        y=y.data_ptr(),
        rows=x.shape[0],
        width=width,
        steps=x.shape[1] // TERMS,
        splits=variant.splits,
        column_tiles=variant.count_column_tiles(width, gated),
        x_rows=min(ceil_div(x.shape[0], 8) * 8, variant.rows),
    )
    weight_rows = variant.columns // (2 if gated else 1) // variant.row_blocks
    boxes = (x, params.x_rows), (weight, weight_rows)
    set_maps(params, encode_matrices(encode, boxes))
    return params


def launch_product(
    function: CudaFunction, x: Tensor, weight: Tensor, variant: Variant, *, gated: bool, pdl: bool
) -> Tensor:
    """[splits, M, N] FP32; gated: [M, N] of x's type. function: of `load_product`."""
    assert variant.splits == 1 or not gated, "parts are sums, nothing else"
    rows, width = x.shape[0], weight.shape[0] // (2 if gated else 1)
    assert rows <= variant.rows * variant.row_blocks, "a cluster has all rows"
    if gated:
        y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    else:
        y = torch.empty(variant.splits, rows, width, dtype=torch.float32, device=x.device)
    params = make_params(y, x, weight, variant, gated)
    function.launch(variant.count_blocks(width, gated), variant.threads, (params,), pdl=pdl)
    return y


def _multiply(x: Tensor, weight: Tensor, gated: bool, pdl: bool) -> Tensor | None:
    width = weight.shape[0] // (2 if gated else 1)
    variant = choose_variant(x.shape[0], width, x.shape[1], gated)
    function = _loaded(x.dtype, variant.kernel, gated, x.device)
    return None if function is None else launch_product(function, x, weight, variant, gated=gated, pdl=pdl)


def split_product(x: Tensor, weight: Tensor, pdl: bool = False) -> Tensor | None:
    """x [M, K], weight [N, K] -> [S, M, N] FP32, to be summed over S; None where it is not taken."""
    if not is_hopper(x.device) or obstacle(x, weight) is not None:
        return None
    return _multiply(x, weight, False, pdl)


def gated_product(x: Tensor, weight: Tensor, pdl: bool = False) -> Tensor | None:
    """x [M, K], weight [2N, K] (gate rows, then up rows) -> silu(x Wg^T) * (x Wu^T), [M, N]; None where it is
    not taken."""
    if not is_hopper(x.device) or obstacle(x, weight, gated=True) is not None:
        return None
    return _multiply(x, weight, True, pdl)
