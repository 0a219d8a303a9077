"""The kernels that write and read keys and values in FP8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.gpu.test_attention import (
    DECODE_CASES,
    PREFILL_CASES,
    TOLERANCES,
    Pages,
    check,
    options_of,
)
from tests.kernels.test_fp8_cache import allowed_error
from tiny_vllm.kernels.fp8_cache import Fp8Cache, dequantise_rows, quantise_rows
from tiny_vllm.kernels.paged_decode_attention import attend_pages
from tiny_vllm.kernels.prefill_attention import attend_chunks
from tiny_vllm.kernels.rope import prepare_rope, rope_and_cache
from tiny_vllm.kernels.rope_and_attend import HeadNorms, rope_and_attend
from tiny_vllm.kernels.triton_support import INTERPRETED, has_pdl


def before_fp8() -> bool:
    return not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(before_fp8(), reason="GPUs before sm_89 do not read FP8"),
]
VARIANT_NAMES = [None, "all"]


class Fp8Pages(Pages):
    """Pages whose keys and values are what their FP8 caches hold; cells that nobody owns are still poison."""

    def __init__(
        self, lens: list[int], num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(lens, num_kv_heads, head_dim, page_size, dtype, device)
        self.k, self.v = (Fp8Cache(*quantise_rows(c), dtype) for c in (self.k_cache, self.v_cache))
        self.reread()

    def reread(self) -> None:
        for cache, sequences in ((self.k, self.keys), (self.v, self.values)):
            read = dequantise_rows(cache.codes, cache.scales, cache.dtype)
            for index, length in enumerate(self.lens.tolist()):
                pages = read[self.table[index]].transpose(1, 2).flatten(0, 1)
                sequences[index] = pages[:length]


def stored_rows(cache: Fp8Cache, cells: Tensor) -> Tensor:
    """[N, Hkv, D] FP64, without the rounding to the cache's type."""
    page_size = cache.shape[2]
    where = (cells // page_size, slice(None), cells % page_size)
    return cache.codes.float()[where].double() * cache.scales[where].double()[..., None]


def check_stored(cache: Fp8Cache, cells: Tensor, expected: Tensor) -> None:
    """expected [N, Hkv, D] FP64, of which the kernel had values rounded to the type of the cache."""
    size = expected.abs().amax(-1, keepdim=True)
    allowed = allowed_error(expected.to(cache.dtype)) + size * TOLERANCES[cache.dtype]
    assert bool(((stored_rows(cache, cells) - expected).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("variant", VARIANT_NAMES)
@pytest.mark.parametrize("case", DECODE_CASES)
def test_decodes_attend_to_what_is_stored(
    device: torch.device, case: str, variant: str | None, dtype: torch.dtype
) -> None:
    lens, num_heads, num_kv_heads, head_dim, page_size = DECODE_CASES[case]
    pages = Fp8Pages(lens, num_kv_heads, head_dim, page_size, dtype, device)
    q = (2 * torch.randn(len(lens), num_heads, head_dim, device=device)).to(dtype)
    options = {} if variant is None else options_of(variant, num_heads, device)
    expected = [pages.attend(index, q[index : index + 1], **options) for index in range(len(lens))]
    scale = options.pop("scale", head_dim**-0.5)
    actual = attend_pages(q, pages.k, pages.v, pages.table, pages.lens, scale, **options)
    check(actual, torch.cat(expected), pages)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("variant", VARIANT_NAMES)
@pytest.mark.parametrize("case", PREFILL_CASES)
def test_chunks_attend_to_what_is_stored(
    device: torch.device, case: str, variant: str | None, dtype: torch.dtype
) -> None:
    chunks, num_heads, num_kv_heads, head_dim, page_size = PREFILL_CASES[case]
    pages = Fp8Pages([context for _, context in chunks], num_kv_heads, head_dim, page_size, dtype, device)
    starts = torch.tensor([0] + [chunk for chunk, _ in chunks], device=device).cumsum(0)
    q = (2 * torch.randn(int(starts[-1]), num_heads, head_dim, device=device)).to(dtype)
    options = {} if variant is None else options_of(variant, num_heads, device)
    parts = starts.tolist()
    expected = [
        pages.attend(index, q[parts[index] : parts[index + 1]], **options) for index in range(len(chunks))
    ]
    scale = options.pop("scale", head_dim**-0.5)
    actual = attend_chunks(q, pages.k, pages.v, pages.table, starts, pages.lens, scale, **options)
    check(actual, torch.cat(expected), pages)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("case", [case for case in DECODE_CASES if case != "many_splits"])
def test_the_newest_token_is_attended_to_as_later_steps_read_it(
    device: torch.device, case: str, has_norms: bool, dtype: torch.dtype
) -> None:
    lens, num_heads, num_kv_heads, head_dim, page_size = DECODE_CASES[case]
    count = len(lens)
    pages = Fp8Pages(lens, num_kv_heads, head_dim, page_size, dtype, device)
    parts = torch.randn(1, count, (num_heads + 2 * num_kv_heads) * head_dim, device=device)
    angles = torch.arange(max(lens), device=device)[:, None] * torch.rand(head_dim // 2, device=device)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    newest, index = pages.lens - 1, torch.arange(count, device=device)
    cells = pages.table[index, newest // page_size] * page_size + newest % page_size
    heads = parts.double()[0].view(count, -1, head_dim)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], 1)
    norms = None
    if has_norms:
        norms = HeadNorms(*(1 + 0.5 * torch.randn(2, head_dim, device=device).to(dtype)), 1e-5)
        q, k = (
            x * torch.rsqrt(x.square().mean(-1, True) + 1e-5) * weight.double()
            for x, weight in ((q, norms.q), (k, norms.k))
        )
    cos, sin = cos_sin[newest].double()[:, None].chunk(2, -1)

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    before = pages.k.codes.view(torch.uint8).clone(), pages.k.scales.clone()
    actual = rope_and_attend(
        parts, None, cos_sin, cells, pages.k, pages.v, pages.table, pages.lens, num_heads, head_dim**-0.5,
        head_norms=norms, pdl=has_pdl(device),
    )  # fmt: skip
    check_stored(pages.k, cells, turn(k))
    check_stored(pages.v, cells, v)
    where = (cells // page_size, slice(None), cells % page_size)
    for now, old in zip((pages.k.codes.view(torch.uint8), pages.k.scales), before, strict=True):
        rest = now.clone()
        rest[where] = old[where]
        assert torch.equal(rest.nan_to_num(7), old.nan_to_num(7))
    pages.reread()
    rounded = turn(q).to(dtype)
    check(actual, torch.cat([pages.attend(row, rounded[row : row + 1]) for row in range(count)]), pages)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("rotary_dim", [80, 20])
def test_prompts_are_stored_as_the_reference_stores_them(
    device: torch.device, rotary_dim: int, dtype: torch.dtype
) -> None:
    num_tokens, num_heads, num_kv_heads, head_dim, page_size = 9, 6, 3, 80, 4
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, device=device).to(dtype)
    # Keys far beyond what FP8 holds without a scale.
    qkv[:, num_heads * head_dim : num_heads * head_dim + 7] *= 5000
    angles = torch.rand(40, rotary_dim // 2, device=device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.randint(40, (num_tokens,), device=device)
    cells = torch.randperm(44, device=device)[:num_tokens]
    shape = (11, num_kv_heads, page_size, head_dim)
    fp8 = [Fp8Cache(*quantise_rows(torch.zeros(shape, dtype=dtype, device=device)), dtype) for _ in range(2)]
    q = rope_and_cache(qkv, prepare_rope(cos_sin, positions, cells, num_kv_heads, page_size), *fp8, num_heads)
    heads = qkv.double().view(num_tokens, -1, head_dim)
    half = rotary_dim // 2
    cos, sin = cos_sin[positions].double()[:, None].chunk(2, -1)
    first, second, rest = heads.split([half, half, head_dim - rotary_dim], -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
    expected_q, expected_k, _ = turned.split([num_heads, num_kv_heads, num_kv_heads], 1)
    size = float(expected_q.abs().max())
    torch.testing.assert_close(q.double(), expected_q, rtol=0, atol=TOLERANCES[dtype] * size)
    check_stored(fp8[0], cells, expected_k)
    check_stored(fp8[1], cells, heads[:, num_heads + num_kv_heads :])
    others = torch.ones(44, dtype=torch.bool, device=device)
    others[cells] = False
    assert not stored_rows(fp8[0], others.nonzero()[:, 0]).any()


def test_a_decode_does_not_depend_on_its_batch(device: torch.device) -> None:
    pages = Fp8Pages([70, 200, 131], 2, 64, 16, torch.float16, device)
    q = torch.randn(3, 8, 64, device=device).half()
    together = attend_pages(q, pages.k, pages.v, pages.table, pages.lens, 0.125)
    for index in range(3):
        one = slice(index, index + 1)
        alone = attend_pages(
            q[one].contiguous(), pages.k, pages.v, pages.table[one], pages.lens[one], 0.125,
            max_context_len=256,
        )  # fmt: skip
        assert torch.equal(alone, together[one])
