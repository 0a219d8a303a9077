"""Products of many rows, their parts, and what ends them, against FP64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tiny_vllm.kernels.finish_rows import _launch_finish_rows
from tiny_vllm.kernels.tiled_linear import (
    Tiles,
    _launch_split_linear,
    _launch_tiled_linear,
    count_splits,
    launch_tiled_product,
    split_linear,
    tiled_linear,
)
from tiny_vllm.kernels.triton_support import INTERPRETED, has_pdl

pytestmark = pytest.mark.gpu

# Of the largest sum of magnitudes of a row's terms: rounding the result once, and FP32 sums of K terms. The
# interpreter cuts BF16 off where a GPU rounds.
TOLERANCES = {
    torch.float32: 64 * 2**-24,
    torch.bfloat16: 2**-7 if INTERPRETED else 2**-8,
    torch.float16: 2**-11,
}
# out features, in features
SHAPES = (
    {"typical": (96, 256), "ragged": (37, 200), "tiny": (3, 16)}
    if INTERPRETED
    else {
        "qkv_1b": (3072, 2048),
        "down_1b": (2048, 8192),
        "small_model": (960, 576),
        "ragged": (1001, 1000),
        "no_whole_16_bytes": (200, 1001),
        "tiny": (3, 16),
    }
)
ROWS = (9, 40) if INTERPRETED else (9, 64, 100, 200, 300)
HALF_TYPES = [torch.bfloat16, torch.float16]


def make(rows: int, shape: str, gated: bool, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """x, weight and bias."""
    out_features, in_features = SHAPES[shape]
    height = out_features * (2 if gated else 1)
    x = torch.randn(rows, in_features, device=device).to(dtype)
    weight = (torch.randn(height, in_features, device=device) * in_features**-0.5).to(dtype)
    return x, weight, torch.randn(height, device=device).to(dtype)


def expect(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> tuple[Tensor, Tensor]:
    """The FP64 answer, and for every value the size that rounding errors scale with."""
    y, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if bias is not None:
        y, size = y + bias.double(), size + bias.double().abs()
    if gated:
        gate, up = y.chunk(2, -1)
        gate_size, up_size = size.chunk(2, -1)
        # |silu'| stays below 1.1.
        size = 1.1 * gate_size * up.abs() + gate.abs() * up_size
        y = gate * torch.sigmoid(gate) * up
    return y, size


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_add_up_to_the_product(device: torch.device, shape: str, rows: int, dtype: torch.dtype) -> None:
    x, weight, _ = make(rows, shape, False, dtype, device)
    parts = _launch_split_linear(x, weight, has_pdl(device))
    expected, size = expect(x, weight, None, False)
    assert parts.shape[1:] == expected.shape
    tolerance = TOLERANCES[parts.dtype]
    assert ((parts.double().sum(0) - expected).abs() <= tolerance * size + 1e-7).all()


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fused", ["nothing", "bias", "gated", "gated_bias"])
def test_equals_the_operators_it_fuses(
    device: torch.device, fused: str, shape: str, rows: int, dtype: torch.dtype
) -> None:
    gated = "gated" in fused
    x, weight, bias = make(rows, shape, gated, dtype, device)
    used = bias if "bias" in fused else None
    y = _launch_tiled_linear(x, weight, bias=used, gated=gated, pdl=has_pdl(device))
    expected, size = expect(x, weight, used, gated)
    assert y.dtype == dtype and y.shape == expected.shape
    # Where cuBLAS computes, gate and up are rounded before SiLU.
    assert ((y.double() - expected).abs() <= 2 * TOLERANCES[dtype] * size + 1e-7).all()


@pytest.mark.parametrize("rows", (9, 64) if INTERPRETED else (9, 64, 128, 256))
@pytest.mark.parametrize("height", (40,) if INTERPRETED else (40, 128256))
def test_logits_are_not_rounded(device: torch.device, height: int, rows: int) -> None:
    x = torch.randn(rows, 64, device=device).bfloat16()
    weight = torch.randn(height, 64, device=device).bfloat16()
    logits = tiled_linear(x, weight, out_dtype=torch.float32, pdl=has_pdl(device))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().T, rtol=0, atol=1e-4)


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_splits_beyond_the_end_of_k_are_zero(device: torch.device, splits: int) -> None:
    x, weight = torch.randn(16, 80, device=device).half(), torch.randn(64, 80, device=device).half()
    parts = launch_tiled_product(x, weight, Tiles(64, 32, 2, 0, 4), splits=splits, out_dtype=torch.float32)
    assert parts.shape == (splits, 16, 64)
    torch.testing.assert_close(parts.double().sum(0), x.double() @ weight.double().T, rtol=0, atol=1e-4)
    if splits == 4:
        assert (parts[3] == 0).all()


def test_fp32_goes_to_torch(device: torch.device) -> None:
    x, weight = torch.randn(20, 64, device=device), torch.randn(32, 64, device=device)
    assert torch.equal(split_linear(x, weight)[0], torch.nn.functional.linear(x, weight))
    assert torch.equal(tiled_linear(x, weight), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("rows", (20,) if INTERPRETED else (20, 64))
def test_repeats_bit_for_bit_and_rows_are_independent(device: torch.device, rows: int) -> None:
    x, weight = (
        torch.randn(rows, 512, device=device).bfloat16(),
        torch.randn(96, 512, device=device).bfloat16(),
    )
    assert count_splits(96, 512, Tiles(64, 128, 4, 0, 4)) > 1
    pdl = has_pdl(device)
    first = _launch_split_linear(x, weight, pdl)
    repeats = 1 if INTERPRETED else 20
    assert all(torch.equal(first, _launch_split_linear(x, weight, pdl)) for _ in range(repeats))
    x[1:] = torch.randn(rows - 1, 512, device=device)
    assert torch.equal(first[:, 0], _launch_split_linear(x, weight, pdl)[:, 0])


def test_finish_rows_without_a_norm_of_the_sum(device: torch.device) -> None:
    parts, residual = torch.randn(2, 5, 96, device=device), torch.randn(5, 96, device=device).bfloat16()
    branch_norm = 0.5 + torch.rand(96, device=device)
    y, normed = _launch_finish_rows(parts, residual, None, 1e-5, None, has_pdl(device), branch_norm)
    total = parts.double().sum(0)
    expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * branch_norm.double()
    expected = expected + residual.double()
    assert normed is y
    size = float(expected.abs().max())
    assert float((y.double() - expected).abs().max()) <= TOLERANCES[torch.bfloat16] * size


ROWS_TO_FINISH = [(1, 3, 64), (4, 17, 96), (8, 5 if INTERPRETED else 64, 2048), (3, 9, 4096)]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES], ids=str)
@pytest.mark.parametrize("part_type", ["wide", "as_residual"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("splits", "rows", "width"), ROWS_TO_FINISH)
def test_finish_rows(
    device: torch.device,
    splits: int,
    rows: int,
    width: int,
    has_bias: bool,
    part_type: str,
    dtype: torch.dtype,
) -> None:
    parts = torch.randn(splits, rows, width, device=device)
    if part_type == "as_residual":
        parts = parts.to(dtype)
    residual = torch.randn(rows, width, device=device).to(dtype)
    norm = 1 + 0.1 * torch.randn(width, device=device)
    bias = torch.randn(width, device=device).to(dtype) if has_bias else None
    y, normed = _launch_finish_rows(parts, residual, norm, 1e-5, bias, has_pdl(device))
    expected = parts.double().sum(0) + residual.double() + (0 if bias is None else bias.double())
    assert y.dtype == normed.dtype == dtype
    size = float(expected.abs().max())
    assert float((y.double() - expected).abs().max()) <= TOLERANCES[dtype] * size
    # Of what was stored: the next layer's residual and its norm must agree.
    stored = y.double()
    expected = stored * torch.rsqrt(stored.square().mean(-1, keepdim=True) + 1e-5) * norm.double()
    assert float((normed.double() - expected).abs().max()) <= TOLERANCES[dtype] * float(expected.abs().max())
