"""The end of a QKV product as a kernel of its own, against FP64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.gpu.test_attention import TOLERANCES
from tests.kernels.gpu.test_fp8_attention import before_fp8, check_stored
from tiny_vllm.kernels.fp8_cache import Fp8Cache, quantise_rows
from tiny_vllm.kernels.rope_from_parts import HeadNorms, rope_from_parts
from tiny_vllm.kernels.triton_support import INTERPRETED, has_pdl

pytestmark = pytest.mark.gpu

# num_heads, num_kv_heads, head_dim, rotary_dim, page_size
SHAPES = {
    "llama_1b": (32, 8, 64, 64, 16),
    "llama_8b": (8, 2, 128, 128, 32),
    "partial_and_odd": (9, 3, 96, 40, 16),
}
if INTERPRETED:  # programs differ in the head alone: fewer of them
    SHAPES["llama_1b"] = (8, 2, 64, 64, 16)
# Types differ in what is loaded and stored alone: the interpreter tries all once.
CASES = [
    (shape, dtype)
    for shape in SHAPES
    for dtype in TOLERANCES
    if not INTERPRETED or shape == "llama_1b" or dtype == torch.float32
]


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
@pytest.mark.parametrize(("splits", "is_normed"), [(1, True), (4, False)])
def test_sums_norms_rotates_and_writes(
    device: torch.device, shape: str, splits: int, is_normed: bool, dtype: torch.dtype
) -> None:
    num_heads, num_kv_heads, head_dim, rotary_dim, page_size = SHAPES[shape]
    count, num_pages = 5, 7
    width = (num_heads + 2 * num_kv_heads) * head_dim
    parts = torch.randn(splits, count, width, device=device)
    parts = parts.to(dtype) if splits == 1 else parts
    bias = torch.randn(width, device=device).to(dtype) if splits > 1 else None
    angles = torch.arange(50, device=device)[:, None] * torch.rand(rotary_dim // 2, device=device)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    context_lens = torch.tensor([1, 50, 17, 30, 2], device=device)
    cells = torch.randperm(num_pages * page_size, device=device)[:count]
    norms = None
    if is_normed:
        norms = HeadNorms(*(1 + 0.5 * torch.randn(2, head_dim, device=device).to(dtype)), 1e-5)
    caches = torch.full((2, num_pages, num_kv_heads, page_size, head_dim), torch.nan, device=device).to(dtype)

    q = rope_from_parts(
        parts, bias, cos_sin, context_lens, cells, caches[0], caches[1], num_heads, head_norms=norms,
        pdl=has_pdl(device),
    )  # fmt: skip

    qkv = parts.double().sum(0) + (0 if bias is None else bias.double())
    expected = list(qkv.view(count, -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], 1))
    cos, sin = cos_sin[context_lens - 1].double()[:, None].chunk(2, -1)
    for index, weight in enumerate(() if norms is None else (norms.q, norms.k)):
        x = expected[index]
        expected[index] = x * torch.rsqrt(x.square().mean(-1, True) + 1e-5) * weight.double()
    for index in range(2):
        x = expected[index]
        first, second, rest = x.split([rotary_dim // 2, rotary_dim // 2, head_dim - rotary_dim], -1)
        expected[index] = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
    where = (cells // page_size, slice(None), cells % page_size)
    written: list[Tensor] = [q, caches[0][where], caches[1][where]]
    for actual, wanted in zip(written, expected, strict=True):
        atol = TOLERANCES[dtype] / 2 * float(wanted.abs().max())
        torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=atol)
    for cache in caches:
        cache[where] = torch.nan
        assert cache.isnan().all()


@pytest.mark.skipif(before_fp8(), reason="GPUs before sm_89 do not read FP8")
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_writes_codes_and_scales(device: torch.device, shape: str, dtype: torch.dtype) -> None:
    num_heads, num_kv_heads, head_dim, rotary_dim, page_size = SHAPES[shape]
    count, num_pages = 5, 7
    parts = torch.randn(2, count, (num_heads + 2 * num_kv_heads) * head_dim, device=device)
    angles = torch.arange(50, device=device)[:, None] * torch.rand(rotary_dim // 2, device=device)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    context_lens = torch.tensor([1, 50, 17, 30, 2], device=device)
    cells = torch.randperm(num_pages * page_size, device=device)[:count]
    norms = HeadNorms(*(1 + 0.5 * torch.randn(2, head_dim, device=device).to(dtype)), 1e-5)
    shape_of_cache = (num_pages, num_kv_heads, page_size, head_dim)
    poison = torch.full(shape_of_cache, torch.nan, device=device, dtype=dtype)
    coded = [Fp8Cache(*quantise_rows(poison), dtype) for _ in range(2)]
    plain = [poison.clone() for _ in range(2)]
    arguments = parts, None, cos_sin, context_lens, cells

    expected = rope_from_parts(*arguments, *plain, num_heads, head_norms=norms)
    q = rope_from_parts(*arguments, *coded, num_heads, head_norms=norms, pdl=has_pdl(device))

    assert torch.equal(q, expected)
    where = (cells // page_size, slice(None), cells % page_size)
    for cache, values in zip(coded, plain, strict=True):
        check_stored(cache, cells, values[where].double())
        cache.scales[where] = torch.nan
        assert cache.scales.isnan().all()
