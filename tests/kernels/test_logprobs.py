"""Logprobs equal log-softmax; ranks count larger logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.helpers.sampling_oracle import log_softmax
from tiny_vllm.kernels.logprobs import token_logprobs


@pytest.mark.parametrize("num_top", [0, 1, 5, 49, 50])
@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_values_order_and_ranks_equal_a_plain_computation(num_top: int, has_ties: bool, scale: float) -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(num_top)) * 2
    logits = (logits.round() if has_ties else logits) * scale
    chosen = torch.arange(7) * 7
    token_ids, logprobs, ranks = token_logprobs(logits, chosen, num_top)
    for row in range(7):
        values = logits[row].tolist()
        order = sorted(range(50), key=lambda token: (-values[token], token))
        expected_ids = [int(chosen[row]), *order[:num_top]]
        assert token_ids[row].tolist() == expected_ids
        assert ranks[row].tolist() == [1 + sum(v > values[t] for v in values) for t in expected_ids]
        # FP32: one rounding each of logsumexp and of the difference, both at the size of the logits, and the
        # error of summing 50 terms: below 50 * 2**-24 relative, so as much absolute in the logarithm.
        tolerance = 2.0**-24 * (50 + 4 * np.abs(logits[row].numpy()).max())
        expected = log_softmax(logits[row].numpy())[expected_ids]
        np.testing.assert_allclose(logprobs[row].numpy(), expected, rtol=2.0**-23, atol=tolerance)


def test_a_masked_token_has_minus_infinity() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0]])
    token_ids, logprobs, ranks = token_logprobs(logits, torch.tensor([1]), 3)
    assert token_ids.tolist() == [[1, 0, 2, 1]]
    assert logprobs[0, 0] == -torch.inf
    assert ranks.tolist() == [[3, 1, 1, 3]]


def test_equal_tokens_at_the_border_are_listed_by_id() -> None:
    logits = torch.zeros(2, 500)
    logits[1, 400] = 1.0
    token_ids, _, ranks = token_logprobs(logits, torch.tensor([250, 250]), 3)
    assert token_ids.tolist() == [[250, 0, 1, 2], [250, 400, 0, 1]]
    assert ranks.tolist() == [[1, 1, 1, 1], [2, 1, 2, 2]]
