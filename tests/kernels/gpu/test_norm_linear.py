"""Products of few rows, with all that can be fused to them, against FP64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tiny_vllm.kernels.norm_linear import _launch_norm_linear, norm_linear_ref
from tiny_vllm.kernels.triton_support import INTERPRETED, has_pdl

pytestmark = pytest.mark.gpu

# Of the largest sum of magnitudes of a row's terms: what rounding the input to a product and the result
# costs. FP32: K terms and a chain of a few operations. The interpreter cuts BF16 off where a GPU rounds.
TOLERANCES = {
    torch.float32: 64 * 2**-24,
    torch.bfloat16: 2**-7 if INTERPRETED else 2**-8,
    torch.float16: 2**-11,
}
# out features, in features
SHAPES = (
    {"typical": (48, 64), "ragged": (37, 200), "tiny": (3, 16), "two_tiles": (16, 2304), "one_row": (1, 40)}
    if INTERPRETED
    else {
        "qkv_1b": (3072, 2048),
        "down_1b": (2048, 8192),
        "down_8b": (4096, 14336),
        "small_model": (960, 576),
        "ragged": (1001, 1000),
        "tiny": (3, 16),
        "lm_head_1b": (128256, 2048),
    }
)
ROWS = (1, 5, 8) if INTERPRETED else (1, 2, 3, 4, 7, 8)
EPS = 1e-5


def expect(
    x: Tensor, weight: Tensor, norm: Tensor | None, bias: Tensor | None, residual: Tensor | None, gated: bool
) -> tuple[Tensor, Tensor]:
    """The FP64 answer, and for every value the size that rounding errors scale with."""
    wide, matrix = x.double(), weight.double()
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * norm.double()
    y, size = wide @ matrix.T, wide.abs() @ matrix.abs().T
    if bias is not None:
        y, size = y + bias.double(), size + bias.double().abs()
    if gated:
        gate, up = y.chunk(2, -1)
        gate_size, up_size = size.chunk(2, -1)
        # |silu'| stays below 1.1.
        size = 1.1 * gate_size * up.abs() + gate.abs() * up_size
        y = gate * torch.sigmoid(gate) * up
    if residual is not None:
        y, size = y + residual.double(), size + residual.double().abs()
    return y, size


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fused", ["nothing", "norm_bias", "residual", "norm_gated_bias", "all"])
def test_equals_the_operators_it_fuses(
    device: torch.device, fused: str, shape: str, rows: int, dtype: torch.dtype
) -> None:
    out_features, in_features = SHAPES[shape]
    gated = fused in ("norm_gated_bias", "all")
    num_rows_of_weight = out_features * (2 if gated else 1)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, device=device).to(dtype)

    x, weight = random(rows, in_features), random(num_rows_of_weight, in_features) * in_features**-0.5
    norm = 1 + 0.1 * torch.randn(in_features, device=device) if "norm" in fused or fused == "all" else None
    bias = random(num_rows_of_weight) if "bias" in fused or fused == "all" else None
    residual = random(rows, out_features) if fused in ("residual", "all") else None
    options = dict(norm_weight=norm, eps=EPS, bias=bias, residual=residual, gated=gated)
    expected, size = expect(x, weight, norm, bias, residual, gated)

    actual = _launch_norm_linear(x, weight, **options)
    assert actual.dtype == dtype and actual.shape == (rows, out_features)
    assert ((actual.double() - expected).abs() <= TOLERANCES[dtype] * size + 1e-7).all()

    if dtype == torch.bfloat16 and not INTERPRETED:
        reference = norm_linear_ref(x, weight, **options)
        # Two independent roundings of n values have error norms that differ by chance: each has a relative
        # spread of about 1 / sqrt(2 n), so three standard deviations of their difference are 3 / sqrt(n).
        slack = 1.1 + 3 / actual.numel() ** 0.5
        assert (actual.double() - expected).norm() <= slack * (reference.double() - expected).norm() + 1e-6


@pytest.mark.parametrize("rows", [1, 4])
def test_logits_are_not_rounded(device: torch.device, rows: int) -> None:
    x, weight = torch.randn(rows, 64, device=device).bfloat16(), torch.randn(40, 64, device=device).bfloat16()
    logits = _launch_norm_linear(x, weight, out_dtype=torch.float32)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().T, rtol=0, atol=1e-4)


def test_fp16_inputs_beyond_its_range_after_the_norm_weight_stay_finite(device: torch.device) -> None:
    x = torch.full((2, 64), 3e4, device=device, dtype=torch.float16)
    weight = torch.full((16, 64), 2**-6, device=device, dtype=torch.float16)
    norm = torch.full((64,), 4.0, device=device)
    y = _launch_norm_linear(x, weight, norm_weight=norm, eps=EPS)
    torch.testing.assert_close(y, torch.full_like(y, 4.0))


@pytest.mark.parametrize("rows", [1, 7])
def test_repeats_bit_for_bit(device: torch.device, rows: int) -> None:
    x, weight = (
        torch.randn(rows, 512, device=device).bfloat16(),
        torch.randn(96, 512, device=device).bfloat16(),
    )
    pdl = has_pdl(device)
    first = _launch_norm_linear(x, weight, pdl=pdl)
    assert all(torch.equal(first, _launch_norm_linear(x, weight, pdl=pdl)) for _ in range(3))


def test_a_row_does_not_depend_on_the_other_rows(device: torch.device) -> None:
    x, weight = torch.randn(8, 256, device=device).bfloat16(), torch.randn(64, 256, device=device).bfloat16()
    norm = torch.ones(256, device=device)
    whole = _launch_norm_linear(x, weight, norm_weight=norm, eps=EPS)
    assert torch.equal(whole[:3], _launch_norm_linear(x[:3].contiguous(), weight, norm_weight=norm, eps=EPS))
