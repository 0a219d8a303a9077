"""The experts of a mixture as two grouped products, over all tokens and the experts they picked.

    parts[j, t] = w[t, j] * (act(x[t] Wg_e^T, x[t] Wu_e^T) Wd_e^T + b_e)        e = experts[t, j]

x [T, H]; experts [T, A] int32, weights w [T, A] FP32; gate_up [E, 2I, H] (gate rows, then up rows), down
[E, H, I], biases one value per row; parts [A, T, H] FP32. A token's mixture is the sum of its parts, always
in the same order; the kernel that sums them has more to do (see finish_rows.py). The result of the first
product is rounded to x's type, the rest is FP32. Moves the matrices of all picked experts, 3 * H * I values
each, for 6 * T * A * H * I FLOPs: memory-bound until experts have some hundred tokens each. Source: Gale et
al. 2022, arXiv 2211.15841.

The host never learns who picked what: rows are sorted and cut into tiles on the device (expert_tiles.py), and
programs are launched for as many (tile, rows of a matrix) as there can be; those of empty tiles leave at
once. As in tiled_linear.py, rows of a matrix are the operand of 64 rows, so that few tokens waste nothing,
and tiles go through shared memory. Nothing can be loaded before the wait for the preceding kernel, which
decides what to load. Few picks are not sorted: see picked_experts.py.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_vllm.kernels.expert_tiles import ExpertTiles, expert_tiles
from tiny_vllm.kernels.gated_activation import activate, gated_activation_ref
from tiny_vllm.kernels.picked_experts import picked_parts, takes_picks
from tiny_vllm.kernels.triton_support import (
    ceil_div,
    dot,
    jit,
    launch_dependents,
    launch_options,
    runs_triton,
    tl,
    wait_for_predecessor,
    with_fallback,
)


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """The matrices of one layer's experts, shapes above."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Tiles:
    """What a program computes: rows of tokens, rows of a matrix, values of K per step, steps loaded ahead."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    num_warps: int


# (most tokens per expert on average, tiles of gate and up, of down). With few tokens the weights of a program
# are the bytes in flight: 4 x 2 x 64 x 128 values are 128 KB of gate and up. With many, the sums of 128 x 128
# tokens and rows, for gate and up, are 128 registers of 256 threads. us of both products and sorting on an
# H200 with 16 / 64 / 1,024 tokens per expert: Qwen3-30B-A3B 314 / 389 / 2,849, by the next smaller tiles 336
# / 385 / 2,918; gpt-oss 398 / 472 / 3,397, smaller 429 / 480 / 3,589 (gpu_expert_prompts.py --sweep).
TILES_16_BIT = (
    (12, Tiles(16, 64, 128, 4, 4), Tiles(16, 64, 128, 4, 4)),
    (48, Tiles(64, 64, 64, 4, 4), Tiles(64, 64, 64, 4, 4)),
    (768, Tiles(128, 128, 64, 4, 8), Tiles(128, 256, 64, 4, 8)),
    (1 << 40, Tiles(256, 64, 64, 4, 8), Tiles(256, 128, 64, 4, 8)),
)
TILES_FP32 = Tiles(16, 32, 32, 2, 4)
# Tiles of so many rows go through all rows of a matrix together, before the next ones: they share its rows,
# and these theirs, while both are in the L2 cache. Qwen3-30B-A3B, 256 tokens per expert: 847 us, 910 with
# 1,024 and with 2,048 rows.
GROUP_ROWS = 512


def expert_parts_ref(
    x: Tensor, experts: Tensor, weights: Tensor, matrices: ExpertMatrices, activation: str, pdl: bool = False
) -> Tensor:
    """Expert by expert; the host reads who was picked. `pdl` is ignored."""
    num_tokens, num_active = experts.shape
    parts = torch.empty(num_active, num_tokens, x.shape[1], dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():
        tokens, places = (experts == expert).nonzero(as_tuple=True)
        biases = [
            None if bias is None else bias[expert] for bias in (matrices.gate_up_bias, matrices.down_bias)
        ]
        activated = gated_activation_ref(F.linear(x[tokens], matrices.gate_up[expert], biases[0]), activation)
        outputs = F.linear(activated, matrices.down[expert], biases[1]).float()
        parts[places, tokens] = outputs * weights[tokens, places].unsqueeze(1)
    return parts


@jit(do_not_specialize=("num_tokens", "num_tiles", "tile_starts_ptr", "tile_ends_ptr"))
def _expert_product_kernel(
    y_ptr,
    x_ptr,
    matrix_ptr,
    bias_ptr,
    weights_ptr,
    order_ptr,
    tile_experts_ptr,
    tile_starts_ptr,
    tile_ends_ptr,
    num_tokens,
    num_tiles,
    N,
    K: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles times tiles of N,), GROUP tiles at a time. bias_ptr may be None.

    IS_FIRST: x are tokens, y [n, N] is in the order of `order`; otherwise that is x, and y are the parts.
    """
    if PDL:
        launch_dependents()
        wait_for_predecessor()
    in_group = tl.cdiv(N, BLOCK_N) * GROUP
    first = tl.program_id(0) // in_group * GROUP
    num_together = tl.minimum(num_tiles - first, GROUP)
    tile = first + tl.program_id(0) % in_group % num_together
    column_tile = tl.program_id(0) % in_group // num_together
    end = tl.load(tile_ends_ptr + tile)
    place = tl.load(tile_starts_ptr + tile) + tl.arange(0, BLOCK_M)
    if end == 0:
        return
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    is_place = place < end
    picked = tl.load(order_ptr + place, mask=is_place, other=0)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < N
    NUM_ROWS = N * 2 if IS_FIRST else N
    row = picked // NUM_ACTIVE if IS_FIRST else place
    x_rows = x_ptr + row.to(tl.int64)[:, None] * K
    matrix_rows = matrix_ptr + (expert * NUM_ROWS + column)[:, None] * K

    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    total_up = total
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        columns = k + tl.arange(0, BLOCK_K)
        is_value = (columns < K)[None, :]
        x = tl.load(x_rows + columns[None, :], mask=is_place[:, None] & is_value, other=0.0)
        values = matrix_rows + columns[None, :]
        mask = is_column[:, None] & is_value
        total = dot(tl.load(values, mask=mask, other=0.0), tl.trans(x), total)
        if IS_FIRST:
            up = tl.load(values + tl.cast(N, tl.int64) * K, mask=mask, other=0.0)
            total_up = dot(up, tl.trans(x), total_up)

    if bias_ptr is not None:
        biases = bias_ptr + expert * NUM_ROWS + column
        total += tl.load(biases, mask=is_column, other=0.0).to(tl.float32)[:, None]
        if IS_FIRST:
            total_up += tl.load(biases + N, mask=is_column, other=0.0).to(tl.float32)[:, None]
    if IS_FIRST:
        total = activate(total, total_up, ACTIVATION)
        row = place
    else:
        total *= tl.load(weights_ptr + picked, mask=is_place, other=0.0)[None, :]
        row = picked % NUM_ACTIVE * num_tokens + picked // NUM_ACTIVE
    y = y_ptr + row.to(tl.int64)[:, None] * N + column[None, :]
    mask = is_place[:, None] & is_column[None, :]
    tl.store(y, tl.trans(total).to(y_ptr.dtype.element_ty), mask=mask)


