"""The Hopper kernel of the LM head that draws on a GPU, with NaN around everything that it reads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tests.kernels.cuda.test_draw_product import close_pairs, with_logits
from tests.kernels.gpu.test_hopper_linear import TYPES, surrounded
from tiny_vllm.kernels.draw_tokens import SlotAdvance, TileWinners, draw_tokens_ref
from tiny_vllm.kernels.finish_rows import finish_rows
from tiny_vllm.kernels.hopper_linear.draw_launch import FORMS, compile_draw, draw_product, obstacle
from tiny_vllm.kernels.hopper_prefill.launch import is_hopper
from tiny_vllm.kernels.sampling_noise import log_race_times, noise_keys

pytestmark = pytest.mark.gpu

ROWS = (9, 16, 17, 33, 63, 64, 65, 96, 127, 128, 129, 192, 255, 256)
# V, K: Llama-3.2-1B, Qwen3-0.6B, Llama-3.1-8B; fewer tiles than blocks, one tile, and what fills none.
SHAPES = ((128256, 2048), (151936, 1024), (128256, 4096), (1003, 448), (256, 64), (5, 64))
# Of an exact score: logarithms of two libraries.
LOGARITHMS = 2 * 4 * 22 * 2.0**-23


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All kernels at once, into the cache on disk."""
    if not (torch.cuda.is_available() and is_hopper(torch.device("cuda", 0))):
        pytest.skip("needs a Hopper GPU")
    kernels = [(dtype, form) for dtype in TYPES for form in FORMS]
    with ThreadPoolExecutor(len(kernels)) as pool:
        list(pool.map(lambda kernel: compile_draw(*kernel), kernels))


