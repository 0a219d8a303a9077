"""The mixture of experts against the sum over all experts, and the rules of its router."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.test_spec import LLAMA
from tiny_vllm.models.experts import Experts, route
from tiny_vllm.models.residual import ResidualJoin
from tiny_vllm.models.spec import ExpertsSpec
from tiny_vllm.models.weights import LayerWeights

HIDDEN, INNER, NUM_EXPERTS = 64, 32, 5
SPEC = ExpertsSpec(num_experts=NUM_EXPERTS, num_active=2, intermediate_size=INNER)
# FP32 sums of up to 64 products of size 1 in another order, two products deep.
TOLERANCE = 2 * 64 * 2**-24 * 4


def test_the_largest_probabilities_are_picked_and_brought_to_a_sum_of_one() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0, 0.5]])
    experts, weights = route(logits, SPEC)
    assert experts.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, torch.tensor([[2.0, 1.0]]).softmax(-1))


def test_without_normalising_they_keep_their_share_of_all_experts() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0, 0.5]])
    _, weights = route(logits, replace(SPEC, normalize=False))
    torch.testing.assert_close(weights, logits.softmax(-1)[:, [1, 2]])


def test_equal_probabilities_favour_the_lower_expert() -> None:
    experts, weights = route(torch.zeros(3, NUM_EXPERTS), SPEC)
    assert experts.tolist() == [[0, 1]] * 3
    assert torch.equal(weights, torch.full((3, 2), 0.5))


def random_layer() -> LayerWeights:
    unused = torch.empty(0)
    return LayerWeights(
        input_norm=unused,
        qkv=unused,
        output=unused,
        post_attention_norm=unused,
        gate_up=torch.randn(NUM_EXPERTS, 2 * INNER, HIDDEN) * HIDDEN**-0.5,
        down=torch.randn(NUM_EXPERTS, HIDDEN, INNER) * INNER**-0.5,
        router=torch.randn(NUM_EXPERTS, HIDDEN) * HIDDEN**-0.5,
    )


def mixture(hidden: Tensor, layer: LayerWeights) -> Tensor:
    """Every expert over every token, most of them times zero."""
    assert layer.router is not None
    experts, picked = route(hidden @ layer.router.T, SPEC)
    weights = torch.zeros(len(hidden), NUM_EXPERTS).scatter_(1, experts, picked)
    gate, up = torch.einsum("th,eih->eti", hidden, layer.gate_up).chunk(2, -1)
    outputs = torch.einsum("eti,ehi->eth", F.silu(gate) * up, layer.down)
    return torch.einsum("te,eth->th", weights, outputs)


@pytest.mark.parametrize("num_tokens", [1, 2, 40])
def test_it_is_the_weighted_sum_of_the_experts(num_tokens: int) -> None:
    layer = random_layer()
    hidden, residual = torch.randn(num_tokens, HIDDEN), torch.randn(num_tokens, HIDDEN)
    spec = replace(LLAMA, experts=SPEC)
    actual = Experts(spec, layer, ResidualJoin(spec, None))(hidden, residual)
    torch.testing.assert_close(actual, residual + mixture(hidden, layer), rtol=0, atol=TOLERANCE)


def test_what_it_adds_is_scaled_by_the_residual_multiplier() -> None:
    layer = random_layer()
    hidden, residual = torch.randn(3, HIDDEN), torch.randn(3, HIDDEN)
    spec = replace(LLAMA, experts=SPEC, residual_multiplier=0.5)
    actual = Experts(spec, layer, ResidualJoin(spec, None))(hidden, residual)
    torch.testing.assert_close(actual, residual + 0.5 * mixture(hidden, layer), rtol=0, atol=TOLERANCE)
