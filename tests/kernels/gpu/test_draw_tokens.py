"""Drawing without filters, and reading and moving the slots, against the torch versions."""

from __future__ import annotations

import math

import pytest
import torch

from tiny_vllm.kernels import draw_from_linear
from tiny_vllm.kernels.draw_tokens import (
    BLOCK,
    ROUGHNESS,
    SlotAdvance,
    _launch_draw_tokens,
    draw_tokens_ref,
    log_of_time,
    rough_log2_of_time,
)
from tiny_vllm.kernels.sampling import SamplingRows, sample, sample_ref
from tiny_vllm.kernels.sampling_noise import UNIT, log_race_times, noise_keys
from tiny_vllm.kernels.slot_inputs import SlotState, _launch_read_slots, read_slots_ref
from tiny_vllm.kernels.tiled_linear import Tiles
from tiny_vllm.kernels.triton_support import INTERPRETED, has_pdl, jit, tl

pytestmark = pytest.mark.gpu

VOCABULARIES = (5, 5000) if INTERPRETED else (5, 5000, 49152, 128256)
DRAWS = 20 if INTERPRETED else 2000


def random_keys(rows: int, device: torch.device) -> torch.Tensor:
    return noise_keys(torch.arange(rows, device=device) * 7919, torch.arange(rows, device=device))


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_greedy_takes_the_lowest_of_equal_logits(device: torch.device, vocab_size: int) -> None:
    logits = torch.randint(0, 4, (6, vocab_size), device=device).float()
    tokens = _launch_draw_tokens(logits, torch.zeros(6, device=device), random_keys(6, device))
    assert torch.equal(tokens, (logits == logits.amax(-1, keepdim=True)).int().argmax(-1))


@pytest.mark.parametrize("temperature", [1e-30, 0.01, 1.0, 1e20])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_draws_the_tokens_of_the_reference(device: torch.device, vocab_size: int, temperature: float) -> None:
    logits = (3 * torch.randn(1, vocab_size, device=device)).expand(DRAWS, -1).contiguous()
    temperatures = torch.full((DRAWS,), temperature, device=device)
    keys = random_keys(DRAWS, device)
    tokens = _launch_draw_tokens(logits, temperatures, keys)
    expected = draw_tokens_ref(logits.cpu(), temperatures.cpu(), keys.cpu())
    # Logarithms of two libraries may order a near-tie differently.
    assert (tokens.cpu() != expected).sum() <= DRAWS // 1000


