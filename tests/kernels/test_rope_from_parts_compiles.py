"""What the compiler makes of the kernel that ends a QKV product; no GPU is needed."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.kernel_compiler import compiling, meta, missing_tools
from tiny_vllm.kernels.fp8_cache import Cache, Fp8Cache
from tiny_vllm.kernels.rope_from_parts import HeadNorms, rope_from_parts

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_it_spills_nothing_and_waits_before_it_reads_parts(head_dim: int, splits: int, is_fp8: bool) -> None:
    cache: Cache = meta(100, 8, 16, head_dim)
    if is_fp8:
        codes = meta(100, 8, 16, head_dim, dtype=torch.float8_e4m3fn)
        cache = Fp8Cache(codes, meta(100, 8, 16), torch.bfloat16)
    index = meta(64, dtype=torch.int64)
    parts = meta(splits, 64, 48 * head_dim, dtype=torch.float32)
    angles = meta(4096, head_dim, dtype=torch.float32)
    norms = HeadNorms(meta(head_dim), meta(head_dim), 1e-6)
    with compiling() as kernels:
        rope_from_parts(
            parts, None, angles, index, index, cache, cache, 32, head_norms=norms,
            pdl=True,
        )  # fmt: skip
    (kernel,) = kernels
    assert kernel.stack_bytes == 0
    before, after = kernel.ptx.split("griddepcontrol.wait")
    assert before.count("griddepcontrol.launch_dependents") == 1
    assert "st.global" not in before and "st.global" in after
    assert ("e4m3x2" in kernel.ptx) == is_fp8
    assert "ld.global" in before  # cosines, lengths and cells
