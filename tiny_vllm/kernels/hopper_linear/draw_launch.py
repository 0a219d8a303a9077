"""Compiles draw_product.cu, and launches it: the LM head of decode steps, whose tiles draw.

`draw_product` takes what `draw_from_linear` does, where there is no `obstacle`; `draw_tokens.join_tiles` is
the second kernel.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_vllm.kernels.cuda.driver import CudaFunction, load_function
from tiny_vllm.kernels.cuda.fallback import load_or_warn
from tiny_vllm.kernels.cuda.nvrtc import compile_cubin
from tiny_vllm.kernels.cuda.tensor_map import MAP_BYTES, Encode, encode_tensor_map, set_maps
from tiny_vllm.kernels.draw_tokens import SlotAdvance, TileWinners, join_tiles
from tiny_vllm.kernels.hopper_linear.common import TERMS, encode_matrices, join_sources, operand_obstacle
from tiny_vllm.kernels.hopper_prefill.launch import WATCHDOG_SECONDS, count_multiprocessors, is_hopper
from tiny_vllm.kernels.triton_support import ceil_div

# What the kernel can take. What is given to it is up to `draw_from_linear.HOPPER_ROWS`.
MIN_ROWS, MAX_ROWS = 9, 256
COLUMNS = 256  # rows of W of a tile
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
    if not MIN_ROWS <= x.shape[0] <= MAX_ROWS:
        return f"{x.shape[0]} rows are not {MIN_ROWS} to {MAX_ROWS}"
    return operand_obstacle(x, weight)


def choose_form(rows: int) -> Form:
    """The smallest that holds so many."""
    return next(form for form in FORMS if rows <= form.rows * form.row_blocks)


def source() -> str:
    return join_sources("ring.cu", "draw_product.cu")


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


def load_draw(dtype: torch.dtype, form: Form, device: torch.device) -> CudaFunction:
    """Raises CudaKernelError."""
    cubin = compile_draw(dtype, form)
    return load_function(cubin, "draw_rows", shared_bytes=form.shared_bytes, device=device)


@functools.cache
def _loaded(dtype: torch.dtype, form: Form, device: torch.device) -> CudaFunction | None:
    """None, after a warning, where the kernel cannot be had."""
    load = functools.partial(load_draw, dtype, form, device)
    return load_or_warn(load, "the Hopper kernel of the LM head that draws", "other products")


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
    set_maps(params, encode_matrices(encode, boxes))
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
