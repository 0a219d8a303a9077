"""Keys and values in eight bits: rows of e4m3 numbers, each row with a scale of its own.

    s = bf16(max |x| / 448),   code = e4m3(x / s),   x' = code * s

A row is one token's key or value of one KV head: x [..., D] FP32, BF16 or FP16; codes [..., D] float8_e4m3fn
(1 sign, 4 exponent, 3 mantissa bits; 448 is the largest); s [...] BF16. A row costs D + 2 bytes, and depends
on nothing but its own values, so it does not matter with whom or when a token is computed.

|x' - x| is at most 2^-4 |x|, 2^-18 max |x| where that is more, and 2^-8 |x| for the largest. The last is why
scales are no powers of two, which would be a byte: keys have a few dimensions far larger than the rest, whose
rounding is most of the error in scores. One scale for all, 1.0 in other engines, has that error too, and
saturates keys beyond 448. LOG.md compares. Infinite values become the largest finite ones of x's type (but
for a factor of 1 - 2^-8, so that x' is finite as well); NaN stays NaN.

Source: the format, Micikevicius et al. 2022, arXiv 2209.05433.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_vllm.kernels.triton_support import IS_INTERPRETED, jit, tl

LARGEST_FP16 = tl.constexpr(65504 * (1 - 2.0**-8))
LARGEST = tl.constexpr((2 - 2.0**-7) * 2.0**127 * (1 - 2.0**-8))
INVERSE_OF_448 = tl.constexpr(1 / 448)
# Its inverse is finite; it holds zeros.
SMALLEST_SCALE = tl.constexpr(2.0**-100)


@dataclass(frozen=True, slots=True)
class Fp8Cache:
    """Stands for a cache tensor [num_pages, Hkv, page_size, D] of `dtype`, as which its rows are read.

    codes: float8_e4m3fn of that shape, contiguous. scales: [num_pages, Hkv, page_size] BF16, contiguous.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape


Cache = Tensor | Fp8Cache


def cache_tensors(cache: Cache) -> tuple[Tensor, Tensor | None]:
    """What a kernel gets: the values or codes, and the scales of codes."""
    values, scales = (cache.codes, cache.scales) if isinstance(cache, Fp8Cache) else (cache, None)
    assert values.is_contiguous() and (scales is None or scales.is_contiguous())
    return values, scales


def write_rows(cache: Cache, rows: Tensor, values: Tensor) -> None:
    """values [N, D] -> rows [N] int64 of the cache seen as [num_pages * Hkv * page_size, D]."""
    head_dim = cache.shape[-1]
    if isinstance(cache, Fp8Cache):
        codes, scales = quantise_rows(values.to(cache.dtype))
        cache.scales.view(-1).index_copy_(0, rows, scales)
        cache.codes.view(torch.uint8).view(-1, head_dim).index_copy_(0, rows, codes.view(torch.uint8))
    else:
        cache.view(-1, head_dim).index_copy_(0, rows, values)


def read_rows(cache: Cache, rows: Tensor, run_len: int) -> Tensor:
    """Runs of rows: rows [N] int64 of the cache seen as [.., run_len, D] -> [N, run_len, D] of its dtype."""
    head_dim = cache.shape[-1]
    if isinstance(cache, Fp8Cache):
        # torch cannot index eight-bit floats on a CPU.
        bits = cache.codes.view(torch.uint8).view(-1, run_len * head_dim).index_select(0, rows)
        codes = bits.view(torch.float8_e4m3fn).view(-1, run_len, head_dim)
        return dequantise_rows(codes, cache.scales.view(-1, run_len).index_select(0, rows), cache.dtype)
    return cache.view(-1, run_len * head_dim).index_select(0, rows).view(-1, run_len, head_dim)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] -> codes [..., D] float8_e4m3fn, scales [...] BF16."""
    limit = _number(LARGEST_FP16 if x.dtype == torch.float16 else LARGEST)
    wide = x.float().clamp(-limit, limit)
    scales = wide.abs().amax(-1, keepdim=True).mul_(_number(INVERSE_OF_448))
    scales = scales.clamp_(min=_number(SMALLEST_SCALE)).bfloat16()
    return (wide * scales.float().reciprocal()).to(torch.float8_e4m3fn), scales.squeeze(-1)


def dequantise_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `quantise_rows`: [..., D] of `dtype`, rounded once."""
    return (codes.float() * scales.float().unsqueeze(-1)).to(dtype)


def _number(constant: object) -> float:
    """constexpr is Triton's class, or without Triton the number itself."""
    return float(getattr(constant, "value", constant))  # type: ignore[arg-type]


@jit
def row_scales(largest, of_type: tl.constexpr):
    """largest: max |x| of each row, FP32; of_type: x's. -> BF16."""
    LIMIT: tl.constexpr = LARGEST_FP16 if of_type == tl.float16 else LARGEST
    scales = tl.maximum(tl.minimum(largest, LIMIT) * INVERSE_OF_448, SMALLEST_SCALE)
    if IS_INTERPRETED:
        scales = _round_bits(scales, 16)
    return scales.to(tl.bfloat16)


@jit
def encode_rows(x, scales):
    """Codes of x, against which the scales are broadcast."""
    LIMIT: tl.constexpr = LARGEST_FP16 if x.dtype == tl.float16 else LARGEST
    wide = tl.clamp(x.to(tl.float32), -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    scaled = wide * tl.div_rn(1.0, scales.to(tl.float32))
    if IS_INTERPRETED:
        # Adding this leaves multiples of 2^-9, which the smallest codes are.
        magic = 1.5 * 2.0**14
        scaled = tl.where(tl.abs(scaled) < 2.0**-6, (scaled + magic) - magic, _round_bits(scaled, 20))
    return scaled.to(tl.float8e4nv)


@jit
def _round_bits(x, NUM_BITS: tl.constexpr):
    """FP32 x rounded to even, its last bits zero. The interpreter cuts BF16 off, and loses carries into the
    exponent of FP8: this leaves it nothing to round."""
    bits = x.to(tl.int32, bitcast=True)
    half = (1 << (NUM_BITS - 1)) - 1 + ((bits >> NUM_BITS) & 1)
    return ((bits + half) & -(1 << NUM_BITS)).to(tl.float32, bitcast=True)


@jit
def decode_rows(codes, scales, TYPE: tl.constexpr):
    """x' of codes, against which the scales are broadcast."""
    return (codes.to(tl.float32) * scales.to(tl.float32)).to(TYPE)