@jit
def _times_kernel(exact_ptr, rough_ptr, u_ptr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    u = tl.load(u_ptr + place)
    tl.store(exact_ptr + place, log_of_time(u))
    tl.store(rough_ptr + place, rough_log2_of_time(u))


def test_rough_times_are_as_near_as_the_draw_relies_on(device: torch.device) -> None:
    last = 2**31 - 1
    edges = torch.arange(2**14)
    powers = (2.0 ** torch.linspace(0, 31, 2**16, dtype=torch.float64)).long().clamp(max=last)
    x = torch.cat((edges, last - edges, powers, last - powers, torch.arange(2**15) * (2**16 - 1)))
    u = (x.double() * UNIT + UNIT / 2).float()
    exact, rough = torch.empty(2, len(u), device=device)
    _times_kernel[(len(u) // 1024,)](exact, rough, u.to(device), BLOCK=1024)
    times = -torch.log1p(-u.double())
    assert (exact.cpu() - times.log()).abs().max() < 4 * 22 * 2.0**-23
    assert (rough.cpu() - (times / math.log(2)).log2()).abs().max() < ROUGHNESS.value / 4


def test_two_tokens_that_come_in_together_are_told_apart(device: torch.device) -> None:
    """Pairs of one tile, alone in the race, further apart than logarithms are wrong and closer than the rough
    times can tell."""
    rows = 16
    keys = random_keys(rows, device)
    times = log_race_times(keys.cpu(), torch.arange(BLOCK)).double()
    ordered, tokens = times.sort(-1)
    gaps = ordered.diff(dim=-1)
    is_telling = (gaps > 1e-5) & (gaps < ROUGHNESS.value / 4)
    places = is_telling.int().argmax(-1, keepdim=True)
    assert is_telling.gather(-1, places).all()
    first, second = tokens.gather(-1, places), tokens.gather(-1, places + 1)
    logits = torch.full((rows, 5000), -torch.inf)
    logits.scatter_(-1, first, 2.5).scatter_(-1, second, 2.5)
    drawn = _launch_draw_tokens(logits.to(device), torch.ones(rows, device=device), keys)
    assert torch.equal(drawn.cpu(), first[:, 0])


def test_rows_that_cannot_be_sampled_are_reported_and_spoil_no_other(device: torch.device) -> None:
    logits = torch.randn(7, 3000, device=device)
    logits[0, 2900] = float("nan")
    logits[1] = -torch.inf
    logits[2, 7] = torch.inf
    logits[3, 1:] = logits[4, 1:] = -torch.inf
    logits[4, 2999] = float("nan")
    logits[5, :2000] = float("nan")
    for temperature in (0.0, 1.0):
        temperatures = torch.full((7,), temperature, device=device)
        tokens = _launch_draw_tokens(logits, temperatures, random_keys(7, device))
        assert tokens[:6].tolist() == [-1, -1, -1, 0, -1, -1] and 0 <= tokens[6] < 3000


def make_state(device: torch.device) -> SlotState:
    def column(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=device)

    return SlotState(
        page_table=torch.tensor([[3, 9, 0], [5, 0, 0], [4, 2, 8]], device=device),
        computed_len=column(5, 0, 11),
        last_token=column(17, 30, 2),
        stream=column(12345678901234567, -98765432109876543, 1),
        sample_position=column(0, 1000, 3),
    )


@pytest.mark.parametrize("width", [100, 2048])
def test_reads_what_the_slots_hold(device: torch.device, width: int) -> None:
    embedding = torch.randn(40, width, device=device).half()
    state = make_state(device)
    slots = torch.tensor([2, 0, 3, 1], device=device)
    actual = _launch_read_slots(embedding, state, slots, 4)
    expected = read_slots_ref(embedding, state, slots, 4)
    for name in ("hidden", "positions", "cells", "context_lens", "keys", "table_rows"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    assert actual.cells.tolist() == [8 * 4 + 3, 9 * 4 + 1, 0, 5 * 4]


def test_the_next_tokens_move_the_slots_on_and_padding_moves_none(device: torch.device) -> None:
    logits = torch.zeros(3, 50, device=device)
    logits[torch.arange(3), torch.tensor([41, 42, 43])] = 1
    states = [make_state(device), make_state(device)]
    for draw, state in zip((_launch_draw_tokens, draw_tokens_ref), states, strict=True):
        advance = SlotAdvance(
            torch.tensor([2, 3, 0], device=device),
            state.last_token,
            state.computed_len,
            state.sample_position,
        )
        draw(logits, torch.zeros(3, device=device), random_keys(3, device), advance)
        assert state.last_token.tolist() == [43, 30, 41]
        assert state.computed_len.tolist() == [6, 0, 12]
        assert state.sample_position.tolist() == [1, 1000, 4]


@pytest.mark.parametrize("top_k", [3000, 5], ids=["unfiltered", "filtered"])
def test_sampling_gives_the_same_tokens_with_and_without_the_kernels(
    device: torch.device, top_k: int
) -> None:
    logits, rows = 3 * torch.randn(4, 3000, device=device), 4
    params = SamplingRows(
        temperature=torch.tensor([0.0, 0.7, 1.0, 2.0], device=device),
        top_k=torch.tensor([3000, 3000, top_k, 3000], device=device),
        top_p=torch.ones(rows, device=device),
        min_p=torch.zeros(rows, device=device),
        keys=random_keys(rows, device),
    )
    expected = sample_ref(logits, params)
    assert torch.equal(sample(logits, params), expected)


DRAWS_OF_A_PRODUCT = [
    (9, Tiles(64, 32, 2, 0, 4)),
    (40, Tiles(32, 64, 2, 0, 4, 32)),  # two tiles of rows
    *([] if INTERPRETED else [(rows, tiles) for rows, tiles in draw_from_linear.DRAW_TILES if tiles]),
]


@pytest.mark.parametrize(("rows", "tiles"), DRAWS_OF_A_PRODUCT, ids=str)
@pytest.mark.parametrize("width", [64, 72])
def test_a_product_that_draws_gives_the_tokens_of_its_logits(
    device: torch.device, rows: int, tiles: Tiles, width: int
) -> None:
    """Integers, whose products are exact in any order: the logits are the same bits both ways."""
    vocabulary = 1003
    x = torch.randint(-3, 4, (rows, width), device=device).bfloat16()
    weight = torch.randint(-3, 4, (vocabulary, width), device=device).bfloat16() / 16
    keys = random_keys(rows, device)
    logits = x.float() @ weight.float().T
    temperature = torch.linspace(0.0, 2.0, rows, device=device)
    temperature[rows // 2] = 0.0
    for heat in (temperature, torch.zeros_like(temperature)):
        tokens = draw_from_linear.launch_draw(x, weight, heat, keys, None, tiles, has_pdl(device))
        assert torch.equal(tokens, draw_tokens_ref(logits, heat, keys))


def test_a_product_that_draws_moves_the_slots_on(device: torch.device) -> None:
    x = torch.eye(16, 32, device=device).bfloat16()
    weight = torch.zeros(100, 32, device=device).bfloat16()
    weight[41, 0] = weight[43, 2] = 1.0
    weight[7, 2] = float("nan")
    state = make_state(device)
    slots = torch.full((16,), 3, device=device)
    slots[0], slots[2] = 2, 0
    advance = SlotAdvance(slots, state.last_token, state.computed_len, state.sample_position)
    tokens = draw_from_linear.launch_draw(
        x, weight, torch.zeros(3, device=device), random_keys(16, device), advance,
        Tiles(64, 32, 2, 0, 4), has_pdl(device),
    )  # fmt: skip
    # Zero times NaN is NaN: the NaN of one weight is in every row's logits.
    assert tokens.tolist() == [-1] * 16
    assert state.last_token.tolist() == [0, 30, 0]
    assert state.computed_len.tolist() == [6, 0, 12] and state.sample_position.tolist() == [1, 1000, 4]
    weight[7, 2] = 0.0
    tokens = draw_from_linear.launch_draw(
        x, weight, torch.zeros(3, device=device), random_keys(16, device), advance,
        Tiles(64, 32, 2, 0, 4), has_pdl(device),
    )  # fmt: skip
    assert tokens[:3].tolist() == [41, 0, 43] and state.last_token.tolist() == [43, 30, 41]
