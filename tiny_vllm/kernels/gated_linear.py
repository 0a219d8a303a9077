"""Gate and up of many tokens with their activation, as one product: y = act(x Wg^T) * (x Wu^T).

x [M, K], W [2N, K] (gate rows, then up rows), y [M, N]; all BF16 or FP16, FP32 accumulation, y rounded once.
4 * M * N * K FLOPs: compute-bound from some hundred rows on. cuBLAS and `silu_and_mul` write and read the
2N-wide result between them, 8 * M * N bytes that are spared here.

Design. Tiles come and go by TMA. A program computes the same 128 columns of gate and of up for 128 rows, so
that both meet in its registers; programs are as many as multiprocessors and go through tiles in groups of
rows, so that what runs at the same time shares its tiles of x and W in L2. The next tile's loads are under
way while the last one's results are stored.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_vllm.kernels.gated_activation import activate, activate_ref
from tiny_vllm.kernels.triton_support import (
    ceil_div,
    dot,
    jit,
    launch_options,
    tl,
)


@dataclass(frozen=True, slots=True)
class GatedTiles:
    """Rows of x, columns of gate and of up, values of K per step, steps loaded ahead, warps, and rows of
    tiles that are gone through together."""

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    stages: int = 3
    num_warps: int = 8
    group: int = 8


def gated_linear_ref(x: Tensor, weight: Tensor, activation: str = "silu") -> Tensor:
    """As separate operators, rounding after each."""
    return activate_ref(F.linear(x, weight), activation)


@jit
def _gated_linear_kernel(
    y,
    x,
    weight,
    M,
    N,
    num_programs,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Grid (num_programs,). y, x, weight: tensor descriptors."""
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_m * num_n, num_programs, flatten=True):
        first = tile // (GROUP * num_n) * GROUP
        height = tl.minimum(num_m - first, GROUP)
        within = tile % (GROUP * num_n)
        first_m = (first + within % height) * BLOCK_M
        first_n = within // height * BLOCK_N
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            rows = x.load([first_m, k])
            gate = dot(rows, tl.trans(weight.load([first_n, k])), gate)
            up = dot(rows, tl.trans(weight.load([N + first_n, k])), up)
        y.store([first_m, first_n], activate(gate, up, ACTIVATION).to(y.dtype))


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def launch_gated_linear(x: Tensor, weight: Tensor, activation: str, tiles: GatedTiles) -> Tensor:
    """x [M, K], weight [2N, K] -> [M, N] on a GPU with TMA; N in whole tiles. activation: see `activate`."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    M, K = x.shape
    N = weight.shape[0] // 2
    assert x.is_contiguous() and weight.is_contiguous() and N % tiles.block_n == 0
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    num_tiles = ceil_div(M, tiles.block_m) * ceil_div(N, tiles.block_n)
    num_programs = min(num_tiles, _num_multiprocessors(x.device))
    _gated_linear_kernel[(num_programs,)](
        TensorDescriptor.from_tensor(y, [tiles.block_m, tiles.block_n]),
        TensorDescriptor.from_tensor(x, [tiles.block_m, tiles.block_k]),
        TensorDescriptor.from_tensor(weight, [tiles.block_n, tiles.block_k]),
        M,
        N,
        num_programs,
        K=K,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        GROUP=tiles.group,
        STAGES=tiles.stages,
        ACTIVATION=activation,
        **launch_options(tiles.num_warps, num_stages=tiles.stages),
    )
    return y
