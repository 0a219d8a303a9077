"""Gate and up with their activation as one product, against FP32 torch."""

from __future__ import annotations

import pytest
import torch

from tiny_vllm.kernels.gated_linear import GatedTiles, gated_linear_ref, launch_gated_linear
from tiny_vllm.kernels.triton_support import INTERPRETED, has_pdl

pytestmark = pytest.mark.gpu

SMALL = GatedTiles(block_m=32, block_n=32, block_k=32, stages=2, num_warps=4, group=2)
CASES = [(1, 64, 64), (70, 96, 64), (100, 64, 72), (200, 160, 40)]
LARGE = [(1, 2048, 8192), (1000, 2048, 8192), (4097, 4096, 14336), (777, 576, 1536)]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize(("num_tokens", "columns", "width"), CASES if INTERPRETED else LARGE)
def test_equals_the_operators_in_fp32(
    device: torch.device, num_tokens: int, columns: int, width: int, activation: str
) -> None:
    if not (INTERPRETED or has_pdl(device)):
        pytest.skip("the GPU has no TMA")
    tiles, width = (SMALL, width // 32 * 32) if INTERPRETED else (GatedTiles(), width)
    x = torch.randn(num_tokens, columns, device=device).bfloat16()
    weight = (torch.randn(2 * width, columns, device=device) * columns**-0.5).bfloat16()
    actual = launch_gated_linear(x, weight, activation, tiles)
    expected = gated_linear_ref(x.float(), weight.float(), activation)
    assert actual.dtype == torch.bfloat16
    # One rounding to BF16, which the interpreter cuts off instead; sums in another order.
    rtol = 2**-7 if INTERPRETED else 2**-8
    torch.testing.assert_close(actual.float(), expected, rtol=rtol, atol=2**-12)
