"""Runs the Hopper kernel of the LM head that draws on the CPU, see hopper_cluster_emulator.h."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from tests.helpers.emulator import load_emulator
from tests.helpers.hopper_decode import Written
from tests.helpers.hopper_prefill import emulated_map
from tiny_vllm.kernels.draw_tokens import TileWinners
from tiny_vllm.kernels.hopper_linear import draw_launch
from tiny_vllm.kernels.hopper_linear.draw_launch import COLUMNS, Form, Params, make_params
from tiny_vllm.kernels.sampling_noise import log_race_times
from tiny_vllm.kernels.triton_support import ceil_div

HERE = Path(__file__).parent


@functools.cache
def emulated_library(dtype: torch.dtype, form: Form, mistake: tuple[str, str] | None) -> ctypes.CDLL:
    folder = Path(draw_launch.__file__).parent
    ring, draw = ((folder / name).read_text(encoding="utf-8") for name in ("ring.cu", "draw_product.cu"))
    if mistake is not None:
        assert draw.count(mistake[0]) == 1, f"not once in draw_product.cu: {mistake[0]}"
        draw = draw.replace(*mistake)
    decode, entry = (
        (HERE / name).read_text(encoding="utf-8")
        for name in ("hopper_decode_emulator.h", "hopper_draw_entry.h")
    )
    text = "\n".join(['#include "hopper_cluster_emulator.h"', decode, ring, draw, entry])
    return load_emulator(text, draw_launch.macros(dtype, form), Params)


def draw_emulated(
    x: Tensor,
    weight: Tensor,
    temperature: Tensor,
    keys: Tensor,
    slots: Tensor | None,
    form: Form,
    *,
    clusters: int = 1,
    seed: int = 0,
    mistake: tuple[str, str] | None = None,
) -> TileWinners:
    """The first kernel of `draw_product`, on the CPU. x [M, K] is a view of what is NaN until the preceding
    kernel is complete. clusters: at most. mistake: a text of draw_product.cu and what to put in its place.

    Raises RuntimeError when a rule of the device is broken."""
    library = emulated_library(x.dtype, form, mistake)
    rows, tiles = x.shape[0], ceil_div(weight.shape[0], COLUMNS)
    # Rows of guards around the results show what is written beyond them.
    maxima, logits = torch.full((2, rows + 2, tiles), torch.nan)
    winners = torch.full((rows + 2, tiles), -1, dtype=torch.int32)
    found = TileWinners(maxima[1:-1], logits[1:-1], winners[1:-1])
    params = make_params(found, x, weight, temperature, keys, slots, form, encode=emulated_map)
    # Aligned as the device's parameters are.
    space = ctypes.create_string_buffer(ctypes.sizeof(params) + 64)
    place = -(-ctypes.addressof(space) // 64) * 64
    ctypes.memmove(place, ctypes.byref(params), ctypes.sizeof(params))
    kept = x.clone()
    row_bytes = x.shape[1] * x.element_size()
    written = (Written * rows)(*((x[row].data_ptr(), kept[row].data_ptr(), row_bytes) for row in range(rows)))
    problem = library.run_emulated(
        ctypes.c_void_p(place), min(clusters, tiles), form.shared_bytes, seed, written, rows
    )
    if problem:
        raise RuntimeError(problem.decode())
    guards = maxima[[0, -1]].isnan().all() and logits[[0, -1]].isnan().all()
    if not (guards and (winners[[0, -1]] == -1).all()):
        raise RuntimeError("written beyond the result")
    return found


def find_winners(logits: Tensor, temperature: Tensor, keys: Tensor) -> TileWinners:
    """What tiles of `logits` [M, V] should find, by exact times. temperature: one per row."""
    maxima, won, winners = [], [], []
    for first in range(0, logits.shape[1], COLUMNS):
        tile = logits[:, first : first + COLUMNS]
        maximum = tile.amax(-1, keepdim=True)
        tokens = torch.arange(first, first + tile.shape[1], dtype=torch.int32)
        heat = temperature[:, None]
        drawn = (tile - maximum) / heat.where(heat > 0, 1.0) - log_race_times(keys, tokens)
        winner = drawn.where(heat > 0, tile).argmax(-1, keepdim=True)
        maxima.append(maximum)
        won.append(tile.gather(-1, winner))
        winners.append(winner.int() + first)
    return TileWinners(torch.cat(maxima, 1), torch.cat(won, 1), torch.cat(winners, 1))


def join_winners(found: TileWinners, temperature: Tensor, keys: Tensor) -> Tensor:
    """As `join_tiles`, as torch operators. temperature: one per row."""
    maximum, heat = found.maxima.amax(-1, keepdim=True), temperature[:, None]
    noise = log_race_times(keys, found.winners)
    scores = (found.logits - maximum) / heat.where(heat > 0, 1.0) - noise.where(heat > 0, 0.0)
    tokens = found.winners.gather(-1, scores.argmax(-1, keepdim=True))
    return tokens.where(maximum.isfinite(), -1)[:, 0].long()
