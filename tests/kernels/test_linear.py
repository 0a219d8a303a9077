"""Linear, packed and plain, against FP64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tiny_vllm.kernels import linear as linear_module
from tiny_vllm.kernels.linear import Linear

CASES = {"typical": (16, 96, 64), "irregular": (7, 37, 53), "one_row": (1, 64, 96), "prompt": (130, 64, 48)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of the result's size: sums of up to 100 products in FP32; else one rounding or, unpacked, two.
TOLERANCES = {torch.float32: 100 * 2**-24, torch.bfloat16: 2**-7, torch.float16: 2**-9}

OPERATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "plain": (lambda layer, x, other: layer(x), lambda y, other: y),
    "add": (lambda layer, x, other: layer.add(x, other), lambda y, other: y + other),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("packing", ["packed", "plain"])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_product_and_what_follows_it(
    case: str,
    operation: str,
    packing: str,
    has_bias: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if packing == "plain":
        monkeypatch.setattr(linear_module, "_reorder", None)
    num_tokens, in_features, out_features = CASES[case]
    x = torch.randn(num_tokens, in_features).to(dtype)
    other = torch.randn(num_tokens, out_features).to(dtype)
    weight = (torch.randn(out_features, in_features) * in_features**-0.5).to(dtype)
    bias = torch.randn(out_features).to(dtype) if has_bias else None
    layer = Linear(weight, bias)
    assert not (packing == "plain" and layer.is_packed)

    compute, follow = OPERATIONS[operation]
    actual = compute(layer, x, other.clone())
    product = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    expected = follow(product, other.double())
    assert actual.dtype == dtype
    size = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=TOLERANCES[dtype] * size)


def test_a_product_of_no_rows_is_empty() -> None:
    assert Linear(torch.randn(5, 3))(torch.randn(0, 3)).shape == (0, 5)


def test_packing_does_not_keep_the_plain_matrix() -> None:
    weight = torch.randn(8, 16)
    layer = Linear(weight)
    if not layer.is_packed:
        pytest.skip("this torch cannot pack")
    assert layer.weight is not weight
