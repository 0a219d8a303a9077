"""Runs the Hopper kernel for products of prompts on the CPU, see hopper_cluster_emulator.h."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.helpers.emulator import Written, load_emulator
from tests.helpers.hopper_prefill import emulated_map
from tiny_vllm.kernels.hopper_linear import launch
from tiny_vllm.kernels.hopper_linear.launch import Params, Variant, make_params
from tiny_vllm.models.mlp import MLP
from tiny_vllm.models.residual import ResidualJoin
from tiny_vllm.models.spec import ModelSpec, RopeSpec
from tiny_vllm.models.weights import LayerWeights

HERE = Path(__file__).parent


@functools.cache
def emulated_library(dtype: torch.dtype, variant: Variant, mistake: tuple[str, str] | None) -> ctypes.CDLL:
    folder = Path(launch.__file__).parent
    silu, product = ((folder / name).read_text(encoding="utf-8") for name in ("silu.cu", "prompt_product.cu"))
    if mistake is not None:
        assert product.count(mistake[0]) == 1, f"not once in prompt_product.cu: {mistake[0]}"
        product = product.replace(*mistake)
    decode, entry = (
        (HERE / name).read_text(encoding="utf-8")
        for name in ("hopper_decode_emulator.h", "hopper_cluster_entry.h")
    )
    text = "\n".join(['#include "hopper_cluster_emulator.h"', decode, silu, product, entry])
    # Small groups, so that few rows of tiles are several.
    return load_emulator(text, launch.macros(dtype, variant) | {"GROUP": 2}, Params)


def multiply_emulated(
    x: Tensor,
    weight: Tensor,
    variant: Variant,
    residual: Tensor | None = None,
    *,
    in_place: bool = False,
    clusters: int = 1,
    seed: int = 0,
    mistake: tuple[str, str] | None = None,
) -> Tensor:
    """As `multiply_gated` and `multiply_plain`, on the CPU; in_place: over a copy of the residual. clusters:
    at most. x, and a residual that is not written over, are views of what is NaN until the preceding kernel
    is complete. mistake: a text of prompt_product.cu and what to put in its place.

    Raises RuntimeError when a rule of the device is broken."""
    library = emulated_library(x.dtype, variant, mistake)
    width = weight.shape[0] // (2 if variant.gated else 1)
    # Rows of guards around the result show what is written beyond it.
    guarded = torch.full((x.shape[0] + 2, width), torch.nan, dtype=x.dtype)
    y = guarded[1:-1]
    late = [x]
    if in_place:
        assert residual is not None
        residual = y.copy_(residual)
    elif residual is not None:
        late.append(residual)
    params, clusters = make_params(y, x, weight, residual, variant, clusters, encode=emulated_map)
    # Aligned as the device's parameters are.
    space = ctypes.create_string_buffer(ctypes.sizeof(params) + 64)
    place = -(-ctypes.addressof(space) // 64) * 64
    ctypes.memmove(place, ctypes.byref(params), ctypes.sizeof(params))
    kept = [matrix.clone() for matrix in late]
    rows = [
        (row.data_ptr(), copy.data_ptr(), row.nbytes)
        for pair in zip(late, kept, strict=True)
        for row, copy in zip(*pair, strict=True)
    ]
    written = (Written * len(rows))(*rows)
    problem = library.run_emulated(
        ctypes.c_void_p(place), clusters, variant.shared_bytes, seed, written, len(rows)
    )
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
