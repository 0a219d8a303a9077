"""Rotation against complex numbers in FP64, and where keys and values are written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tiny_vllm.kernels.rope import HeadNorms, prepare_rope, rope_and_cache

# Of values about 4: two products and a sum in FP32; else one rounding.
TOLERANCES = {torch.float32: 4 * 2**-22, torch.bfloat16: 4 * 2**-8, torch.float16: 4 * 2**-10}
EPS = 1e-3
# num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, page_size
CASES = {
    "typical": (16, 9, 3, 64, 64, 16),
    "irregular": (5, 6, 1, 10, 10, 4),
    "partial_rotation": (7, 4, 2, 32, 8, 8),
    "one_token": (1, 4, 4, 16, 16, 1),
    "largest": (300, 8, 2, 128, 128, 64),
}


def table(max_len: int, rotary_dim: int) -> Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float64), frequencies)
    return torch.cat((angles.cos(), angles.sin()), -1).float()


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [T, heads, D] FP64, cos_sin [T, R]: pairs as complex numbers, turned by a product."""
    cos, sin = cos_sin.double().unsqueeze(1).chunk(2, -1)
    half = cos.shape[-1]
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(cos, sin)
    return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), -1)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, heads, D] FP64."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_rotates_q_and_k_and_writes_k_and_v_to_their_cells_only(
    case: str, dtype: torch.dtype, has_norms: bool
) -> None:
    num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, page_size = CASES[case]
    num_pages = 2 * num_tokens // page_size + 3
    positions = torch.randint(500, (num_tokens,))
    cells = torch.randperm(num_pages * page_size)[:num_tokens]
    heads = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    k_cache, v_cache = torch.randn(2, num_pages, num_kv_heads, page_size, head_dim).to(dtype)
    expected_k, expected_v = k_cache.double(), v_cache.double()
    cos_sin = table(500, rotary_dim)
    q, k, v = heads.double().split((num_heads, num_kv_heads, num_kv_heads), 1)
    norms, tolerance = None, TOLERANCES[dtype]
    if has_norms:
        norms = HeadNorms(*(1 + 0.5 * torch.rand(2, head_dim)), EPS)
        q, k = normed(q, norms.q), normed(k, norms.k)
        # Values are larger by their weights, and are rounded twice, the first time before a sum of two.
        tolerance *= 1.5 * (1 + 2**0.5)
    expected_k[cells // page_size, :, cells % page_size] = rotate(k, cos_sin[positions])
    expected_v[cells // page_size, :, cells % page_size] = v

    step = prepare_rope(cos_sin, positions, cells, num_kv_heads, page_size)
    actual_q = rope_and_cache(heads.flatten(1), step, k_cache, v_cache, num_heads, norms)
    for actual, expected in (
        (actual_q, rotate(q, cos_sin[positions])),
        (k_cache, expected_k),
        (v_cache, expected_v),
    ):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance)
    assert torch.equal(v_cache.double(), expected_v)