@pytest.fixture
def guarded_winners(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What tiles found starts as what no tile finds, and has rows around it that nobody writes."""
    whole: list[Tensor] = []

    def empty(num_rows: int, num_tiles: int, device: torch.device) -> TileWinners:
        floats = torch.full((2, num_rows + 2, num_tiles), torch.nan, device=device)
        winners = torch.full((num_rows + 2, num_tiles), 2**31 - 1, dtype=torch.int32, device=device)
        whole[:] = *floats, winners
        return TileWinners(floats[0, 1:-1], floats[1, 1:-1], winners[1:-1])

    monkeypatch.setattr(TileWinners, "empty", empty)
    yield
    torch.cuda.synchronize()
    if whole:
        assert whole[0][[0, -1]].isnan().all() and whole[1][[0, -1]].isnan().all()
        assert (whole[2][[0, -1]] == 2**31 - 1).all()


def keys_of(rows: int, device: torch.device) -> Tensor:
    return noise_keys(torch.arange(rows, device=device) * 7919, torch.arange(rows, device=device))


def temperatures_of(rows: int, device: torch.device) -> dict[str, Tensor]:
    mixed = torch.linspace(0.05, 2.0, rows, device=device)
    random = mixed.clone()
    mixed[::3] = 0.0
    return {"greedy": torch.zeros(rows, device=device), "random": random, "mixed": mixed}


def score(logits: Tensor, temperature: Tensor, key: Tensor) -> Tensor:
    """[V] FP64, of one row."""
    if temperature == 0:
        return logits.double()
    noise = log_race_times(key[None], torch.arange(len(logits), device=logits.device))[0]
    return logits.double() / temperature.double() - noise.double()


def drawn(*arguments: object) -> Tensor:
    tokens = draw_product(*arguments)  # type: ignore[arg-type]
    assert tokens is not None, "the kernel is not taken"
    return tokens


@pytest.mark.usefixtures("guarded_winners")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_draws_the_tokens_of_exact_logits(
    device: torch.device, rows: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Integers, whose products are exact in any order: the logits are the same bits both ways."""
    vocabulary, terms = shape
    x = surrounded(rows, terms, dtype, device)
    x.copy_(torch.randint(-3, 4, (rows, terms), device=device))
    weight = surrounded(vocabulary, terms, dtype, device)
    weight.copy_(torch.randint(-3, 4, (vocabulary, terms), device=device) / 16)
    assert obstacle(x, weight) is None
    logits, keys = x.float() @ weight.float().T, keys_of(rows, device)
    for temperature in temperatures_of(rows, device).values():
        tokens = drawn(x, weight, temperature, keys)
        expected = draw_tokens_ref(logits, temperature, keys)
        # Logarithms of two libraries may order a near-tie differently.
        for row in (tokens != expected).nonzero()[:, 0].tolist():
            scores = score(logits[row], temperature[row], keys[row])
            assert temperature[row] > 0 and scores[expected[row]] - scores[tokens[row]] <= LOGARITHMS


@pytest.mark.usefixtures("guarded_winners")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("rows", (9, 64, 128, 256))
def test_draws_no_token_that_others_are_ahead_of(
    device: torch.device, rows: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    vocabulary, terms = shape
    x = surrounded(rows, terms, dtype, device)
    weight = surrounded(vocabulary, terms, dtype, device).mul_(4 * terms**-0.5)
    keys = keys_of(rows, device)
    wide, sizes = weight.double(), weight.abs().float()
    for temperature in temperatures_of(rows, device).values():
        tokens = drawn(x, weight, temperature, keys)
        for row in range(0, rows, 7):
            scores = score(wide @ x[row].double(), temperature[row], keys[row])
            # Tensor cores cut sums off after each 16 terms, which costs 2^-23 of them at most, and no sum is
            # larger than that of the products' sizes.
            error = 2 * terms / 16 * 2.0**-23 * (sizes @ x[row].abs().float()).max()
            if temperature[row] > 0:
                error = error / temperature[row] + LOGARITHMS
            assert scores.max() - scores[tokens[row]] <= error


def test_tokens_that_come_in_together_are_told_apart(device: torch.device) -> None:
    keys, pairs = (part.repeat(8, 1) for part in close_pairs(8))
    logits = torch.full((64, 300), -60.0).scatter_(-1, pairs, 2.5)
    x, weight = (part.to(device) for part in with_logits(logits))
    tokens = drawn(x, weight, torch.ones(64, device=device), keys.to(device))
    assert torch.equal(tokens.cpu(), pairs[:, 0])


@pytest.mark.usefixtures("guarded_winners")
@pytest.mark.parametrize("rows", [40, 100, 200])
def test_rows_that_cannot_be_sampled_are_reported_and_spoil_no_other(device: torch.device, rows: int) -> None:
    weight = torch.rand(3000, 128, device=device).add(0.5).bfloat16()
    x = torch.randn(rows, 128, device=device).bfloat16()
    bad = [3, 17, rows - 1]
    x[bad[0]], x[bad[1], 5], x[bad[2], 9] = torch.nan, torch.inf, -torch.inf
    for temperature in temperatures_of(rows, device).values():
        tokens = drawn(x, weight, temperature, keys_of(rows, device))
        assert (tokens == -1).nonzero()[:, 0].tolist() == bad
    weight[2999, 7] = torch.nan
    for temperature in temperatures_of(rows, device).values():
        assert (drawn(x, weight, temperature, keys_of(rows, device)) == -1).all()


@pytest.mark.usefixtures("guarded_winners")
@pytest.mark.parametrize("rows", [40, 100, 200])
def test_moves_the_slots_on_and_padding_moves_none(device: torch.device, rows: int) -> None:
    x = torch.eye(rows, 256, device=device).bfloat16()
    weight = torch.zeros(900, 256, device=device).bfloat16()
    wanted = torch.randperm(900, device=device)[:rows]
    weight[wanted, torch.arange(rows, device=device)] = 100.0
    num_slots = rows + 5
    slots = torch.randperm(num_slots, device=device)[:rows]
    slots[[4, rows - 2]] = num_slots
    # Temperatures are the slots', and that of a slot that is not in use is nobody's.
    temperature = torch.full((num_slots,), torch.nan, device=device)
    is_real = slots < num_slots
    temperature[slots[is_real]] = torch.where(slots[is_real] % 2 == 0, 0.0, 0.5)
    last, computed, position = torch.arange(3 * num_slots, device=device).view(3, -1).clone()
    before = last.clone(), computed.clone(), position.clone()
    tokens = drawn(
        x, weight, temperature, keys_of(rows, device), SlotAdvance(slots, last, computed, position), True
    )
    assert torch.equal(tokens, wanted)
    before[0][slots[is_real]] = wanted[is_real]
    before[1][slots[is_real]] += 1
    before[2][slots[is_real]] += 1
    for actual, expected in zip((last, computed, position), before, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("rows", [16, 64, 128, 256])
def test_repeats_itself_exactly(device: torch.device, rows: int) -> None:
    x = surrounded(rows, 2048, torch.bfloat16, device)
    weight = surrounded(128256, 2048, torch.bfloat16, device).mul_(0.05)
    temperature, keys = temperatures_of(rows, device)["mixed"], keys_of(rows, device)
    first = drawn(x, weight, temperature, keys)
    for _ in range(50):
        assert torch.equal(drawn(x, weight, temperature, keys), first)


@pytest.mark.parametrize("rows", [16, 64, 128, 256])
def test_a_graph_of_overlapping_kernels_replays_it_on_new_values(device: torch.device, rows: int) -> None:
    """The kernel before writes x, and the one behind reads what tiles found, all launched early."""
    hidden = 1024
    norm = torch.ones(hidden, device=device)
    residual = torch.randn(rows, hidden, device=device).bfloat16()
    weight = torch.randn(50_000, hidden, device=device).mul_(0.1).bfloat16()
    temperature, keys = temperatures_of(rows, device)["mixed"], keys_of(rows, device)

    def run(pdl: bool) -> Tensor:
        hidden_rows, normed = residual, residual
        for _ in range(4):
            hidden_rows, normed = finish_rows(residual.float().unsqueeze(0), hidden_rows, norm, 1e-5, pdl=pdl)
            tokens = drawn(normed, weight, temperature, keys, None, pdl)
        return tokens

    run(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = run(True)
    for _ in range(20):
        residual.normal_()
        tokens.fill_(-7)
        graph.replay()
        assert torch.equal(tokens, run(False))
