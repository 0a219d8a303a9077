"""The kernels that read and write FP8 compile for the GPUs that have it, without spilling registers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.kernel_compiler import compiling, meta, missing_tools
from tiny_vllm.kernels.fp8_cache import Fp8Cache
from tiny_vllm.kernels.paged_decode_attention import attend_pages
from tiny_vllm.kernels.prefill_attention import attend_chunks
from tiny_vllm.kernels.rope import prepare_rope, rope_and_cache
from tiny_vllm.kernels.rope_and_attend import HeadNorms, rope_and_attend

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))


@pytest.mark.parametrize("capability", [90, pytest.param(89, marks=pytest.mark.slow)])
@pytest.mark.parametrize("variants", [{}, dict(window=128, softcap=50.0)], ids=["plain", "varied"])
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        (64, torch.bfloat16),
        *(
            pytest.param(head_dim, dtype, marks=pytest.mark.slow)
            for head_dim in (64, 128)
            for dtype in (torch.bfloat16, torch.float16)
            if (head_dim, dtype) != (64, torch.bfloat16)
        ),
    ],
)
def test_attention_over_fp8(
    head_dim: int, dtype: torch.dtype, variants: dict[str, Any], capability: int
) -> None:
    codes, scales = meta(100, 8, 16, head_dim, dtype=torch.float8_e4m3fn), meta(100, 8, 16)
    cache, pdl = Fp8Cache(codes, scales, dtype), capability == 90
    index, table = meta(16, dtype=torch.int64), meta(16, 256, dtype=torch.int64)
    parts = meta(1, 16, 48 * head_dim, dtype=torch.float32)
    angles = meta(4096, head_dim, dtype=torch.float32)
    norms = HeadNorms(meta(head_dim, dtype=dtype), meta(head_dim, dtype=dtype), 1e-6)
    with compiling(capability) as kernels:
        q = meta(16, 32, head_dim, dtype=dtype)
        rope_and_cache(
            meta(16, 48 * head_dim, dtype=dtype), prepare_rope(angles, index, index, 8, 16), cache, cache, 32
        )
        attend_chunks(q, cache, cache, table, meta(17, dtype=torch.int64), index, 0.1, **variants)
        attend_pages(q, cache, cache, table, index, 0.1, pdl=pdl, **variants)
        rope_and_attend(
            parts, None, angles, index, cache, cache, table, index, 32, 0.1, head_norms=norms, pdl=pdl,
            **variants,
        )  # fmt: skip
    assert [kernel.name for kernel in kernels if kernel.name != "_join_parts_kernel"] == [
        "_rope_and_cache_kernel",
        "_prefill_attention_kernel",
        "_attend_part_kernel",
        "_rope_and_attend_kernel",
    ]
    for kernel in kernels:
        # The tiles of prompts are Hopper's: without its products they spill, with 16-bit caches as well.
        if capability == 90 or kernel.name != "_prefill_attention_kernel":
            assert kernel.stack_bytes == 0, f"{kernel.name} spills with {kernel.constants}"
        if kernel.name != "_join_parts_kernel":
            assert "e4m3x2" in kernel.ptx
