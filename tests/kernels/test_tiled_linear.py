"""How products are cut into programs: plain arithmetic, no kernel runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tiny_vllm.kernels.tiled_linear import (
    GATED_TILES,
    MANY_WEIGHT_ROWS,
    MOST_PROGRAMS,
    SHARED_BYTES,
    SPLIT_TILES,
    TALL_TILES,
    Tiles,
    choose_split_tiles,
    choose_tiles,
    count_splits,
    fit_stages,
)

TILES = Tiles(block_n=64, block_k=128, stages=4, ahead=128, num_warps=4)


@pytest.mark.parametrize(
    ("N", "K", "splits"),
    [(3072, 2048, 2), (2048, 2048, 4), (2048, 8192, 4), (128256, 2048, 1), (64, 512, 2), (64, 200, 1)],
)
def test_k_is_split_until_the_programs_fill_the_gpu_or_it_is_short(N: int, K: int, splits: int) -> None:
    assert count_splits(N, K, TILES) == splits


def test_tables_are_looked_up_by_rows_and_end_in_cublas() -> None:
    for table, choose in (
        (SPLIT_TILES, choose_split_tiles),
        (GATED_TILES, lambda rows: choose_tiles(rows, 16384, True)),
        (TALL_TILES, lambda rows: choose_tiles(rows, MANY_WEIGHT_ROWS, False)),
    ):
        limits = [most for most, _ in table]
        assert limits == sorted(limits)
        assert [choose(most) for most in limits] == [tiles for _, tiles in table]
        assert choose(limits[-1] + 1) is None


def test_stages_fit_into_shared_memory() -> None:
    # A stage is 2 * (64 + 64) * 128 bytes = 32 KB.
    assert fit_stages(TILES, 64, MOST_PROGRAMS, False, SHARED_BYTES) == TILES
    assert fit_stages(TILES, 64, MOST_PROGRAMS, False, 101_376) == replace(TILES, stages=3)


def test_of_more_programs_than_multiprocessors_two_share_one() -> None:
    assert fit_stages(TILES, 64, MOST_PROGRAMS + 1, False, SHARED_BYTES) == replace(TILES, stages=3)
    # A stage is 48 KB, or 24 of half the length.
    assert fit_stages(TILES, 64, MOST_PROGRAMS + 1, True, SHARED_BYTES) == replace(TILES, block_k=64)


def test_few_stages_become_more_of_half_the_length() -> None:
    gated = fit_stages(TILES, 64, MOST_PROGRAMS, True, 101_376)
    assert gated == replace(TILES, block_k=64, stages=4)


def test_there_is_always_a_stage() -> None:
    assert fit_stages(TILES, 128, 1, True, 16_384).stages == 1
