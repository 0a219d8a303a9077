"""Runs the Hopper kernel of gate and up on the CPU, see hopper_cluster_emulator.h."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.helpers.emulator import load_emulator
from tests.helpers.hopper_prefill import emulated_map
from tiny_vllm.kernels.hopper_linear import launch
from tiny_vllm.kernels.hopper_linear.launch import SHARED_BYTES, Params, make_params
from tiny_vllm.models.mlp import MLP
from tiny_vllm.models.residual import ResidualJoin
from tiny_vllm.models.spec import ModelSpec, RopeSpec
from tiny_vllm.models.weights import LayerWeights

HERE = Path(__file__).parent


@functools.cache
def emulated_library(dtype: torch.dtype, mistake: tuple[str, str] | None) -> ctypes.CDLL:
    folder = Path(launch.__file__).parent
    product = (folder / "gated_product.cu").read_text(encoding="utf-8")
    if mistake is not None:
        assert product.count(mistake[0]) == 1, f"not once in gated_product.cu: {mistake[0]}"
        product = product.replace(*mistake)
    ring, silu = ((folder / name).read_text(encoding="utf-8") for name in ("ring.cu", "silu.cu"))
    decode, entry = (
        (HERE / name).read_text(encoding="utf-8")
        for name in ("hopper_decode_emulator.h", "hopper_cluster_entry.h")
    )
    text = "\n".join(['#include "hopper_cluster_emulator.h"', decode, ring, silu, product, entry])
    # Small groups, so that few rows of tiles are several.
    return load_emulator(text, launch.macros(dtype) | {"GROUP": 2}, Params)


def multiply_emulated(
    x: Tensor,
    weight: Tensor,
    *,
    clusters: int = 1,
    seed: int = 0,
    mistake: tuple[str, str] | None = None,
) -> Tensor:
    """As `multiply_gated`, on the CPU. clusters: at most. mistake: a text of gated_product.cu and what to put
    in its place.

    Raises RuntimeError when a rule of the device is broken."""
    library = emulated_library(x.dtype, mistake)
    # Rows of guards around the result show what is written beyond it.
    guarded = torch.full((x.shape[0] + 2, weight.shape[0] // 2), torch.nan, dtype=x.dtype)
    y = guarded[1:-1]
    params, clusters = make_params(y, x, weight, clusters, encode=emulated_map)
    # Aligned as the device's parameters are.
    space = ctypes.create_string_buffer(ctypes.sizeof(params) + 64)
    place = -(-ctypes.addressof(space) // 64) * 64
    ctypes.memmove(place, ctypes.byref(params), ctypes.sizeof(params))
    problem = library.run_emulated(ctypes.c_void_p(place), clusters, SHARED_BYTES, seed)
    if problem:
        raise RuntimeError(problem.decode())
    if not guarded[[0, -1]].isnan().all():
        raise RuntimeError("written beyond the result")
    return y


def make_mlp(gate_up: Tensor, bias: Tensor | None = None, **traits: Any) -> MLP:
    """One of gate_up [2I, H] with an identity, H x I, as its last product. traits: of its spec."""
    intermediate, hidden = gate_up.shape[0] // 2, gate_up.shape[1]
    spec = ModelSpec(
        family="llama",
        vocab_size=8,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=hidden,
        max_position_embeddings=8,
        rms_norm_eps=1e-5,
        rope=RopeSpec(theta=1e4, rotary_dim=hidden),
        **traits,
    )
    none = gate_up.new_empty(0)
    down = torch.eye(hidden, intermediate, dtype=gate_up.dtype, device=gate_up.device)
    return MLP(
        spec, LayerWeights(none, none, none, none, gate_up, down, gate_up_bias=bias), ResidualJoin(spec, None)
    )
