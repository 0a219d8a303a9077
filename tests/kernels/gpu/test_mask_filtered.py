"""Masking what the filters drop, against sorting; and the tokens drawn after it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tiny_vllm.kernels.mask_filtered import _launch_mask_filtered, mask_filtered_ref
from tiny_vllm.kernels.sampling import SamplingRows, sample, sample_ref
from tiny_vllm.kernels.sampling_noise import noise_keys
from tiny_vllm.kernels.triton_support import INTERPRETED

pytestmark = pytest.mark.gpu

VOCABULARIES = (5, 6000) if INTERPRETED else (5, 6000, 49152, 128256)
# temperature, top_k (0: off), top_p, min_p
CASES = (
    (0.0, 3, 0.5, 0.5),
    (1.0, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (0.7, 4, 1.0, 0.0),
    (2.0, 2000, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (3.0, 0, 0.999, 0.0),
    (1.0, 0, 0.0, 0.0),
    (1e-30, 0, 0.9, 0.0),
    (1e20, 0, 0.5, 0.0),
    (1.0, 0, 1.0, 0.1),
    (2.0, 0, 1.0, 1e-6),
    (1.0, 0, 1.0, 1.0),
    (1.3, 50, 0.8, 0.0),
    (4.0, 1500, 0.9, 0.01),
    (1.3, 60, 0.95, 0.02),
    (0.2, 0, 0.9, 0.0),
    (0.2, 40, 0.9, 0.0),
)
# The interpreter takes a second for a row: it draws with each filter and with all, and masks with every case.
DRAWN = CASES[3::4] if INTERPRETED else CASES


def columns(
    vocab_size: int, device: torch.device, cases: Sequence[tuple[float, ...]] = CASES
) -> tuple[torch.Tensor, ...]:
    temperature, top_k, top_p, min_p = (
        torch.tensor(column, device=device) for column in zip(*cases, strict=True)
    )
    top_k = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size)
    return temperature, top_k, top_p, min_p


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("tied", [False, True])
def test_keeps_what_sorting_keeps(device: torch.device, vocab_size: int, tied: bool) -> None:
    logits = 3 * torch.randn(len(CASES), vocab_size, device=device)
    if tied:  # every border falls between equals, among them both zeros
        logits = torch.where(torch.rand_like(logits) < 0.5, logits.round(), -logits.round())
    expected, actual = logits.clone(), logits.clone()
    mask_filtered_ref(expected, *columns(vocab_size, device))
    _launch_mask_filtered(actual, *columns(vocab_size, device))
    # Masses that differ in their last FP32 bits can move the border of top_p by a token in a long row.
    moved = ((actual == -torch.inf) != (expected == -torch.inf)).sum(-1)
    uses_top_p = columns(vocab_size, device)[2] < 1
    assert (moved[~uses_top_p] == 0).all()
    assert (moved <= 1 + vocab_size // 20000).all(), moved
    kept = actual > -torch.inf
    assert torch.equal(actual[kept], logits[kept])
    assert kept.gather(-1, logits.argmax(-1, keepdim=True)).all()


def test_masked_tokens_stay_masked_and_count_for_nothing(device: torch.device) -> None:
    logits = torch.full((3, 3000), -torch.inf, device=device)
    logits[:, 5], logits[:, 2500], logits[:, 7] = 1.0, 1.0, 0.0
    temperature = torch.ones(3, device=device)
    top_k = torch.tensor([2, 3000, 10], device=device)
    top_p = torch.tensor([1.0, 0.5, 1.0], device=device)
    _launch_mask_filtered(logits, temperature, top_k, top_p, torch.zeros(3, device=device))
    kept = [row.nonzero().flatten().tolist() for row in logits > -torch.inf]
    # e / (2e + 1) of the mass is 0.42 for the first: the second still begins below one half.
    assert kept == [[5, 2500], [5, 2500], [5, 7, 2500]]


def test_of_very_many_equal_tokens_the_first_ones_stay(device: torch.device) -> None:
    """More than fit among the candidates, and the border between them lies in a later tile."""
    logits = torch.full((3, 6000), 2.0, device=device)
    logits[2, 100:] = 1.0
    temperature = torch.ones(3, device=device)
    top_k = torch.tensor([5000, 6000, 4200], device=device)
    top_p = torch.tensor([1.0, 0.5, 1.0], device=device)
    _launch_mask_filtered(logits, temperature, top_k, top_p, torch.zeros(3, device=device))
    for row, count in enumerate((5000, 3000, 4200)):
        assert (logits[row, :count] > -torch.inf).all() and (logits[row, count:] == -torch.inf).all()


def test_broken_rows_stay_recognisable_and_spoil_no_other(device: torch.device) -> None:
    logits = torch.randn(4, 5000, device=device)
    logits[0, 4900] = float("nan")
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    expected = logits.clone()
    ones = torch.ones(4, device=device)
    arguments = (ones, (ones * 4).long(), ones * 0.9, ones * 0.0)
    _launch_mask_filtered(logits, *arguments)
    assert torch.equal(logits[:3].nan_to_num(nan=9.0), expected[:3].nan_to_num(nan=9.0))
    mask_filtered_ref(expected, *arguments)
    assert torch.equal(logits[3], expected[3])
    keys = noise_keys(torch.arange(4, device=device), torch.arange(4, device=device))
    tokens = sample(logits, SamplingRows(*arguments, keys))
    assert (tokens < 0).tolist() == [True, True, True, False]


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_draws_the_tokens_of_the_whole_rule(device: torch.device, vocab_size: int) -> None:
    count = len(DRAWN)
    logits = 3 * torch.randn(count, vocab_size, device=device)
    keys = noise_keys(torch.arange(count, device=device) * 7919, torch.arange(count, device=device))
    rows = SamplingRows(*columns(vocab_size, device, DRAWN), keys)
    expected = sample_ref(logits, rows)
    tokens = sample(logits.clone(), rows)
    # Only a near-tie of the race or of a border may be decided differently.
    assert (tokens != expected).sum() <= 1
