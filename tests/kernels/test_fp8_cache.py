"""Rows of FP8 numbers with their scales, and the CPU attention that reads them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.test_paged_decode_attention import CASES, make_case
from tiny_vllm.kernels.fp8_cache import (
    Fp8Cache,
    dequantise_rows,
    quantise_rows,
    read_rows,
    write_rows,
)
from tiny_vllm.kernels.paged_decode_attention import (
    PagedContext,
    paged_decode_attention,
    prepare_decode_attention,
)
from tiny_vllm.kernels.prefill_attention import PagedChunks, prefill_attention, prepare_prefill_attention
from tiny_vllm.kernels.rope import prepare_rope, rope_and_cache

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of the type that a row is read in.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def round_trip(x: Tensor) -> Tensor:
    return dequantise_rows(*quantise_rows(x), x.dtype)


def allowed_error(x: Tensor) -> Tensor:
    """Half a step of three mantissa bits, 2^-4, or of the smallest numbers, 2^-10 of a scale, which is within
    2^-8 of max |x| / 448; and x' is rounded to its type."""
    wide = x.double().abs()
    steps = torch.maximum(wide * 2**-4, wide.amax(-1, keepdim=True) * 2**-10 / 448 * (1 + 2**-8))
    rounding = (wide + steps) * ROUNDING[x.dtype]
    return steps + rounding.clamp(min=2**-25 if x.dtype == torch.float16 else 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1.0, 300.0, 2.0**-12])
