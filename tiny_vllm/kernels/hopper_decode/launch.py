"""Compiles attention.cu for a shape, and launches it.

The arguments are those of `paged_decode_attention.attend_pages` and, for queries that are yet to be made, of
`rope_and_attend`. Both ask `takes` first.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tiny_vllm.kernels.cuda.driver import CudaFunction, architecture, load_function
from tiny_vllm.kernels.cuda.fallback import load_or_warn
from tiny_vllm.kernels.cuda.nvrtc import compile_cubin
from tiny_vllm.kernels.cuda.tensor_map import MAP_BYTES, BoxedTensor, Encode, encode_tensor_map, set_maps
from tiny_vllm.kernels.fp8_cache import Cache, Fp8Cache, cache_tensors
from tiny_vllm.kernels.hopper_prefill.launch import (
    INTEGERS,
    LOG2_E,
    SPAN,
    WATCHDOG_SECONDS,
    count_multiprocessors,
    is_hopper,
)
from tiny_vllm.kernels.rope_from_parts import HeadNorms

# Whether the engine uses it, and whether it makes queries of parts: measurements compare.
TAKES_HOPPER_DECODE = True
TAKES_PARTS = True
# Below, what Triton's kernels lose to the limit is less than the kernel that rotates costs.
MIN_SEQUENCES = 16
# Their lengths and rows lie in shared memory.
MAX_SEQUENCES = 512
MAX_GROUP = 8
SPAN_BYTES = SPAN * 2
SLOTS = 4


@dataclass(frozen=True, slots=True)
class Variant:
    """tile: positions that a warp takes at a time, 32, 64 or 128. stages: tiles of keys and values in shared
    memory, a multiple of warps. warps: that compute, a power of two. blocks: per multiprocessor. extra:
    positions that a sequence's head counts beyond its context when work is shared out. query_warps: that make
    queries of parts, a divisor of SLOTS; 1 copies them where they are given."""

    tile: int = 64
    stages: int = 12
    warps: int = 4
    blocks: int = 1
    extra: int = 32
    query_warps: int = 1


# By head size. Two blocks are up to 4 % faster with heads of 64; with heads of 128 1 to 10 % slower, except
# with many rows of padding. Such a row, a context of one token, costs as much as some hundred tokens.
VARIANTS = {64: Variant(tile=64, stages=4, blocks=2, extra=64), 128: Variant(tile=32, extra=48)}
# As many warps as registers allow: with one, batches of short contexts would wait for queries; one was not
# measured.
PARTS_VARIANTS = {64: replace(VARIANTS[64], query_warps=2), 128: replace(VARIANTS[128], query_warps=4)}
# Of FP8: what a pair costs is the time of twice as many positions, and a byte takes more than twice as many
# instructions, so there are eight warps with heads of 128, too. Tiles of 128 spill with two blocks.
FP8_VARIANTS = {
    64: Variant(tile=64, stages=8, blocks=2, extra=128),
    128: Variant(tile=64, stages=8, warps=8, extra=96),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What the kernel is compiled for. table, lens: types of the integer arguments. is_fp8: caches are
    Fp8Cache. from_parts: it makes queries, keys and values, of a product with a bias, with norms of heads."""

    head_dim: int
    group: int
    num_kv_heads: int
    page_size: int
    table: torch.dtype
    lens: torch.dtype
    is_fp8: bool = False
    from_parts: bool = False
    has_bias: bool = False
    has_norms: bool = False

    @property
    def variant(self) -> Variant:
        if self.from_parts:
            return PARTS_VARIANTS[self.head_dim]
        return (FP8_VARIANTS if self.is_fp8 else VARIANTS)[self.head_dim]

    @property
    def row_bytes(self) -> int:
        """Of a key or value."""
        return self.head_dim if self.is_fp8 else self.head_dim * 2


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where blocks leave what belongs to another block's pair, for launches one after another. parts: FP32.
    flags: int32, 0 before a launch and after it."""

    parts: Tensor
    flags: Tensor


@dataclass(frozen=True, slots=True)
class QueryParts:
    """What queries and the newest keys and values are made of, see `rope_from_parts`. parts [S, B, (Hq + 2
    Hkv) * D]; bias [columns]; cos_sin [max_len, R] FP32; cells [B] int64."""

    parts: Tensor
    bias: Tensor | None
    cos_sin: Tensor
    cells: Tensor
    head_norms: HeadNorms | None

    @property
    def floats(self) -> list[Tensor]:
        norms = [] if self.head_norms is None else [self.head_norms.q, self.head_norms.k]
        return [self.parts, self.cos_sin, *([] if self.bias is None else [self.bias]), *norms]


class Params(ctypes.Structure):
    """`struct Params` of attention.cu."""

    _fields_ = (
        *((name, ctypes.c_char * MAP_BYTES) for name in ("k_map", "v_map")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("q", "output", "k_cache", "v_cache", "k_scales", "v_scales"),
                *("page_table", "context_lens", "table_rows", "parts", "flags"),
                *("qkv_parts", "bias", "cos_sin", "cells", "q_norm", "k_norm"),
            )
        ),
        *((name, ctypes.c_float) for name in ("factor", "eps")),
        *((name, ctypes.c_int) for name in ("table_width", "num_sequences", "num_qkv_parts")),
        # The device's structure is as large as its alignment asks.
        ("rest", ctypes.c_char * 36),
    )


def obstacle(
    num_heads: int,
    k_cache: Cache,
    v_cache: Cache,
    page_table: Tensor,
    context_lens: Tensor,
    table_rows: Tensor,
    scale: float,
) -> str | None:
    """Why the kernel cannot take a batch of these, whatever the device; None if it can. table_rows: like
    context_lens, if there are none."""
    num_kv_heads, page_size, head_dim = k_cache.shape[1:]
    num_sequences = len(context_lens)
    if not k_cache.dtype == v_cache.dtype == torch.bfloat16:
        return f"the cache's type {k_cache.dtype} is not bfloat16"
    if head_dim not in VARIANTS:
        return f"the head size {head_dim} is neither 64 nor 128"
    if page_size % 16:
        return f"the page size {page_size} is no multiple of 16"
    if (group := num_heads // num_kv_heads) > MAX_GROUP:
        return f"{group} query heads per KV head are more than {MAX_GROUP}"
    if not MIN_SEQUENCES <= num_sequences <= MAX_SEQUENCES:
        return f"{num_sequences} sequences are not {MIN_SEQUENCES} to {MAX_SEQUENCES}"
    if page_table.dtype not in INTEGERS or context_lens.dtype not in INTEGERS:
        return "tables are not of integers"
    if table_rows.dtype != context_lens.dtype:
        return "lengths and rows of the table are of two types"
    if not scale > 0:
        return f"the scale {scale} is not positive"
    if k_cache.shape.numel() // head_dim >= 2**31:
        return "the cache has 2^31 rows or more"
    if isinstance(k_cache, Fp8Cache) != isinstance(v_cache, Fp8Cache):
        return "one cache is in FP8"
    tensors = [*_tensors_of(k_cache), *_tensors_of(v_cache)]
    if not (all(tensor.is_contiguous() for tensor in tensors) and page_table.stride(1) == 1):
        return "a cache or table is not contiguous"
    if any(tensor.data_ptr() % 16 for tensor in tensors):
        return "an address is no multiple of 16"
    return None


def obstacle_of_parts(made: QueryParts, k_cache: Cache) -> str | None:
    """Why the kernel cannot make queries of these, where there is no `obstacle` otherwise."""
    if isinstance(k_cache, Fp8Cache):
        return "caches are in FP8"
    if made.parts.dtype != torch.float32:
        return f"the parts' type {made.parts.dtype} is not float32"
    if made.bias is not None and made.bias.dtype != k_cache.dtype:
        return f"the bias's type {made.bias.dtype} is not the cache's"
    if made.cos_sin.shape[1] != k_cache.shape[3]:
        return f"{made.cos_sin.shape[1]} of {k_cache.shape[3]} dimensions are rotated"
    if (
        made.head_norms is not None
        and not made.head_norms.q.dtype == made.head_norms.k.dtype == torch.float32
    ):
        return "norms of heads are not in float32"
    if not made.cells.is_contiguous():
        return "cells are not contiguous"
    if any(not tensor.is_contiguous() or tensor.data_ptr() % 16 for tensor in made.floats):
        return "parts, or what is applied to them, are not contiguous, or no multiple of 16 is their address"
    return None


def _tensors_of(cache: Cache) -> list[Tensor]:
    return [cache.codes, cache.scales] if isinstance(cache, Fp8Cache) else [cache]


def source() -> str:
    folder = Path(__file__).parent
    files = (
        folder.parent / "hopper_prefill" / "instructions.cu",
        *(folder / name for name in ("instructions.cu", "attention.cu")),
    )
    return "".join(file.read_text(encoding="utf-8") for file in files)


def macros(shape: Shape, variant: Variant) -> dict[str, int | str]:
    return {
        "HEAD_DIM": shape.head_dim,
        "GROUP": shape.group,
        "KV_HEADS": shape.num_kv_heads,
        "PAGE_SIZE": shape.page_size,
        "FP8": int(shape.is_fp8),
        "HALF": int(shape.is_fp8),
        "TILE": variant.tile,
        "STAGES": variant.stages,
        "WARPS": variant.warps,
        "QUERY_WARPS": variant.query_warps,
        "BLOCKS": variant.blocks,
        "EXTRA_POSITIONS": variant.extra,
        "SEQUENCES": MAX_SEQUENCES,
        "FROM_PARTS": int(shape.from_parts),
        "BIAS": int(shape.has_bias),
        "NORMS": int(shape.has_norms),
        "WATCHDOG_NS": f"{WATCHDOG_SECONDS * 10**9}ull",
        "TABLE": INTEGERS[shape.table],
        "LENS": INTEGERS[shape.lens],
    }


def num_threads(variant: Variant) -> int:
    """Of a block: two warps copy keys and values."""
    return (variant.warps + 2 + variant.query_warps) * 32


def part_floats(head_dim: int) -> int:
    """Of a warp's or a block's part of an output."""
    return (head_dim // 16 + 1) * 128


def shared_bytes(shape: Shape, variant: Variant) -> int:
    """Dynamic shared memory of a block: what aligns it, tiles and scales, slots, parts, lengths and
    rows, barriers."""
    scale, scale_copy = (2, 16) if shape.is_fp8 else (0, 0)
    tiles = 2 * variant.stages * variant.tile * (shape.row_bytes + scale)
    slots = SLOTS * (shape.group * shape.head_dim * 2 + 2 * (shape.row_bytes + scale_copy))
    parts = variant.warps * part_floats(shape.head_dim) * 4
    barriers = 2 * variant.stages + 3 * SLOTS + variant.warps
    return 1024 + tiles + slots + parts + MAX_SEQUENCES * 8 + barriers * 8


def num_blocks(variant: Variant, device: torch.device) -> int:
    return count_multiprocessors(device) * variant.blocks


def make_workspace(k_cache: Cache, variant: Variant | None = None) -> Workspace:
    """Fills the flags with zeros."""
    head_dim, device = k_cache.shape[3], cache_tensors(k_cache)[0].device
    variants = FP8_VARIANTS if isinstance(k_cache, Fp8Cache) else VARIANTS
    blocks = num_blocks(variant or variants[head_dim], device)
    parts = torch.empty(blocks, part_floats(head_dim), dtype=torch.float32, device=device)
    return Workspace(parts, torch.zeros(blocks, dtype=torch.int32, device=device))


def workspace_of(k_cache: Cache) -> Workspace | None:
    """For launches over such caches; None where there will be none, because of the device or the heads."""
    device, head_dim = cache_tensors(k_cache)[0].device, k_cache.shape[3]
    return make_workspace(k_cache) if is_hopper(device) and head_dim in VARIANTS else None


def compile_attention(shape: Shape, variant: Variant, device: torch.device) -> CudaFunction:
    """Raises CompileError or DriverError."""
    cubin = compile_cubin(source(), name="decode", defines=macros(shape, variant), arch=architecture(device))
    return load_function(cubin, "attend_decodes", shared_bytes=shared_bytes(shape, variant), device=device)


@functools.cache
def _compiled(shape: Shape, variant: Variant, device: torch.device) -> CudaFunction | None:
    """None, after a warning, where the kernel cannot be had."""
    load = functools.partial(compile_attention, shape, variant, device)
    return load_or_warn(load, "the Hopper kernel of decode attention", "a slower Triton kernel")


def shape_of(
    num_heads: int,
    k_cache: Cache,
    page_table: Tensor,
    context_lens: Tensor,
    made: QueryParts | None = None,
) -> Shape:
    """made: what queries are made of, if they are not given."""
    _, num_kv_heads, page_size, head_dim = k_cache.shape
    return Shape(
        head_dim=head_dim,
        group=num_heads // num_kv_heads,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        table=page_table.dtype,
        lens=context_lens.dtype,
        is_fp8=isinstance(k_cache, Fp8Cache),
        from_parts=made is not None,
        has_bias=made is not None and made.bias is not None,
        has_norms=made is not None and made.head_norms is not None,
    )


def takes(
    num_heads: int,
    k_cache: Cache,
    v_cache: Cache,
    page_table: Tensor,
    context_lens: Tensor,
    table_rows: Tensor,
    scale: float,
    made: QueryParts | None = None,
) -> bool:
    """Whether the engine should have `attend` take a batch of these, with whole contexts and plain scores;
    with `made`, whether `attend_from_parts` should."""
    device = page_table.device
    if not (TAKES_HOPPER_DECODE and is_hopper(device)):
        return False
    tensors = k_cache, v_cache, page_table, context_lens
    if obstacle(num_heads, *tensors, table_rows, scale) is not None:
        return False
    if made is not None and not (TAKES_PARTS and obstacle_of_parts(made, k_cache) is None):
        return False
    shape = shape_of(num_heads, k_cache, page_table, context_lens, made)
    return _compiled(shape, shape.variant, device) is not None


@functools.lru_cache(maxsize=1024)
def _page_map(encode: Encode, address: int, row_bytes: int, num_rows: int, piece: int) -> bytes:
    """Of a cache's rows. Boxes are pieces of pages: the spans of 128 bytes of a row behind each other, or
    several rows in a span. Values are moved as they are, so they may as well be called BF16."""
    sharing = max(SPAN_BYTES // row_bytes, 1)
    spans = sharing * row_bytes // SPAN_BYTES
    sizes, steps = (SPAN, num_rows // sharing, spans), (sharing * row_bytes, SPAN_BYTES)
    return encode(BoxedTensor(address, torch.bfloat16, sizes, steps, (SPAN, piece // sharing, spans)))


def piece_of(page_size: int, variant: Variant) -> int:
    """Positions that a copy takes."""
    return next(piece for piece in (64, 32, 16) if page_size % piece == 0 and variant.tile % piece == 0)


def make_params(
    output: Tensor,
    queries: Tensor | QueryParts,
    k_cache: Cache,
    v_cache: Cache,
    page_table: Tensor,
    context_lens: Tensor,
    table_rows: Tensor | None,
    scale: float,
    workspace: Workspace,
    variant: Variant,
    encode: Encode = encode_tensor_map,
) -> Params:
    """The kernel's argument. encode: makes a tensor map."""
    (k_values, k_scales), (v_values, v_scales) = cache_tensors(k_cache), cache_tensors(v_cache)
    *rows, head_dim = k_cache.shape
    sizes = head_dim * k_values.itemsize, math.prod(rows), piece_of(k_cache.shape[2], variant)
    maps = b"".join(_page_map(encode, values.data_ptr(), *sizes) for values in (k_values, v_values))
    params = Params(
        output=output.data_ptr(),
        k_cache=k_values.data_ptr(),
        v_cache=v_values.data_ptr(),
        k_scales=None if k_scales is None else k_scales.data_ptr(),
        v_scales=None if v_scales is None else v_scales.data_ptr(),
        page_table=page_table.data_ptr(),
        context_lens=context_lens.data_ptr(),
        table_rows=None if table_rows is None else table_rows.data_ptr(),
        parts=workspace.parts.data_ptr(),
        flags=workspace.flags.data_ptr(),
        factor=scale * LOG2_E,
        table_width=page_table.stride(0),
        num_sequences=len(context_lens),
    )
    set_maps(params, maps)
    if isinstance(queries, Tensor):
        params.q = queries.data_ptr()
    else:
        params.qkv_parts, params.num_qkv_parts = queries.parts.data_ptr(), len(queries.parts)
        params.bias = None if queries.bias is None else queries.bias.data_ptr()
        params.cos_sin, params.cells = queries.cos_sin.data_ptr(), queries.cells.data_ptr()
        if (norms := queries.head_norms) is not None:
            params.q_norm, params.k_norm, params.eps = norms.q.data_ptr(), norms.k.data_ptr(), norms.eps
    return params


