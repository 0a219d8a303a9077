"""What the compiler makes of the Triton kernel of prefill attention; no GPU is needed."""

from __future__ import annotations

import re

import pytest
import torch

from tests.helpers.kernel_compiler import compiling, meta, missing_tools
from tiny_vllm.kernels import prefill_attention
from tiny_vllm.kernels.prefill_attention import attend_chunks

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))


def compile_ptx(head_dim: int, softcap: float | None = None) -> str:
    cache, index = meta(100, 8, 16, head_dim), meta(4, dtype=torch.int64)
    table = meta(3, 256, dtype=torch.int64)
    with compiling() as kernels:
        attend_chunks(meta(512, 32, head_dim), cache, cache, table, index, index[:3], 0.125, softcap=softcap)
    (kernel,) = kernels
    return kernel.ptx


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_scale_is_part_of_the_exponents_multiply_add(head_dim: int) -> None:
    rows, keys, warps, _ = next(tile for limit, tile in prefill_attention.TILES_16_BIT if limit >= head_dim)
    scores = rows * keys // (32 * warps)  # of a thread, in each of the two loops
    plain, capped = compile_ptx(head_dim), compile_ptx(head_dim, 30.0)
    assert len(re.findall(r"fma\.rn\.f32", plain)) >= 2 * scores
    # Soft caps need the scaled scores themselves.
    assert plain.count("mul.f32") <= capped.count("mul.f32") - 2 * scores
