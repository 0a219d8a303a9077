from __future__ import annotations

import pytest
import torch

from tiny_vllm.kernels.norm_queries_and_keys import (
    _launch_norm_queries_and_keys,
    norm_queries_and_keys_ref,
)
from tiny_vllm.kernels.triton_support import INTERPRETED, has_pdl

pytestmark = pytest.mark.gpu

# splits, rows, values of the queries, values of the keys
SHAPES = {
    "olmo_1b": (4, 3, 2048, 2048),
    "fewer_keys": (1, 17, 320, 64),
    "odd_width": (2, 1, 96, 96),
}
if not INTERPRETED:
    SHAPES |= {"olmo_32b": (2, 256, 5120, 1024)}
# Norms of FP32 values differ by the order of the sum: sqrt(2048) x 2^-24, relative.
TOLERANCE = 3e-6


@pytest.mark.parametrize("part_type", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_queries_and_keys_are_normed_over_all_heads_and_values_only_summed(
    device: torch.device, shape: str, has_bias: bool, part_type: torch.dtype
) -> None:
    splits, rows, q_size, kv_size = SHAPES[shape]
    width = q_size + 2 * kv_size
    parts = torch.randn(splits, rows, width, device=device).to(part_type)
    bias = torch.randn(width, device=device).bfloat16() if has_bias else None
    q_norm, k_norm = 0.5 + torch.rand(q_size, device=device), 0.5 + torch.rand(kv_size, device=device)
    total = parts.double().sum(0) + (0 if bias is None else bias.double())
    q, k, v = total.split([q_size, kv_size, kv_size], 1)
    normed = [
        values * torch.rsqrt(values.square().mean(-1, keepdim=True) + 1e-5) * norm.double()
        for values, norm in ((q, q_norm), (k, k_norm))
    ]
    expected = torch.cat((*normed, v), 1)
    for op in (_launch_norm_queries_and_keys, norm_queries_and_keys_ref):
        actual = op(parts, bias, q_norm, k_norm, 1e-5, has_pdl(device))
        assert actual.shape == (1, rows, width) and actual.dtype == torch.float32
        size = float(expected.abs().max())
        torch.testing.assert_close(actual[0].double(), expected, rtol=0, atol=TOLERANCE * size)
