"""Compiles draw_product.cu, and launches it: the LM head of decode steps, whose tiles draw.

`draw_product` takes what `draw_from_linear` does, where there is no `obstacle`; `draw_tokens.join_tiles` is
the second kernel.
"""

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
from tiny_vllm.kernels.draw_tokens import SlotAdvance, TileWinners, join_tiles
from tiny_vllm.kernels.hopper_prefill.launch import WATCHDOG_SECONDS, count_multiprocessors, is_hopper
from tiny_vllm.kernels.triton_support import ceil_div

# What the kernel can take. What is given to it is up to `draw_from_linear.HOPPER_ROWS`.
MIN_ROWS, MAX_ROWS = 9, 256
COLUMNS, TERMS = 256, 64  # rows of W of a tile, and values of K at a time
THREADS = 3 * 128
# Registers per thread of the copying warpgroup and of the two that compute.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232


@dataclass(frozen=True, slots=True)
class Form:
    """rows: of x in a block's tiles, 64, which its two warpgroups take in turns, or 128, of which each has
    half. row_blocks: blocks of a cluster, with other rows of x. stages: of 64 terms in shared memory."""

    rows: int
    row_blocks: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        """What aligns it, stages, a row of logits for each of 8 warps, two barriers for each stage."""
        stage_bytes = (self.rows + COLUMNS) * TERMS * 2
        return 1024 + self.stages * (stage_bytes + 16) + 8 * COLUMNS * 4


FORMS = (Form(64, 1, 5), Form(128, 1, 4), Form(128, 2, 4))

Encode = Callable[[BoxedTensor], bytes]


class Params(ctypes.Structure):
    """`struct Params` of draw_product.cu. The maps want a multiple of 64 as its size."""

    _fields_ = (
        *((name, ctypes.c_char * MAP_BYTES) for name in ("x_map", "weight_map")),
        *(
            (name, ctypes.c_void_p)
            for name in ("maxima", "logits_won", "winners", "temperature", "keys", "slots")
        ),
        *((name, ctypes.c_int) for name in ("rows", "num_slots", "vocabulary", "steps", "tiles")),
        ("padding", ctypes.c_char * 60),
    )


