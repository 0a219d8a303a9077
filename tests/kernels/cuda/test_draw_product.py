"""The Hopper kernel of the LM head that draws without a GPU: emulated, and as the compiler leaves it."""

from __future__ import annotations

import math
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.cubin import resource_usage
from tests.helpers.hopper_draw import draw_emulated, find_winners, join_winners
from tests.helpers.hopper_prefill import missing_compiler
from tests.helpers.kernel_compiler import meta, missing_tools
from tests.kernels.cuda.test_hopper_linear import find_loop
from tiny_vllm.kernels import draw_from_linear
from tiny_vllm.kernels.cuda.errors import CompileError
from tiny_vllm.kernels.draw_tokens import draw_tokens_ref
from tiny_vllm.kernels.hopper_linear import draw_launch
from tiny_vllm.kernels.hopper_linear.draw_launch import (
    COLUMNS,
    CONSUMER_REGISTERS,
    FORMS,
    MAX_ROWS,
    MIN_ROWS,
    PRODUCER_REGISTERS,
    Form,
    choose_form,
    compile_draw,
    draw_product,
    obstacle,
)
from tiny_vllm.kernels.sampling_noise import log_race_times, noise_keys

needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))

SHARED_LIMIT = 232448  # bytes a block of an H200 can have
BF16, FP16 = torch.bfloat16, torch.float16
# Type, M, V, K, blocks or clusters.
Run = tuple[torch.dtype, int, int, int, int]
RUNS: dict[str, Run] = {
    # Four tiles, two a block: both warpgroups have one.
    "in_turns": (BF16, 40, 1000, 192, 2),
    "two_warpgroups": (FP16, 100, 300, 128, 1),
    "in_pairs": (BF16, 200, 600, 192, 1),
}
SLOW_RUNS: dict[str, Run] = {
    "fewest_rows": (BF16, 9, 777, 448, 1),
    "no_row_to_spare": (FP16, 64, 1280, 320, 1),
    "turns_that_end_differently": (BF16, 17, 1300, 64, 2),
    "one_row_of_the_second_warpgroup": (BF16, 65, 512, 320, 2),
    "all_rows_of_a_block": (BF16, 128, 1001, 192, 3),
    "one_row_of_the_second_block": (FP16, 129, 700, 320, 2),
    "all_rows": (BF16, 256, 900, 448, 2),
    "few_tokens": (BF16, 130, 5, 64, 4),
}


def keys_of(rows: int) -> Tensor:
    return noise_keys(torch.arange(rows) * 7919, torch.arange(rows))