def choose_tiles(num_rows: int, num_experts: int, dtype: torch.dtype) -> tuple[Tiles, Tiles]:
    """Of the two products, equally high. num_rows: picks of all tokens."""
    if dtype == torch.float32:
        return TILES_FP32, TILES_FP32
    return next((first, second) for most, first, second in TILES_16_BIT if most * num_experts >= num_rows)


def _launch_product(
    y: Tensor,
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    rows: ExpertTiles,
    tiles: Tiles,
    activation: str | None,
    pdl: bool,
) -> None:
    """activation: of the first product, None for the second."""
    N, K = y.shape[-1], x.shape[-1]
    num_tokens, num_active = weights.shape
    assert x.is_contiguous() and matrix.is_contiguous() and (bias is None or bias.is_contiguous())
    _expert_product_kernel[(len(rows.experts) * ceil_div(N, tiles.block_n),)](
        y,
        x,
        matrix,
        bias,
        weights,
        rows.order,
        rows.experts,
        rows.starts,
        rows.ends,
        num_tokens,
        len(rows.experts),
        N,
        K=K,
        NUM_ACTIVE=num_active,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        GROUP=GROUP_ROWS // tiles.block_m,
        STAGES=tiles.stages,
        ACTIVATION=activation,
        IS_FIRST=activation is not None,
        PDL=pdl,
        **launch_options(tiles.num_warps, pdl),
    )


@with_fallback(expert_parts_ref)
def _launch_expert_parts(
    x: Tensor, experts: Tensor, weights: Tensor, matrices: ExpertMatrices, activation: str, pdl: bool = False
) -> Tensor:
    num_experts, hidden_size, inner_size = matrices.down.shape
    num_tokens, num_active = experts.shape
    if takes_picks(num_tokens, num_active, num_experts):
        return picked_parts(
            x, experts, weights, matrices.gate_up, matrices.down, matrices.gate_up_bias, matrices.down_bias,
            activation, pdl,
        )  # fmt: skip
    first, second = choose_tiles(experts.numel(), num_experts, x.dtype)
    rows = expert_tiles(experts.flatten(), num_experts, first.block_m, pdl)
    x = x.contiguous()
    inner = torch.empty(experts.numel(), inner_size, dtype=x.dtype, device=x.device)
    _launch_product(inner, x, matrices.gate_up, matrices.gate_up_bias, weights, rows, first, activation, pdl)
    parts = torch.empty(num_active, num_tokens, hidden_size, dtype=torch.float32, device=x.device)
    _launch_product(parts, inner, matrices.down, matrices.down_bias, weights, rows, second, None, pdl)
    return parts


def expert_parts(
    x: Tensor, experts: Tensor, weights: Tensor, matrices: ExpertMatrices, activation: str, pdl: bool = False
) -> Tensor:
    """x [T, H], experts [T, A] int32, weights [T, A] FP32 -> parts [A, T, H] FP32.

    activation: of a ModelSpec. pdl: see `triton_support`.
    """
    op = _launch_expert_parts if runs_triton(x) and len(x) else expert_parts_ref
    return op(x, experts, weights, matrices, activation, pdl)