def test_a_value_is_off_by_a_sixteenth_of_itself_at_most(dtype: torch.dtype, size: float) -> None:
    x = torch.randn(400, 64) * torch.exp2(torch.randint(-8, 1, (400, 64)).float()) * size
    # Outliers as keys have them.
    x[:, 3] *= 16
    x = x.to(dtype)
    assert bool(((round_trip(x).double() - x.double()).abs() <= allowed_error(x)).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_value_of_a_row_is_off_by_its_scale_alone(dtype: torch.dtype) -> None:
    x = torch.randn(400, 64).to(dtype)
    index = x.abs().argmax(-1, keepdim=True)
    largest = x.gather(1, index).double()
    error = (round_trip(x).gather(1, index).double() - largest).abs()
    assert bool((error <= largest.abs() * (2**-8 + ROUNDING[dtype]) * (1 + 2**-8)).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_becomes_nan_or_infinite(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    edges = torch.tensor([info.max, info.min, torch.inf, -torch.inf, 449.0, 1e4, info.tiny, 2.0**-140, 0.0])
    x = torch.stack([edge * torch.ones(16) for edge in edges.to(dtype)] + [torch.randn(16).to(dtype)] * 2)
    x[-1, 4] = torch.inf
    assert bool(round_trip(x).isfinite().all())
    # Infinity and the largest number are stored as nearly the latter.
    assert bool((round_trip(x)[:4].abs().double() >= info.max * (1 - 2**-6)).all())
    assert not round_trip(x)[-3].any()


def test_nan_stays_nan() -> None:
    x = torch.randn(3, 16)
    x[1, 5] = torch.nan
    assert round_trip(x).isnan().any(-1).tolist() == [False, True, False]


def test_a_row_depends_on_its_own_values_alone_and_on_their_size_not_at_all() -> None:
    x = torch.randn(50, 64)
    codes, scales = quantise_rows(x)
    alone, scale = quantise_rows(x[7:8])
    assert torch.equal(alone.float(), codes[7:8].float()) and scale == scales[7]
    larger_codes, larger_scales = quantise_rows(x * 2.0**20)
    assert torch.equal(larger_codes.float(), codes.float())
    assert torch.equal(larger_scales.float(), scales.float() * 2**20)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_written_rows_are_read_and_no_others_change(dtype: torch.dtype) -> None:
    cache = empty_cache((5, 2, 4, 16), dtype)
    before = cache.codes.float().clone(), cache.scales.clone()
    rows = torch.tensor([3, 39, 17])
    values = torch.randn(3, 16).to(dtype)
    write_rows(cache, rows, values)
    assert torch.equal(read_rows(cache, rows, 1).squeeze(1), round_trip(values))
    untouched = torch.ones(40, dtype=torch.bool)
    untouched[rows] = False
    assert torch.equal(cache.codes.float().view(40, 16)[untouched], before[0].view(40, 16)[untouched])
    assert torch.equal(cache.scales.view(-1)[untouched], before[1].view(-1)[untouched])


def empty_cache(shape: tuple[int, ...], dtype: torch.dtype) -> Fp8Cache:
    codes = torch.randint(0, 100, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return Fp8Cache(codes, torch.rand(shape[:-1]).bfloat16(), dtype)


def in_fp8(cache: Tensor) -> tuple[Fp8Cache, Tensor]:
    """The cache in FP8, and what it is read as, in an ordinary cache."""
    codes, scales = quantise_rows(cache)
    return Fp8Cache(codes, scales, cache.dtype), dequantise_rows(codes, scales, cache.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variants", [{}, dict(window=7, softcap=2.0)], ids=["plain", "varied"])
@pytest.mark.parametrize("case", [case for case in CASES if case != "largest"])
def test_decodes_attend_to_what_is_stored(case: str, variants: dict[str, float], dtype: torch.dtype) -> None:
    q, k_cache, v_cache, table, lens, _ = make_case(case, dtype, torch.nan)
    (k_fp8, k_read), (v_fp8, v_read) = in_fp8(k_cache), in_fp8(v_cache)
    contexts = [PagedContext(table, lens)]
    if not variants:
        contexts = prepare_decode_attention(table, lens, k_cache.shape[1], k_cache.shape[2], dtype)
    actual = paged_decode_attention(q, k_fp8, v_fp8, contexts, 0.2, **variants)
    assert actual.isfinite().all() and actual.dtype == dtype
    assert torch.equal(actual, paged_decode_attention(q, k_read, v_read, contexts, 0.2, **variants))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variants", [{}, dict(window=7, softcap=2.0)], ids=["plain", "varied"])
def test_chunks_attend_to_what_is_stored(variants: dict[str, float], dtype: torch.dtype) -> None:
    _, k_cache, v_cache, table, lens, _ = make_case("typical", dtype, torch.nan)
    (k_fp8, k_read), (v_fp8, v_read) = in_fp8(k_cache), in_fp8(v_cache)
    starts = torch.tensor([0, 5, 70, 71, 72])
    q = torch.randn(72, 9, 64).to(dtype)
    contexts = [PagedChunks(table, starts, lens)]
    if not variants:
        contexts = prepare_prefill_attention(table, starts, lens, 3, 16)
    actual = prefill_attention(q, k_fp8, v_fp8, contexts, 0.2, **variants)
    assert actual.isfinite().all() and actual.dtype == dtype
    assert torch.equal(actual, prefill_attention(q, k_read, v_read, contexts, 0.2, **variants))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_are_stored_after_their_rotation(dtype: torch.dtype) -> None:
    qkv, angles = torch.randn(5, 8 * 16).to(dtype), torch.rand(30, 8)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    positions, cells = torch.tensor([29, 0, 3, 4, 7]), torch.tensor([11, 4, 30, 7, 6])
    step = prepare_rope(cos_sin, positions, cells, 2, 4)
    plain = torch.zeros(2, 9, 2, 4, 16, dtype=dtype)
    fp8 = [empty_cache((9, 2, 4, 16), dtype) for _ in range(2)]
    q = rope_and_cache(qkv, step, plain[0], plain[1], 4)
    assert torch.equal(rope_and_cache(qkv, step, fp8[0], fp8[1], 4), q)
    pages, offsets = cells // 4, cells % 4
    for values, cache in zip(plain, fp8, strict=True):
        read = dequantise_rows(cache.codes, cache.scales, dtype)
        assert torch.equal(read[pages, :, offsets], round_trip(values[pages, :, offsets]))