def attend(
    q: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    page_table: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    table_rows: Tensor | None = None,
    output: Tensor | None = None,
    workspace: Workspace | None = None,
    pdl: bool = False,
    variant: Variant | None = None,
) -> Tensor | None:
    """q [B, Hq, D] -> [B, Hq, D], written to `output` if there is one; None where the kernel cannot be
    compiled.

    q and output contiguous, on a Hopper GPU, with no `obstacle`. workspace: of `make_workspace`, by default
    one that is made here, which pdl cannot overlap. variant: for measurements."""
    output = torch.empty_like(q) if output is None else output
    assert q.is_contiguous() and output.is_contiguous() and q.dtype == k_cache.dtype
    assert q.data_ptr() % 16 == 0 and output.data_ptr() % 4 == 0
    shape = shape_of(q.shape[1], k_cache, page_table, context_lens)
    arguments = q, k_cache, v_cache, page_table, context_lens, table_rows, scale
    return _launch(output, *arguments, workspace, pdl, shape, variant or shape.variant)


def attend_from_parts(
    made: QueryParts,
    k_cache: Cache,
    v_cache: Cache,
    page_table: Tensor,
    context_lens: Tensor,
    num_heads: int,
    scale: float,
    *,
    table_rows: Tensor | None = None,
    workspace: Workspace | None = None,
    pdl: bool = False,
    variant: Variant | None = None,
) -> Tensor | None:
    """-> [B, Hq, D], as `attend` of the queries of these parts; writes the newest keys and values.

    On a Hopper GPU, with no `obstacle` and no `obstacle_of_parts`. With pdl, cells must be complete early."""
    sizes = len(context_lens), num_heads, k_cache.shape[3]
    output = torch.empty(sizes, dtype=k_cache.dtype, device=made.parts.device)
    assert made.parts.shape[1:] == (sizes[0], (num_heads + 2 * k_cache.shape[1]) * sizes[2])
    assert made.cells.dtype == torch.int64
    shape = shape_of(num_heads, k_cache, page_table, context_lens, made)
    arguments = made, k_cache, v_cache, page_table, context_lens, table_rows, scale
    return _launch(output, *arguments, workspace, pdl, shape, variant or shape.variant)


def _launch(
    output: Tensor,
    queries: Tensor | QueryParts,
    k_cache: Cache,
    v_cache: Cache,
    page_table: Tensor,
    context_lens: Tensor,
    table_rows: Tensor | None,
    scale: float,
    workspace: Workspace | None,
    pdl: bool,
    shape: Shape,
    variant: Variant,
) -> Tensor | None:
    """Returns `output`, or None where the kernel cannot be compiled."""
    function = _compiled(shape, variant, output.device)
    if function is None:
        return None
    blocks = num_blocks(variant, output.device)
    if workspace is None:
        workspace, pdl = make_workspace(k_cache, variant), False
    assert len(workspace.flags) == blocks
    params = make_params(
        output, queries, k_cache, v_cache, page_table, context_lens, table_rows, scale, workspace, variant
    )
    function.launch(blocks, num_threads(variant), (params,), pdl=pdl)
    return output