def obstacle(x: Tensor, weight: Tensor) -> str | None:
    """Why the kernel cannot take x [M, K] and weight [V, K], whatever the device; None if it can."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"the type {x.dtype} has no tensor cores of 16 bits"
    if weight.dtype != x.dtype:
        return f"the matrix's type {weight.dtype} is not that of the rows, {x.dtype}"
    if not MIN_ROWS <= x.shape[0] <= MAX_ROWS:
        return f"{x.shape[0]} rows are not {MIN_ROWS} to {MAX_ROWS}"
    if x.shape[1] % TERMS or x.shape[1] == 0:
        return f"{x.shape[1]} terms are no multiple of {TERMS}"
    for name, tensor in (("rows", x), ("matrix", weight)):
        if tensor.stride(1) != 1 or tensor.stride(0) % 8 or tensor.data_ptr() % 16:
            return f"the {name}' values are not contiguous, or rows do not begin at multiples of 16 bytes"
    return None


def choose_form(rows: int) -> Form:
    """The smallest that holds so many."""
    return next(form for form in FORMS if rows <= form.rows * form.row_blocks)


def source() -> str:
    here = Path(__file__).parent
    folders = Path(hopper_prefill.__file__).parent, Path(hopper_decode.__file__).parent, here
    files = *(folder / "instructions.cu" for folder in folders), here / "draw_product.cu"
    return "".join(file.read_text(encoding="utf-8") for file in files)


def macros(dtype: torch.dtype, form: Form) -> dict[str, int | str]:
    return {
        "HALF": int(dtype == torch.float16),
        "ALTERNATE": int(form.rows == 64),
        "CLUSTER": form.row_blocks,
        "STAGES": form.stages,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "CONSUMER_REGISTERS": CONSUMER_REGISTERS,
        "WATCHDOG_NS": f"{WATCHDOG_SECONDS * 10**9}ull",
    }


def compile_draw(dtype: torch.dtype, form: Form) -> bytes:
    """The binary for Hopper. Raises CompileError."""
    return compile_cubin(source(), name="draw_product", defines=macros(dtype, form), arch="sm_90a")


@functools.cache
def _warn(problem: str) -> None:
    """Once, not for each of the kernels that have it."""
    warnings.warn(
        "the Hopper kernel of the LM head that draws cannot be used on this machine; other products take its "
        f"place ({problem})",
        RuntimeWarning,
        stacklevel=2,
    )


@functools.cache
def _loaded(dtype: torch.dtype, form: Form, device: torch.device) -> CudaFunction | None:
    """None, after a warning, where the kernel cannot be had."""
    try:
        cubin = compile_draw(dtype, form)
        return load_function(cubin, "draw_rows", shared_bytes=form.shared_bytes, device=device)
    except CudaKernelError as error:
        _warn(str(error)[:300])
        return None


@functools.lru_cache(maxsize=1024)
def _map(
    encode: Encode, address: int, dtype: torch.dtype, shape: tuple[int, ...], stride: int, rows: int
) -> bytes:
    """shape, stride of rows: of a matrix. rows: of a box."""
    sizes, steps = (shape[1], shape[0]), (stride * dtype.itemsize,)
    return encode(BoxedTensor(address, dtype, sizes, steps, (TERMS, rows)))


def make_params(
    found: TileWinners,
    x: Tensor,
    weight: Tensor,
    temperature: Tensor,
    keys: Tensor,
    slots: Tensor | None,
    form: Form,
    encode: Encode = encode_tensor_map,
) -> Params:
    """The kernel's argument. encode: makes a tensor map."""
    params = Params(
        maxima=found.maxima.data_ptr(),
        logits_won=found.logits.data_ptr(),
        winners=found.winners.data_ptr(),
        temperature=temperature.data_ptr(),
        keys=keys.data_ptr(),
        slots=None if slots is None else slots.data_ptr(),
        rows=x.shape[0],
        num_slots=temperature.shape[0],
        vocabulary=weight.shape[0],
        steps=x.shape[1] // TERMS,
        tiles=ceil_div(weight.shape[0], COLUMNS),
    )
    boxes = (x, form.rows), (weight, COLUMNS // form.row_blocks)
    maps = b"".join(
        _map(encode, matrix.data_ptr(), matrix.dtype, matrix.shape, matrix.stride(0), rows)
        for matrix, rows in boxes
    )
    # They are the first fields, and a copy of bytes: assigning a field would stop at the first zero.
    ctypes.memmove(ctypes.addressof(params), maps, 2 * MAP_BYTES)
    return params


def draw_product(
    x: Tensor,
    weight: Tensor,
    temperature: Tensor,
    keys: Tensor,
    advance: SlotAdvance | None = None,
    pdl: bool = False,
) -> Tensor | None:
    """Tokens of x [M, K] and weight [V, K], as `draw_tokens` draws them from FP32 sums; see there for the
    arguments. None where the kernel is not taken."""
    if not is_hopper(x.device) or obstacle(x, weight) is not None:
        return None
    form = choose_form(x.shape[0])
    function = _loaded(x.dtype, form, x.device)
    if function is None:
        return None
    tiles = ceil_div(weight.shape[0], COLUMNS)
    found = TileWinners.empty(x.shape[0], tiles, x.device)
    slots = None if advance is None else advance.slots
    params = make_params(found, x, weight, temperature, keys, slots, form)
    clusters = min(tiles, count_multiprocessors(x.device) // form.row_blocks)
    function.launch(clusters * form.row_blocks, THREADS, (params,), pdl=pdl)
    return join_tiles(found, temperature, keys, advance, pdl)
