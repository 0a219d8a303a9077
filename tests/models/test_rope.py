"""The table of angles. Its scalings meet transformers in test_decoder.py; here is what they mean."""

from __future__ import annotations

import torch

from tiny_vllm.models.rope import rope_table, unrotated_table
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


def test_longrope_takes_the_long_factors_for_all_positions_once_more_is_allowed() -> None:
    plain = RopeSpec(theta=1e4, rotary_dim=8)
    longrope = RopeSpec(
        theta=1e4,
        rotary_dim=8,
        scaling="longrope",
        factor=4.0,
        original_max_position_embeddings=32,
        attention_factor=1.0,
        short_factors=(1.0,) * 4,
        long_factors=(4.0,) * 4,
    )
    assert torch.equal(rope_table(longrope, max_len=32), rope_table(plain, max_len=32))
    torch.testing.assert_close(rope_table(longrope, max_len=128)[::4], rope_table(plain, max_len=32))


def test_longrope_grows_cosines_by_the_root_of_the_ratio_of_logarithms() -> None:
    rope = RopeSpec(
        theta=1e4,
        rotary_dim=4,
        scaling="longrope",
        factor=16.0,
        original_max_position_embeddings=4096,
        short_factors=(1.0, 1.0),
        long_factors=(1.0, 1.0),
    )
    # ln 16 / ln 4096 is 1 / 3.
    torch.testing.assert_close(rope_table(rope, max_len=1)[0, :2], torch.full((2,), (4 / 3) ** 0.5))


def test_a_table_without_rotation_turns_nothing() -> None:
    assert torch.equal(unrotated_table(6, max_len=2), torch.tensor([[1.0, 1, 1, 0, 0, 0]] * 2))
