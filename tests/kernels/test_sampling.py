"""The drawn token is the same by every path, its filters are exact, and its distribution is the asked one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.sampling_oracle import draw, kept_tokens
from tiny_vllm.kernels import sampling
from tiny_vllm.kernels.draw_tokens import SlotAdvance
from tiny_vllm.kernels.sampling import SamplingRows, sample, sample_and_advance, sample_ref
from tiny_vllm.kernels.sampling_noise import noise_keys, stream_of_seed
from tiny_vllm.types import SamplingParams

VOCAB = 3000

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 50.0},
    "top_k 1": {"top_k": 1},
    "top_k": {"top_k": 40},
    "top_k as many as candidates": {"top_k": 64},
    "top_k one past the candidates": {"top_k": 65},
    "top_k far": {"top_k": 2000},
    "top_k past the vocabulary": {"top_k": 10**9},
    "top_p tiny": {"top_p": 1e-9},
    "top_p zero": {"top_p": 0.0},
    "top_p": {"top_p": 0.6},
    "top_p wide": {"top_p": 0.999, "temperature": 3.0},
    "min_p": {"min_p": 0.1},
    "min_p wide": {"min_p": 1e-6, "temperature": 2.0},
    "min_p one": {"min_p": 1.0},
    "top_k and top_p": {"top_k": 50, "top_p": 0.8},
    "top_k wide and top_p": {"top_k": 1500, "top_p": 0.9, "temperature": 4.0},
    "all": {"top_k": 60, "top_p": 0.95, "min_p": 0.02, "temperature": 1.3},
}


def rows_of(
    params: list[SamplingParams], seeds: list[int], positions: list[int], vocab_size: int
) -> SamplingRows:
    return SamplingRows(
        temperature=torch.tensor([0.0 if p.is_greedy else p.temperature for p in params]),
        top_k=torch.tensor([min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32),
        keys=noise_keys(torch.tensor([stream_of_seed(seed) for seed in seeds]), torch.tensor(positions)),
    )


def random_logits(num_rows: int, vocab_size: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def tied_logits(num_rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    """Few distinct values, so that every border falls between equals."""
    return random_logits(num_rows, vocab_size, seed, 2.0).round()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("make_logits", [random_logits, tied_logits])
def test_each_parameter_alone_draws_the_oracles_tokens(name: str, make_logits: Any) -> None:
    params = SamplingParams(**CASES[name])
    logits = make_logits(6, VOCAB, seed=len(name))
    rows = rows_of([params] * 6, list(range(6)), list(range(6)), VOCAB)
    tokens = sample(logits.clone(), rows)
    assert tokens.tolist() == [draw(logits[i].double().numpy(), params, i, i) for i in range(6)]


@pytest.mark.parametrize("make_logits", [random_logits, tied_logits])
def test_a_ragged_mix_equals_the_reference_and_each_row_alone(make_logits: Any) -> None:
    params = [SamplingParams(**case) for case in CASES.values()]
    logits = make_logits(len(params), VOCAB, seed=1)
    rows = rows_of(params, list(range(len(params))), [3] * len(params), VOCAB)
    tokens = sample(logits, rows)
    assert torch.equal(tokens, sample_ref(logits, rows))
    for i in range(len(params)):
        only = torch.tensor([i])
        assert torch.equal(sample(logits[only], rows.select(only)), tokens[only])


@pytest.mark.parametrize("num_candidates", [1, 2, 30, 500, VOCAB - 1, VOCAB])
def test_the_number_of_candidates_never_changes_a_token(
    num_candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [SamplingParams(**case) for case in CASES.values()]
    logits = torch.cat([make(len(params), VOCAB, seed=2) for make in (random_logits, tied_logits)])
    rows = rows_of(params * 2, list(range(len(logits))), [0] * len(logits), VOCAB)
    usual = sample(logits, rows)
    monkeypatch.setattr(sampling, "NUM_CANDIDATES", num_candidates)
    assert torch.equal(sample(logits, rows), usual)


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 65])
def test_small_vocabularies_work(vocab_size: int) -> None:
    params = [SamplingParams(**case) for case in CASES.values()]
    logits = random_logits(len(params), vocab_size, seed=3)
    rows = rows_of(params, list(range(len(params))), [0] * len(params), vocab_size)
    expected = [draw(logits[i].double().numpy(), p, i, 0) for i, p in enumerate(params)]
    assert sample(logits, rows).tolist() == expected


def test_equal_logits_resolve_to_the_lowest_id_when_greedy() -> None:
    logits = torch.zeros(5, VOCAB)
    logits[:, 1000:] = 1.0
    cases: list[dict[str, Any]] = [
        {"temperature": 0},
        {"top_k": 1},
        {"top_p": 1e-9},
        {"top_p": 0.0},
        {"temperature": 1e-7},
    ]
    rows = rows_of([SamplingParams(**case) for case in cases], [0] * 5, [0] * 5, VOCAB)
    assert sample(logits, rows).tolist() == [1000] * 5


def test_min_p_of_one_keeps_every_token_as_likely_as_the_first() -> None:
    logits = torch.zeros(400, VOCAB)
    logits[:, [5, 2000]] = 1e-3
    rows = rows_of([SamplingParams(min_p=1.0)] * 400, list(range(400)), [0] * 400, VOCAB)
    assert set(sample(logits, rows).tolist()) == {5, 2000}


@pytest.mark.parametrize("temperature", [0.0, 1e-7, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("scale", [1.0, 1e2, 1e4])
def test_tiny_temperatures_equal_argmax_wherever_the_gap_is_clear(temperature: float, scale: float) -> None:
    logits = random_logits(20, VOCAB, seed=4).clamp(-1, 1) * scale
    top = torch.arange(20) * 37
    # Noise spans less than 40 between two tokens: a gap of 40 temperatures decides.
    logits[torch.arange(20), top] = scale + max(40 * temperature, 0.01 * scale)
    cases: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 30}, {"min_p": 0.1}]
    for case in cases:
        params = [SamplingParams(temperature=temperature, **case)] * 20
        tokens = sample(logits, rows_of(params, list(range(20)), [0] * 20, VOCAB))
        assert torch.equal(tokens, top)


@pytest.mark.parametrize("name", CASES)
def test_masked_tokens_are_never_drawn(name: str) -> None:
    logits = torch.full((50, 300), -math.inf)
    logits[:, 123] = -1e4
    rows = rows_of([SamplingParams(**CASES[name])] * 50, list(range(50)), [0] * 50, 300)
    tokens = sample(logits, rows)
    assert tokens.tolist() == [123] * 50


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("damage", [math.nan, math.inf, -math.inf])
def test_a_broken_row_is_reported_and_leaves_the_others_alone(name: str, damage: float) -> None:
    logits = random_logits(4, VOCAB, seed=5)
    params = [SamplingParams(**CASES[name])] * 4
    rows = rows_of(params, [1, 2, 3, 4], [0] * 4, VOCAB)
    sound = sample(logits, rows)
    logits[2, slice(None) if damage == -math.inf else 77] = damage
    tokens = sample(logits, rows)
    others = torch.tensor([0, 1, 3])
    assert torch.equal(tokens[others], sound[others])
    assert tokens[2] == -1


def test_the_slot_of_a_broken_row_moves_on_with_token_0() -> None:
    logits = random_logits(2, VOCAB, seed=6)
    logits[1, 5] = math.nan
    rows = rows_of([SamplingParams(temperature=0)] * 2, [1, 2], [0] * 2, VOCAB)
    last_token, computed_len, position = (torch.full((4,), value) for value in (9, 40, 7))
    advance = SlotAdvance(torch.tensor([3, 1]), last_token, computed_len, position)
    tokens = sample_and_advance(logits, rows, torch.zeros(4), advance)
    best = int(logits[0].argmax())
    assert tokens.tolist() == [best, -1]
    assert last_token.tolist() == [9, 0, 9, best]
    assert computed_len.tolist() == [40, 41, 40, 41] and position.tolist() == [7, 8, 7, 8]


def frequencies_fit(drawn: np.ndarray, probabilities: np.ndarray) -> bool:
    """Whether chi-square lies within 4 standard deviations of its mean, rare tokens counted together."""
    observed = np.bincount(drawn, minlength=len(probabilities))[probabilities > 0]
    expected = probabilities[probabilities > 0] * len(drawn)
    is_common = expected >= 10
    if not is_common.all():
        observed = np.append(observed[is_common], observed[~is_common].sum())
        expected = np.append(expected[is_common], expected[~is_common].sum())
    freedom = len(expected) - 1
    chi_square = ((observed - expected) ** 2 / expected).sum()
    return bool(abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom))


@pytest.mark.parametrize("vocab_size", [2, 5, 50, 1000])
@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "all"])
def test_tokens_appear_as_often_as_their_probability_says(
    vocab_size: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rows are few at once for the sake of large vocabularies.
    monkeypatch.setattr(sampling, "ROWS_AT_ONCE", 500)
    params = SamplingParams(**CASES[name])
    logits = random_logits(1, vocab_size, seed=6, scale=1.5)
    kept = kept_tokens(logits[0].double().numpy(), params)
    probabilities = np.zeros(vocab_size)
    probabilities[kept] = (logits[0, kept].double() / params.temperature).softmax(-1).numpy()
    count, drawn = 4000, []
    for position in range(5):
        rows = rows_of([params] * count, list(range(count)), [position] * count, vocab_size)
        drawn.append(sample(logits.expand(count, -1).contiguous(), rows).numpy())
    assert set(np.concatenate(drawn)) <= set(kept)
    if len(kept) > 1:
        assert frequencies_fit(np.concatenate(drawn), probabilities)


def test_a_large_vocabulary_is_covered_evenly() -> None:
    vocab_size, count = 49152, 64
    params = rows_of([SamplingParams()] * count, list(range(count)), [0] * count, vocab_size)
    drawn = []
    for position in range(30):
        streams = torch.tensor([stream_of_seed(seed) for seed in range(count)])
        keys = noise_keys(streams, torch.full((count,), position))
        rows = SamplingRows(params.temperature, params.top_k, params.top_p, params.min_p, keys)
        drawn.append(sample(torch.zeros(count, vocab_size), rows).numpy())
    assert frequencies_fit(np.concatenate(drawn) // 768, np.full(64, 1 / 64))
