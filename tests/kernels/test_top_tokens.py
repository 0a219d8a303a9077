"""The order of tokens is total: larger logit first, lower id first among equals."""

from __future__ import annotations

import pytest
import torch

from tiny_vllm.kernels.top_tokens import top_tokens


@pytest.mark.parametrize("width", [1, 2, 7, 100, 499, 500])
@pytest.mark.parametrize("num_values", [1, 3, 40, 10**6])
def test_the_certain_entries_are_the_first_of_the_full_order(width: int, num_values: int) -> None:
    generator = torch.Generator().manual_seed(width)
    logits = torch.randint(num_values, (5, 500), generator=generator).float()
    values, token_ids, num_certain = top_tokens(logits, width)
    assert values.shape == token_ids.shape == (5, width)
    for row in range(5):
        order = sorted(range(500), key=lambda token: (-logits[row, token].item(), token))
        certain = int(num_certain[row])
        assert token_ids[row, :certain].tolist() == order[:certain]
        assert torch.equal(values[row], logits[row, token_ids[row]])
        assert torch.equal(values[row], logits[row, order[:width]])


def test_all_entries_are_certain_when_the_whole_vocabulary_is_asked_for() -> None:
    assert top_tokens(torch.zeros(2, 9), 9)[2].tolist() == [9, 9]


def test_entries_equal_to_the_last_one_are_not_certain() -> None:
    assert top_tokens(torch.tensor([[3.0, 1.0, 2.0, 1.0, 0.0]]), 3)[2].tolist() == [2]
