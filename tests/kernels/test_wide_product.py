"""BF16 products with FP32 results."""

from __future__ import annotations

import pytest
import torch

from tiny_vllm.kernels.wide_product import has_wide_bmm, wide_bmm

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no BF16 products"
)


@pytest.mark.parametrize(
    ("n", "m", "k", "columns"), [(3, 3, 64, 512), (48, 4, 128, 77), (1, 1, 64, 1), (2, 384, 80, 300)]
)
def test_result_is_far_more_precise_than_bfloat16(n: int, m: int, k: int, columns: int) -> None:
    a, b = torch.randn(n, m, k).bfloat16(), torch.randn(n, columns, k).bfloat16()
    exact = a.double() @ b.double().mT
    actual = wide_bmm(a, b.mT)
    assert actual.dtype == torch.float32
    # 2^-9 of what the first rounding left, 2^-9 of the value; and k FP32 additions.
    bound = exact.abs().max() * (2**-18 + k * 2**-24)
    assert (actual.double() - exact).abs().max() <= bound


def test_a_library_that_rounds_before_it_subtracts_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def round_first(high: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: int) -> torch.Tensor:
        return torch.bmm(a, b) + beta * high

    assert has_wide_bmm()
    monkeypatch.setattr(torch, "baddbmm", round_first)
    assert not has_wide_bmm.__wrapped__()
