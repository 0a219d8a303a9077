"""Compiles attention.cu for a shape, and launches it.

The arguments are those of `prefill_attention.attend_chunks`, which asks `obstacle` first.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tiny_vllm.kernels.cuda.driver import CudaFunction, architecture, load_function
from tiny_vllm.kernels.cuda.fallback import load_or_warn
from tiny_vllm.kernels.cuda.nvrtc import compile_cubin
from tiny_vllm.kernels.cuda.tensor_map import MAP_BYTES, BoxedTensor, Encode, encode_tensor_map, set_maps
from tiny_vllm.kernels.fp8_cache import Cache, Fp8Cache, cache_tensors

# A wait in the kernel that lasts so long ends it with an error.
WATCHDOG_SECONDS = 4
LOG2_E = 1.4426950408889634
SPAN = 64  # values of a head in a row of shared memory
PAGE_SIZES = (16, 32, 64)
INTEGERS = {torch.int32: "int", torch.int64: "long long"}
# Registers per thread of the copying and the computing warpgroups, by the number of the latter: all of them
# share the 64 K of a multiprocessor.
REGISTERS = {2: (40, 232), 3: (32, 160)}
BLOCK_N = 128  # keys of a step, as in attention.cu
UNIT = 16  # rows of FP8 codes that are converted at a time, as in attention.cu
# By head size, units of codes in shared memory: about two steps' and one step's, what is left of it.
SLOTS = {64: 30, 128: 15}


@dataclass(frozen=True, slots=True)
class Variant:
    """warpgroups: of 64 rows each, 2 or 3. stages: steps' keys and values in shared memory, at least 2."""

    warpgroups: int
    stages: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What the kernel is compiled for. table, starts, lens: types of the integer arguments. is_fp8: caches
    are Fp8Cache."""

    head_dim: int
    group: int
    num_kv_heads: int
    page_size: int
    dtype: torch.dtype
    is_windowed: bool
    has_sinks: bool
    table: torch.dtype
    starts: torch.dtype
    lens: torch.dtype
    is_fp8: bool = False

    @property
    def slots(self) -> int:
        return SLOTS[self.head_dim] if self.is_fp8 else 0


# By head size. Heads of 64 leave room for three warpgroups, which keep more exponents under way.
VARIANTS = {64: Variant(warpgroups=3, stages=4), 128: Variant(warpgroups=2, stages=2)}
# The same with fewer rows.
SMALL_VARIANTS = {64: Variant(warpgroups=2, stages=4)}


class Params(ctypes.Structure):
    """`struct Params` of attention.cu."""

    _fields_ = (
        *((name, ctypes.c_char * MAP_BYTES) for name in ("q_map", "k_map", "v_map")),
        *(
            (name, ctypes.c_void_p)
            for name in ("output", "page_table", "query_starts", "context_lens", "sinks", "counter")
        ),
        ("factor", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("table_width", "num_sequences", "window")),
        *((name, ctypes.c_void_p) for name in ("k_codes", "v_codes", "k_scales", "v_scales")),
        # The device's structure is as large as its alignment asks.
        ("rest", ctypes.c_char * 32),
    )


def obstacle(q: Tensor, k_cache: Cache, v_cache: Cache, scale: float, softcap: float | None) -> str | None:
    """Why the kernel cannot take these arguments, whatever the device; None if it can."""
    num_kv_heads, page_size, head_dim = k_cache.shape[1:]
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"the type {q.dtype} has no tensor cores of 16 bits"
    if not k_cache.dtype == v_cache.dtype == q.dtype:
        return f"the cache's type {k_cache.dtype} is not that of the queries, {q.dtype}"
    if head_dim not in VARIANTS:
        return f"the head size {head_dim} is neither 64 nor 128"
    if page_size not in PAGE_SIZES:
        return f"the page size {page_size} is none of {PAGE_SIZES}"
    if (group := q.shape[1] // num_kv_heads) > 64:
        return f"{group} query heads per KV head are more than a warpgroup's rows"
    if softcap is not None:
        return f"scores have a soft cap of {softcap}"
    if not scale > 0:
        return f"the scale {scale} is not positive"
    if isinstance(k_cache, Fp8Cache) != isinstance(v_cache, Fp8Cache):
        return "one cache is in FP8"
    if k_cache.shape.numel() // head_dim >= 2**31:
        return "the cache has 2^31 rows or more"
    tensors = q, *cache_tensors(k_cache), *cache_tensors(v_cache)
    if any(tensor is not None and tensor.data_ptr() % 16 for tensor in tensors):
        return "an address is no multiple of 16"
    return None


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether it is a GPU of compute capability 9.0, what wgmma exists on."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def count_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def source() -> str:
    folder = Path(__file__).parent
    files = "instructions.cu", "fp8_instructions.cu", "attention.cu"
    return "".join((folder / name).read_text(encoding="utf-8") for name in files)


def macros(shape: Shape, variant: Variant) -> dict[str, int | str]:
    producer, consumer = REGISTERS[variant.warpgroups]
    return {
        "HEAD_DIM": shape.head_dim,
        "GROUP": shape.group,
        "KV_HEADS": shape.num_kv_heads,
        "PAGE_SIZE": shape.page_size,
        "HALF": int(shape.dtype == torch.float16),
        "WINDOWED": int(shape.is_windowed),
        "SINKS": int(shape.has_sinks),
        "WARPGROUPS": variant.warpgroups,
        "STAGES": variant.stages,
        "SLOTS": shape.slots,
        "PRODUCER_REGISTERS": producer,
        "CONSUMER_REGISTERS": consumer,
        "WATCHDOG_NS": f"{WATCHDOG_SECONDS * 10**9}ull",
        "TABLE": INTEGERS[shape.table],
        "STARTS": INTEGERS[shape.starts],
        "LENS": INTEGERS[shape.lens],
    }


def shared_bytes(shape: Shape, variant: Variant) -> int:
    """Dynamic shared memory of a block: what aligns it, buffers, codes with their scales and barriers,
    barriers, scratch words, tiles, a factor."""
    queries = 2 * variant.warpgroups * 64 * shape.head_dim * 2
    keys_and_values = 2 * variant.stages * BLOCK_N * shape.head_dim * 2
    codes = shape.slots * (UNIT * (shape.head_dim + 2) + 2 * 8)
    return 1024 + queries + keys_and_values + codes + 2 * (2 + 2 * variant.stages) * 8 + 128 * 4 + 2 * 28 + 4


def count_tiles(num_tokens: int, num_sequences: int, group: int, variant: Variant) -> int:
    """Per KV head, at most; the host does not know the lengths."""
    return num_tokens // (variant.warpgroups * 64 // group) + num_sequences


def choose_variant(
    head_dim: int, num_tokens: int, num_sequences: int, group: int, num_kv_heads: int, multiprocessors: int
) -> Variant:
    """Tiles of fewer rows where there are too few to go round: the longest takes the time then."""
    variant = VARIANTS[head_dim]
    tiles = count_tiles(num_tokens, num_sequences, group, variant) * num_kv_heads
    return variant if tiles >= multiprocessors else SMALL_VARIANTS.get(head_dim, variant)


def compile_attention(shape: Shape, variant: Variant, device: torch.device) -> CudaFunction:
    """Raises CompileError or DriverError."""
    cubin = compile_cubin(source(), name="prefill", defines=macros(shape, variant), arch=architecture(device))
    return load_function(cubin, "attend_chunks", shared_bytes=shared_bytes(shape, variant), device=device)


@functools.cache
def _compiled(shape: Shape, variant: Variant, device: torch.device) -> CudaFunction | None:
    """None, after a warning, where the kernel cannot be had."""
    load = functools.partial(compile_attention, shape, variant, device)
    return load_or_warn(load, "the Hopper kernel of prefill attention", "a slower Triton kernel")


@functools.lru_cache(maxsize=1024)
def _query_map(
    encode: Encode, address: int, dtype: torch.dtype, shape: tuple[int, ...], group: int, queries: int
) -> bytes:
    """shape: of q."""
    num_tokens, num_heads, head_dim = shape
    row = head_dim * dtype.itemsize
    sizes, steps = (head_dim, num_heads, num_tokens), (row, row * num_heads)
    return encode(BoxedTensor(address, dtype, sizes, steps, (SPAN, group, queries)))


@functools.lru_cache(maxsize=1024)
def _page_map(encode: Encode, address: int, dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """shape: of a cache."""
    num_pages, num_kv_heads, page_size, head_dim = shape
    sizes, steps = (head_dim, num_pages * num_kv_heads * page_size), (head_dim * dtype.itemsize,)
    return encode(BoxedTensor(address, dtype, sizes, steps, (SPAN, page_size)))


def make_params(
    output: Tensor,
    q: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    page_table: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    counter: Tensor,
    variant: Variant,
    encode: Encode = encode_tensor_map,
) -> Params:
    """The kernel's argument. sinks: FP32. counter: int32, 0. encode: makes a tensor map."""
    group = q.shape[1] // k_cache.shape[1]
    queries = variant.warpgroups * 64 // group
    params = Params(
        output=output.data_ptr(),
        page_table=page_table.data_ptr(),
        query_starts=query_starts.data_ptr(),
        context_lens=context_lens.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        counter=counter.data_ptr(),
        table_width=page_table.stride(0),
        factor=scale * LOG2_E,
        num_sequences=len(context_lens),
        window=window or 0,
    )
    maps = _query_map(encode, q.data_ptr(), q.dtype, q.shape, group, queries)
    (k_values, k_scales), (v_values, v_scales) = cache_tensors(k_cache), cache_tensors(v_cache)
    if k_scales is not None and v_scales is not None:
        params.k_codes, params.v_codes = k_values.data_ptr(), v_values.data_ptr()
        params.k_scales, params.v_scales = k_scales.data_ptr(), v_scales.data_ptr()
    else:
        for values in (k_values, v_values):
            maps += _page_map(encode, values.data_ptr(), values.dtype, values.shape)
    set_maps(params, maps)
    return params