def spread(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows that lie apart, with what must not be read between them."""
    whole = torch.full((values.shape[0], values.shape[1] + 8), torch.nan, dtype=dtype)
    return whole[:, : values.shape[1]].copy_(values)


def make_case(run: Run) -> tuple[Tensor, Tensor]:
    """Integers, whose products are exact in any order: the logits are the same bits both ways."""
    dtype, rows, vocabulary, terms, _ = run
    x = spread(torch.randint(-3, 4, (rows, terms)), dtype)
    return x, spread(torch.randint(-3, 4, (vocabulary, terms)) / 16, dtype)


def check(
    x: Tensor,
    weight: Tensor,
    temperature: Tensor,
    keys: Tensor,
    *,
    clusters: int = 1,
    seeds: range = range(1),
    mistake: tuple[str, str] | None = None,
) -> None:
    assert obstacle(x, weight) is None
    form = choose_form(len(x))
    logits = x.float() @ weight.float().T
    expected = find_winners(logits, temperature, keys)
    tokens = draw_tokens_ref(logits, temperature, keys)
    for seed in seeds:
        found = draw_emulated(
            x, weight, temperature, keys, None, form, clusters=clusters, seed=seed, mistake=mistake
        )
        for name in ("maxima", "logits", "winners"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=0)
        assert torch.equal(join_winners(found, temperature, keys), tokens)


def temperatures_of(rows: int, kind: str) -> Tensor:
    if kind == "greedy":
        return torch.zeros(rows)
    heat = torch.linspace(0.01, 2.0, rows)
    if kind == "mixed":
        heat[::3] = 0.0
    return heat


@needs_compiler
@pytest.mark.parametrize("kind", ["greedy", "random", "mixed"])
@pytest.mark.parametrize("run", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_RUNS)])
def test_the_emulated_kernel_finds_the_winners_of_every_tile(run: str, kind: str) -> None:
    case = (RUNS | SLOW_RUNS)[run]
    rows, clusters = case[1], case[4]
    check(*make_case(case), temperatures_of(rows, kind), keys_of(rows), clusters=clusters)


def with_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Operands of the logits [M, V], which must be numbers of BF16, M a multiple of 64."""
    return torch.eye(len(logits)).bfloat16(), logits.T.contiguous().bfloat16()


@needs_compiler
@pytest.mark.parametrize("temperature", [1e-30, 0.01, 1.0, 1e20])
def test_every_temperature(temperature: float) -> None:
    x, weight = with_logits((3 * torch.randn(64, 520)).bfloat16())
    check(x, weight, torch.full((64,), temperature), keys_of(64))


def close_pairs(count: int) -> tuple[Tensor, Tensor]:
    """Keys, and two tokens of the first tile for each, the winner first, whose times are further apart than
    logarithms of FP32 are wrong, but not than the hardware's are of 1 - u, which decide there."""
    keys = keys_of(4000 * count)
    times, tokens = log_race_times(keys, torch.arange(COLUMNS)).sort(-1)
    gaps = times.diff(dim=-1)
    is_telling = (
        (gaps > 1e-6) & (gaps < 3e-6) & (times[:, 1:] > math.log(0.04)) & (times[:, 1:] < math.log(0.1))
    )
    chosen = is_telling.any(-1).nonzero()[:count, 0]
    assert len(chosen) == count
    places = is_telling.int().argmax(-1, keepdim=True)[chosen]
    return keys[chosen], torch.cat([tokens[chosen].gather(-1, places + i) for i in (0, 1)], 1)


def check_pairs(**options: Any) -> None:
    keys, pairs = (part.repeat(8, 1) for part in close_pairs(8))
    logits = torch.full((64, 300), -60.0).scatter_(-1, pairs, 2.5)
    # Some rows have another winner.
    logits[40:44, 270] = 60.0
    check(*with_logits(logits), torch.ones(64), keys, **options)


@needs_compiler
def test_tokens_that_come_in_together_are_told_apart() -> None:
    check_pairs()


@needs_compiler
def test_the_lowest_of_equal_logits_wins_without_a_temperature() -> None:
    logits = torch.randint(0, 3, (64, 700)).float()
    check(*with_logits(logits), torch.zeros(64), keys_of(64))


@needs_compiler
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_cannot_be_sampled_are_reported_and_spoil_no_other(temperature: float) -> None:
    rows = 40
    weight = torch.rand(300, 64).add(0.5).bfloat16()
    x = torch.randn(rows, 64).bfloat16()
    x[3], x[17, 5], x[39, 9] = torch.nan, torch.inf, -torch.inf
    heat, keys = torch.full((rows,), temperature), keys_of(rows)
    found = draw_emulated(x, weight, heat, keys, None, choose_form(rows))
    tokens = join_winners(found, heat, keys)
    is_bad = torch.zeros(rows, dtype=torch.bool)
    is_bad[[3, 17, 39]] = True
    assert torch.equal(tokens == -1, is_bad)
    assert found.maxima[3].isnan().all() and (found.maxima[17] == torch.inf).all()
    assert ((found.winners >= 0) & (found.winners < 300)).all()
    # A token's NaN is in all rows' logits, and in its tile's maximum.
    weight[280, 7] = torch.nan
    found = draw_emulated(x, weight, heat, keys, None, choose_form(rows))
    assert (join_winners(found, heat, keys) == -1).all()
    assert found.maxima[:, 1].isnan().all() and found.maxima[~is_bad, 0].isfinite().all()


@needs_compiler
def test_temperatures_belong_to_slots_and_padding_has_none() -> None:
    rows = 20
    x, weight = make_case((BF16, rows, 300, 64, 1))
    slots = torch.randperm(40)[:rows]
    slots[[4, 11]] = 40
    temperature = torch.rand(40)
    heat = torch.cat((temperature, torch.zeros(1)))[slots]
    keys = keys_of(rows)
    found = draw_emulated(x, weight, temperature, keys, slots, choose_form(rows))
    expected = find_winners(x.float() @ weight.float().T, heat, keys)
    assert torch.equal(found.winners, expected.winners)


MISTAKES = {
    "x_is_copied_before_it_is_written": ("    wait_for_predecessor();\n", ""),
    "warpgroups_do_not_wait_for_their_turn": ("if (ALTERNATE && round > 0) named_sync", "if (0) named_sync"),
    "a_stage_is_reused_early": ("wait(shared.empty(place.stage), place.parity ^ 1);", ""),
    "a_stage_is_read_before_it_comes": ("wait(shared.full(place.stage), place.parity);", ""),
    "a_stage_is_free_under_a_product": ("      products_wait<1>();\n", ""),
    "sums_are_read_before_they_come": ("    products_wait<0>();\n", ""),
    "the_other_warpgroups_stages_are_not_skipped": ("    if (ALTERNATE) place.skip(p.steps);\n", ""),
    "columns_beyond_the_vocabulary_win": ("if ((tile + 1) * COLUMNS > p.vocabulary) cut(first);", ""),
    "a_turn_too_many": (
        "if (ALTERNATE && tile_of(round + 1) < p.tiles) named_arrive",
        "if (ALTERNATE) named_arrive",
    ),
}
MISTAKES_OF_PAIRS = {
    "other_rows_are_not_waited_for": (
        "arrive_at(shared.empty(stage), lane);",
        "arrive_at(shared.empty(stage), cluster_rank());",
    ),
    "barriers_are_used_before_they_are_there": ("  else\n    cluster_sync();\n", ""),
    "a_block_ends_too_early": ("must stay.\n  if (CLUSTER > 1) cluster_sync();", ""),
}
NOTICED = r"deadlock|barrier|wait|ended|complete|Tensor-likes|not equal"


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("name", [*MISTAKES, *MISTAKES_OF_PAIRS])
def test_the_emulation_notices_mistakes(name: str) -> None:
    mistake = (MISTAKES | MISTAKES_OF_PAIRS)[name]
    rows = 200 if name in MISTAKES_OF_PAIRS else 40
    x, weight = make_case((BF16, rows, 1000, 448, 1))
    # No logit is larger than those of columns that are not there.
    x.abs_()
    weight.abs_().neg_()
    with pytest.raises((RuntimeError, AssertionError), match=NOTICED):
        check(x, weight, torch.full((rows,), 0.5), keys_of(rows), seeds=range(8), mistake=mistake)


@needs_compiler
def test_exact_times_are_needed() -> None:
    with pytest.raises(AssertionError):
        check_pairs(mistake=("run_exactly<BELOW>(first, leader);", ""))


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
@pytest.mark.parametrize(
    ("dtype", "form"),
    [(BF16, FORMS[0]), (FP16, FORMS[2]), pytest.param(BF16, FORMS[1], marks=pytest.mark.slow)],
    ids=str,
)
def test_products_run_beside_one_another_and_nothing_spills(
    dtype: torch.dtype, form: Form, tmp_path: Path
) -> None:
    import triton

    cubin = compile_draw(dtype, form)
    (usage,) = resource_usage(cubin).values()
    assert usage.stack_bytes == 0
    # What a block starts with is enough for what its warpgroups claim.
    assert 3 * usage.registers >= PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS

    (tmp_path / "cubin").write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    text = subprocess.run([tool, "-c", tmp_path / "cubin"], capture_output=True, text=True, check=True).stdout
    # Serialised products would each have a wait of their own.
    order = re.findall(r"HGMMA\.64x256x16|DEPBAR\.LE gsb0, 0x\d", text)
    assert order == ["HGMMA.64x256x16"] * 4 + ["DEPBAR.LE gsb0, 0x1", "DEPBAR.LE gsb0, 0x0"]
    loop = find_loop(text)
    products = re.findall(r"HGMMA\S+ (R\d+), gdesc\[UR\d+\], (R\d+)", loop)
    assert len(products) == 4 and len({register for pair in products for register in pair}) == 1
    first = int(products[0][0][1:])
    others = re.sub(r"HGMMA[^;]+;", "", loop)
    assert not {int(number) for number in re.findall(r"\bR(\d+)", others)} & set(range(first, first + 128))
    # Two rough logarithms for each of a thread's logits, and few beside.
    assert 2 * 128 <= len(re.findall(r"MUFU\.LG2", text)) <= 2 * 128 + 16


def test_blocks_fit_into_a_multiprocessor() -> None:
    for form in FORMS:
        assert form.shared_bytes <= SHARED_LIMIT < replace(form, stages=form.stages + 1).shared_bytes
    assert 128 * (PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS) <= 65536


@pytest.mark.parametrize(("rows", "form"), [(9, 0), (64, 0), (65, 1), (128, 1), (129, 2), (256, 2)])
def test_a_form_holds_all_rows(rows: int, form: int) -> None:
    assert choose_form(rows) == FORMS[form]


@pytest.mark.parametrize(
    ("x", "weight", "reason"),
    [
        (meta(99, 128, dtype=torch.float32), meta(2048, 128), r"torch\.float32 has no tensor cores"),
        (meta(99, 128, dtype=FP16), meta(2048, 128), r"torch\.bfloat16 is not that of the rows"),
        (meta(MIN_ROWS - 1, 128), meta(2048, 128), "8 rows are not 9 to 256"),
        (meta(MAX_ROWS + 1, 128), meta(2048, 128), "257 rows are not 9 to 256"),
        (meta(99, 96), meta(2048, 96), "96 terms are no multiple of 64"),
        (meta(128, 99).T, meta(2048, 128), "the rows' values are not contiguous"),
        (meta(99, 128), meta(2048, 132)[:, :128], "the matrix' values are not contiguous, or rows"),
    ],
)
def test_what_the_kernel_cannot_take_is_named(x: Tensor, weight: Tensor, reason: str) -> None:
    assert obstacle(meta(99, 128), meta(2051, 128)) is None
    found = obstacle(x, weight)
    assert found is not None and re.search(reason, found)


def be_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_launch, "is_hopper", lambda device: True)
    draw_launch._loaded.cache_clear()


