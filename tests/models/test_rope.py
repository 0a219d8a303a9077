"""The table of angles. Its scalings meet transformers in test_decoder.py; here is what they mean."""

from __future__ import annotations

import torch

from tiny_vllm.models.rope import rope_table
from tiny_vllm.models.spec import RopeSpec


def test_rows_hold_cosines_then_sines_of_the_position() -> None:
    table = rope_table(RopeSpec(theta=100.0, rotary_dim=4), max_len=8)
    angles = torch.tensor([3.0, 3.0 / 10.0])
    assert table.shape == (8, 4)
    torch.testing.assert_close(table[3], torch.cat((angles.cos(), angles.sin())))


def test_linear_scaling_stretches_positions_by_its_factor() -> None:
    plain = rope_table(RopeSpec(theta=1e4, rotary_dim=8), max_len=8)
    linear = rope_table(RopeSpec(theta=1e4, rotary_dim=8, scaling="linear", factor=4.0), max_len=32)
    torch.testing.assert_close(linear[::4], plain)


def test_dynamic_scaling_is_none_within_the_original_length() -> None:
    plain = RopeSpec(theta=1e4, rotary_dim=8)
    dynamic = RopeSpec(
        theta=1e4, rotary_dim=8, scaling="dynamic", factor=2.0, original_max_position_embeddings=32
    )
    assert torch.equal(rope_table(dynamic, max_len=32), rope_table(plain, max_len=32))
    assert not torch.equal(rope_table(dynamic, max_len=64)[:32], rope_table(plain, max_len=32))
