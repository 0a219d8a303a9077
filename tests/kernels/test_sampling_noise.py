"""The noise is exactly its definition, and as random as the statistics of a few million values can tell."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.helpers.sampling_oracle import arrival_times
from tiny_vllm.kernels.sampling_noise import log_race_times, noise_keys, stream_of_seed

VOCAB = 49152
# Standard deviations. The inputs are fixed, so a test either always passes or never does; among some forty
# statistics of perfect noise the largest exceeds this once in 700 suites like this one.
LIMIT = 4.2


def keys(seeds: list[int], positions: list[int]) -> torch.Tensor:
    streams = torch.tensor([stream_of_seed(seed) for seed in seeds])
    return noise_keys(streams, torch.tensor(positions))


def uniforms(noise_key: torch.Tensor, token_ids: torch.Tensor) -> np.ndarray:
    """The race times as values that should be uniform in (0, 1)."""
    return -np.expm1(-np.exp(log_race_times(noise_key, token_ids).double().numpy()))


def chi_square(observed: np.ndarray, expected: np.ndarray | float) -> float:
    """Chi-square as standard deviations from its mean."""
    freedom = observed.size - 1
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def pair_statistics(first: np.ndarray, second: np.ndarray, bins: int = 32) -> tuple[float, float]:
    """Correlation and two-dimensional uniformity of paired values, in standard deviations."""
    first, second = first.ravel(), second.ravel()
    correlation = np.corrcoef(first, second)[0, 1] * math.sqrt(first.size)
    cells = np.histogram2d(first, second, bins, ((0, 1), (0, 1)))[0]
    return float(correlation), chi_square(cells.ravel(), first.size / bins**2)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15])
@pytest.mark.parametrize("position", [0, 1, 4095, 2**31])
def test_noise_equals_its_definition(seed: int, position: int) -> None:
    found = log_race_times(keys([seed], [position]), torch.arange(1000, dtype=torch.int32))[0]
    times = arrival_times(seed, position, 1000)
    # u is rounded three times; an error of 2**-24 u in it changes E = -log(1 - u) by 2**-24 u / (1 - u).
    # log1p and log are good to 2 ulp each.
    rounding = 2.0**-24 * (3 * np.expm1(times) / times + 4 * np.maximum(1, np.abs(np.log(times))))
    assert (np.abs(found.double().numpy() - np.log(times)) <= rounding).all()


def test_noise_of_a_token_does_not_depend_on_which_others_are_asked_for() -> None:
    noise_key = keys([5, 6], [0, 9])
    everything = log_race_times(noise_key, torch.arange(VOCAB, dtype=torch.int32))
    some = torch.tensor([[40000, 3, 7], [0, 1, VOCAB - 1]])
    assert torch.equal(log_race_times(noise_key, some), everything.gather(1, some))
    assert torch.equal(log_race_times(noise_key[1:], some[1:]), everything[1:].gather(1, some[1:]))


def test_the_extreme_hashes_give_finite_noise() -> None:
    everything = log_race_times(keys(list(range(64)), [0] * 64), torch.arange(VOCAB, dtype=torch.int32))
    assert everything.isfinite().all()
    # Smallest and largest E the formula can give: log of -log1p(-2**-32) and of -log1p(-(1 - 2**-24)).
    assert everything.min() >= math.log(2.0**-32) - 1e-5
    assert everything.max() <= math.log(24 * math.log(2)) + 1e-5


def test_values_are_uniform_also_far_into_the_tail_where_winners_are() -> None:
    values = np.concatenate(
        [uniforms(keys(list(range(n, n + 32)), [n] * 32), torch.arange(VOCAB)) for n in (0, 32, 64)]
    ).ravel()
    assert abs(chi_square(np.histogram(values, 1024, (0, 1))[0], values.size / 1024)) < LIMIT
    tail = values[values < 2**-12]
    expected = values.size * 2**-12
    assert abs(tail.size - expected) < LIMIT * math.sqrt(expected)
    assert abs(chi_square(np.histogram(tail, 64, (0, 2**-12))[0], tail.size / 64)) < LIMIT


@pytest.mark.parametrize("token_id", [0, 1, VOCAB - 1])
@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_one_token_is_uniform_and_independent_along_seeds_and_positions(token_id: int, along: str) -> None:
    count = 50_000
    numbers, fixed = list(range(count)), [7] * count
    noise_key = keys(numbers, fixed) if along == "seeds" else keys(fixed, numbers)
    values = uniforms(noise_key, torch.tensor([token_id])).ravel()
    assert abs(chi_square(np.histogram(values, 256, (0, 1))[0], count / 256)) < LIMIT
    for statistic in pair_statistics(values[1:], values[:-1], bins=16):
        assert abs(statistic) < LIMIT


@pytest.mark.parametrize("lag", [1, 2, 64, 1024, 32768])
def test_neighbouring_tokens_are_independent(lag: int) -> None:
    values = uniforms(keys(list(range(16)), [3] * 16), torch.arange(VOCAB))
    for statistic in pair_statistics(values[:, lag:], values[:, :-lag]):
        assert abs(statistic) < LIMIT


@pytest.mark.parametrize(("seed_step", "position_step"), [(1, 0), (0, 1), (1, -1), (2**32, 0)])
def test_neighbouring_seeds_and_positions_are_independent(seed_step: int, position_step: int) -> None:
    seeds = list(range(16))
    token_ids = torch.arange(VOCAB)
    first = uniforms(keys(seeds, [3] * 16), token_ids)
    second = uniforms(keys([seed + seed_step for seed in seeds], [3 + position_step] * 16), token_ids)
    for statistic in pair_statistics(first, second):
        assert abs(statistic) < LIMIT


@pytest.mark.parametrize("column", [0, 1])
def test_keys_that_share_one_half_give_independent_noise(column: int) -> None:
    noise_key = keys([5] * 16, list(range(16)))
    other = keys([6] * 16, list(range(16)))
    other[:, column] = noise_key[:, column]
    token_ids = torch.arange(VOCAB)
    for statistic in pair_statistics(uniforms(noise_key, token_ids), uniforms(other, token_ids)):
        assert abs(statistic) < LIMIT


@pytest.mark.parametrize("bit", [0, 1, 15, 16, 30, 31])
def test_every_bit_of_the_first_key_changes_all_noise(bit: int) -> None:
    noise_key = keys([5] * 16, list(range(16)))
    flipped = noise_key.clone()
    flipped[:, 0] ^= torch.tensor(1 << bit if bit < 31 else -(2**31), dtype=torch.int32)
    token_ids = torch.arange(VOCAB)
    for statistic in pair_statistics(uniforms(noise_key, token_ids), uniforms(flipped, token_ids)):
        assert abs(statistic) < LIMIT