def arguments_of(rows: int) -> tuple[Tensor, ...]:
    return (
        meta(rows, 128), meta(1000, 128), meta(rows, dtype=torch.float32), meta(rows, 2, dtype=torch.int32)
    )  # fmt: skip


def test_a_kernel_that_does_not_compile_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise CompileError("NVRTC is not here")

    be_hopper(monkeypatch)
    monkeypatch.setattr(draw_launch, "compile_draw", fail)
    with pytest.warns(RuntimeWarning, match="NVRTC is not here"):
        assert draw_product(*arguments_of(99)) is None
    # Warnings are errors; this is another form.
    assert draw_product(*arguments_of(200)) is None
    draw_launch._loaded.cache_clear()


@pytest.mark.parametrize(
    ("rows", "multiprocessors", "blocks"),
    # Of 1,000 tokens there are four tiles.
    [(20, 3, 3), (100, 132, 4), (200, 7, 6), (200, 132, 8)],
)
def test_blocks_are_whole_clusters_and_no_more_than_tiles(
    rows: int, multiprocessors: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[int, int, bool]] = []

    class Function:
        def launch(self, grid: int, block: int, arguments: Any, *, pdl: bool) -> None:
            launched.append((grid, block, pdl))

    be_hopper(monkeypatch)
    monkeypatch.setattr(draw_launch, "_loaded", lambda *_: Function())
    monkeypatch.setattr(draw_launch, "count_multiprocessors", lambda device: multiprocessors)
    monkeypatch.setattr(draw_launch, "make_params", lambda *_: None)
    monkeypatch.setattr(draw_launch, "join_tiles", lambda found, *_: found.winners)
    winners = draw_product(*arguments_of(rows), None, True)
    assert winners is not None and winners.shape == (rows, 4)
    assert launched == [(blocks, 384, True)]


@pytest.mark.parametrize("is_taken", [True, False])
def test_an_lm_head_asks_for_it_within_the_range_that_was_measured(
    is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, bool]] = []

    def draw(x: Tensor, weight: Tensor, temperature: Tensor, keys: Tensor, advance: Any, pdl: bool) -> Any:
        asked.append((len(x), pdl))
        return torch.full((len(x),), 77) if is_taken else None

    monkeypatch.setattr(draw_launch, "draw_product", draw)
    monkeypatch.setattr(draw_from_linear, "HOPPER_ROWS", range(20, 31))
    weight = torch.eye(50, 64)
    for rows in (19, 20, 30, 31):
        x = torch.eye(rows, 64)
        tokens = draw_from_linear.draw_from_linear(x, weight, torch.zeros(rows), keys_of(rows), None, True)
        is_from_kernel = is_taken and rows in (20, 30)
        assert torch.equal(tokens, torch.full((rows,), 77) if is_from_kernel else torch.arange(rows))
    assert asked == [(20, True), (30, True)]
