"""Gathering what a draw needs, and drawing with filters while moving the slots on."""

from __future__ import annotations

import pytest
import torch

from tiny_vllm.kernels.draw_tokens import SlotAdvance
from tiny_vllm.kernels.read_sampling import SamplingColumns, _launch_read_sampling, read_sampling_ref
from tiny_vllm.kernels.sampling import sample_and_advance, sample_ref

pytestmark = pytest.mark.gpu

NUM_SLOTS = 200
FIELDS = ("temperature", "top_k", "top_p", "min_p", "keys")


def make_columns(device: torch.device, vocab_size: int = 3000) -> SamplingColumns:
    generator = torch.Generator().manual_seed(1)

    def reals(scale: float) -> torch.Tensor:
        return (torch.rand(NUM_SLOTS, generator=generator) * scale).to(device)

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (NUM_SLOTS,), generator=generator).to(device)

    return SamplingColumns(
        stream=integers(-(2**62), 2**62),
        position=integers(0, 5000),
        top_k=integers(1, vocab_size),
        temperature=torch.where(reals(1) < 0.2, 0.0, reals(2)),
        top_p=reals(1),
        min_p=reals(0.01),
    )


@pytest.mark.parametrize("count", [1, 63, 64, 65, NUM_SLOTS])
def test_reads_what_the_slots_hold(device: torch.device, count: int) -> None:
    columns = make_columns(device)
    slots = torch.randperm(NUM_SLOTS)[:count].to(device)
    actual, expected = _launch_read_sampling(columns, slots), read_sampling_ref(columns, slots)
    for name in FIELDS:
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
        assert getattr(actual, name).is_contiguous()


def test_filtered_tokens_go_to_their_slots(device: torch.device) -> None:
    columns = make_columns(device)
    slots = torch.tensor([150, 3, 77, 8, 199], device=device)
    last_token, computed_len, position = (
        torch.full((NUM_SLOTS,), value, device=device) for value in (-1, 40, 7)
    )
    logits = 3 * torch.randn(5, 3000, device=device)
    rows = read_sampling_ref(columns, slots)
    expected = sample_ref(logits, rows)
    advance = SlotAdvance(slots, last_token, computed_len, position)
    tokens = sample_and_advance(logits.clone(), rows, columns.temperature, advance)
    assert torch.equal(tokens, expected)
    is_drawn = torch.zeros(NUM_SLOTS, dtype=torch.bool, device=device).index_fill_(0, slots, True)
    assert torch.equal(last_token[slots], tokens) and (last_token[~is_drawn] == -1).all()
    for column, before in ((computed_len, 40), (position, 7)):
        assert torch.equal(column, before + is_drawn.long())