@functools.cache
def _counter(device: torch.device, stream: int) -> Tensor:
    """A stream's own: its launches come one after another, and each leaves 0."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def attend(
    q: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    page_table: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    output: Tensor | None = None,
    variant: Variant | None = None,
) -> Tensor | None:
    """q [T, Hq, D] -> [T, Hq, D], written to `output` if there is one; None where the kernel cannot be
    compiled.

    All tensors contiguous, on a Hopper GPU, with no `obstacle`. variant: for measurements."""
    _, num_kv_heads, page_size, head_dim = k_cache.shape
    num_tokens, num_heads, _ = q.shape
    group = num_heads // num_kv_heads
    multiprocessors = count_multiprocessors(q.device)
    variant = variant or choose_variant(
        head_dim, num_tokens, len(context_lens), group, num_kv_heads, multiprocessors
    )
    shape = Shape(
        head_dim,
        group,
        num_kv_heads,
        page_size,
        q.dtype,
        window is not None,
        sinks is not None,
        page_table.dtype,
        query_starts.dtype,
        context_lens.dtype,
        isinstance(k_cache, Fp8Cache),
    )
    function = _compiled(shape, variant, q.device)
    if function is None:
        return None
    output = torch.empty_like(q) if output is None else output
    assert output.is_contiguous() and output.data_ptr() % 16 == 0
    sinks = None if sinks is None else sinks.float()
    tables = page_table, query_starts, context_lens
    counter = _counter(q.device, torch.cuda.current_stream(q.device).cuda_stream)
    params = make_params(output, q, k_cache, v_cache, *tables, scale, window, sinks, counter, variant)
    tiles = count_tiles(num_tokens, len(context_lens), group, variant) * num_kv_heads
    blocks = min(tiles, multiprocessors)
    function.launch(blocks, (variant.warpgroups + 1) * 128, (params,))
    return output
