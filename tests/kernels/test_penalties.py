"""Penalties touch the listed tokens of the listed rows, and nothing else."""

from __future__ import annotations

import torch

from tiny_vllm.kernels.penalties import apply_penalties


def penalise(
    logits: torch.Tensor, strengths: list[float], entries: list[tuple[int, int, bool]]
) -> torch.Tensor:
    token_ids, counts, in_prompt = zip(*entries, strict=True)
    apply_penalties(
        logits,
        torch.tensor([1]),
        torch.tensor([token_ids]),
        torch.tensor([counts], dtype=torch.int32),
        torch.tensor([in_prompt]),
        torch.tensor([strengths]),
    )
    return logits


def test_repetition_divides_positive_and_multiplies_negative_logits_once() -> None:
    logits = torch.tensor([[4.0, -4.0, 4.0, 4.0]] * 3)
    penalise(logits, [2.0, 0.0, 0.0], [(0, 3, False), (1, 0, True), (2, 1, True)])
    assert logits[1].tolist() == [2.0, -8.0, 2.0, 4.0]


def test_frequency_counts_and_presence_does_not_and_the_prompt_is_spared() -> None:
    logits = torch.zeros(3, 4)
    penalise(logits, [1.0, 0.5, 0.25], [(0, 3, False), (1, 1, True), (2, 0, True)])
    assert logits[1].tolist() == [-1.75, -0.75, 0.0, 0.0]


def test_repetition_comes_before_the_subtracted_penalties() -> None:
    logits = penalise(torch.full((3, 2), 4.0), [2.0, 1.0, 0.0], [(0, 1, False)])
    assert logits[1, 0] == 4.0 / 2 - 1


def test_repeated_entries_count_once_and_empty_ones_change_nothing() -> None:
    logits = penalise(torch.full((3, 4), 4.0), [2.0, 1.0, 0.0], [(3, 1, False)] * 5 + [(0, 0, False)] * 2)
    assert logits[1].tolist() == [4.0, 4.0, 4.0, 1.0]


def test_other_rows_and_masked_tokens_keep_their_values() -> None:
    logits = torch.full((3, 4), 4.0)
    logits[1, 0] = -torch.inf
    penalise(logits, [2.0, -1.0, -1.0], [(0, 2, True), (1, 2, True)])
    assert logits[1, 0] == -torch.inf
    assert (logits[[0, 2]] == 4.0).all()
