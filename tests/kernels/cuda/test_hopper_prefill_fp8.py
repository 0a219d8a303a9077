"""The Hopper kernel of prefill attention over FP8 caches, emulated and as the compiler leaves it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.hopper_prefill import attend_emulated
from tests.helpers.kernel_compiler import meta, missing_tools
from tests.kernels import test_prefill_attention as reference
from tests.kernels.cuda.test_hopper_prefill import (
    COMPILED,
    EVERYTHING,
    SMALL,
    TOLERANCES,
    check_machine_code,
    needs_compiler,
)
from tests.kernels.test_prefill_attention import make_case
from tiny_vllm.kernels import prefill_attention
from tiny_vllm.kernels.fp8_cache import Fp8Cache, dequantise_rows, quantise_rows
from tiny_vllm.kernels.hopper_prefill import launch
from tiny_vllm.kernels.hopper_prefill.launch import VARIANTS, Variant, obstacle
from tiny_vllm.kernels.prefill_attention import prefill_attention_ref

# (chunk_len, context_len) of each sequence, num_heads, num_kv_heads, head_dim, page_size
CASES = {
    "small": ([(40, 40), (1, 33), (70, 300)], 4, 1, 64, 16),
    "small_128": ([(20, 20), (30, 290)], 8, 1, 128, 64),
    "llama_1b": ([(40, 40), (17, 300), (1, 33), (150, 450)], 8, 2, 64, 16),
    "llama_8b": ([(130, 290), (1, 1), (5, 700)], 8, 2, 128, 16),
    "pages_of_32": ([(33, 260), (20, 20)], 8, 1, 128, 32),
    "group_7": ([(60, 200), (3, 5)], 14, 2, 64, 64),
    "one_group": ([(200, 200), (64, 128), (3, 70)], 2, 2, 64, 64),
    "many_sequences": ([(index % 9 + 1, index + 10) for index in range(70)], 4, 1, 64, 16),
    "tokens": ([(1, 1)] * 16, 4, 1, 64, 16),
    "tokens_128": ([(1, 1)] * 16, 4, 1, 128, 16),
}
TWO_STAGES = Variant(warpgroups=2, stages=2)
RUNS: dict[str, tuple[str, Variant, dict[str, Any], torch.dtype]] = {
    "small": ("small", SMALL, {}, torch.bfloat16),
    "heads_of_128": ("small_128", VARIANTS[128], dict(window=150), torch.bfloat16),
}
SLOW_RUNS: dict[str, tuple[str, Variant, dict[str, Any], torch.dtype]] = {
    "llama_1b": ("llama_1b", VARIANTS[64], {}, torch.bfloat16),
    "llama_8b": ("llama_8b", VARIANTS[128], {}, torch.bfloat16),
    "llama_1b_half_everything": ("llama_1b", VARIANTS[64], EVERYTHING, torch.float16),
    "llama_8b_half_everything": ("llama_8b", VARIANTS[128], EVERYTHING, torch.float16),
    "pages_of_32": ("pages_of_32", VARIANTS[128], dict(sinks=True), torch.bfloat16),
    "window_of_1": ("pages_of_32", VARIANTS[128], dict(window=1), torch.bfloat16),
    "group_7": ("group_7", VARIANTS[64], {}, torch.bfloat16),
    "group_1_half": ("one_group", VARIANTS[64], {}, torch.float16),
    "many_sequences": ("many_sequences", VARIANTS[64], dict(sinks=True), torch.bfloat16),
    "two_stages": ("llama_1b", Variant(warpgroups=3, stages=2), {}, torch.bfloat16),
}


@pytest.fixture(autouse=True)
def more_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, case in CASES.items():
        monkeypatch.setitem(reference.CASES, name, case)


def in_fp8(cache: Tensor, spread: int) -> Fp8Cache:
    """Rows up to 2^spread larger or smaller; where no sequence owns a cell, all that is not finite."""
    sizes = torch.exp2(torch.randint(-spread, spread + 1, (*cache.shape[:3], 1)))
    codes, scales = quantise_rows((cache.float() * sizes).to(cache.dtype))
    poison = torch.tensor([torch.nan, -torch.nan, torch.inf]).bfloat16()
    scales = torch.where(scales.isfinite(), scales, poison[torch.randint(3, scales.shape)])
    return Fp8Cache(codes, scales, cache.dtype)


def plain(cache: Fp8Cache) -> Tensor:
    """The cache of 16 bits that it stands for."""
    return dequantise_rows(cache.codes, cache.scales, cache.dtype)


def largest(cache: Fp8Cache) -> float:
    values = plain(cache)
    return float(values[values.isfinite()].abs().max())


class Case:
    def __init__(
        self, name: str, dtype: torch.dtype, options: dict[str, Any] | None = None, spread: int = 0
    ) -> None:
        self.options = dict(options or {})
        if "sinks" in self.options:
            self.options["sinks"] = 2 * torch.randn(CASES[name][1])
        self.q, k_cache, v_cache, self.tables, _ = make_case(name, dtype, torch.nan)
        self.k, self.v = in_fp8(k_cache, spread), in_fp8(v_cache, spread)
        self.scale = self.q.shape[-1] ** -0.5 * 2.0**-spread

    def attend(self, *, is_plain: bool = False, **options: Any) -> Tensor:
        caches = (plain(self.k), plain(self.v)) if is_plain else (self.k, self.v)
        return attend_emulated(self.q, *caches, *self.tables, self.scale, **self.options, **options)

    def check(self, **options: Any) -> Tensor:
        """Within what rounding weights and results once each makes of the largest value."""
        actual = self.attend(**options)
        arguments = self.q.float(), self.k, self.v, *self.tables, self.scale
        expected = prefill_attention_ref(*arguments, **self.options)
        atol = TOLERANCES[self.q.dtype] * largest(self.v)
        torch.testing.assert_close(actual.float(), expected, rtol=0, atol=atol)
        return actual


@needs_compiler
@pytest.mark.parametrize("run", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_RUNS)])
def test_the_emulated_kernel_attends_to_what_is_stored(run: str) -> None:
    name, variant, options, dtype = (RUNS | SLOW_RUNS)[run]
    case = Case(name, dtype, options)
    for seed in range(1 if run in RUNS else 3):
        case.check(variant=variant, blocks=2 + seed, seed=seed)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama_1b", "small_128"])
def test_it_equals_the_kernel_of_16_bits_on_what_the_cache_stands_for(name: str, dtype: torch.dtype) -> None:
    """Bit for bit: rows that differ by 2^16 in size, too, and scores that the maximum lags behind."""
    spread = 4 if dtype == torch.float16 else 8
    variant = VARIANTS[CASES[name][3]]
    case = Case(name, dtype, spread=spread)
    case.scale *= 2.0**spread
    assert torch.equal(case.attend(variant=variant), case.attend(variant=variant, is_plain=True))


@needs_compiler
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("tokens", torch.bfloat16),
        pytest.param("tokens", torch.float16, marks=pytest.mark.slow),
        pytest.param("tokens_128", torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_code_at_scales_of_all_sizes(name: str, dtype: torch.dtype) -> None:
    """A context of one token is its value: exactly what the code stands for, NaN included."""
    case = Case(name, dtype)
    pages, (count, group, head_dim) = case.tables[0][:, 0], case.q.shape
    codes = torch.arange(count * head_dim).to(torch.uint8).view(count, head_dim)
    case.v.codes.view(torch.uint8)[pages, 0, 0] = codes
    sizes = range(-100, 119) if dtype == torch.bfloat16 else range(-24, 7)
    scales = torch.exp2(torch.tensor(sizes)[torch.linspace(0, len(sizes) - 1, count).long()])
    case.v.scales[pages, 0, 0] = (scales * torch.linspace(1, 1.99, count)).bfloat16()
    variant = SMALL if head_dim == 64 else VARIANTS[128]
    expected = plain(case.v)[pages, 0, :1].expand(count, group, head_dim)
    torch.testing.assert_close(case.attend(variant=variant), expected, rtol=0, atol=0, equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("poison", [torch.nan, pytest.param(torch.inf, marks=pytest.mark.slow)])
def test_a_broken_sequence_breaks_no_other(poison: float) -> None:
    case = Case("small", torch.bfloat16)
    first = case.attend(variant=SMALL)
    case.v.scales[case.tables[0][2, 3], :, 5] = poison
    actual = case.attend(variant=SMALL)
    own = slice(*case.tables[1][2:4].tolist())
    assert not actual[own].isfinite().any()
    assert torch.equal(actual[: own.start], first[: own.start])


MISTAKES = {
    "no_fence": ("        fence_shared();\n        join_lanes();\n", "        join_lanes();\n"),
    "scales_of_other_rows": ("load_scale(scales + row * 2)", "load_scale(scales + (row ^ 1) * 2)"),
    "lanes_are_not_joined": ("        fence_shared();\n        join_lanes();\n", "        fence_shared();\n"),
    "codes_are_read_before_they_come": ("        wait(shared.slot_full(slot.stage), slot.parity);\n", ""),
    "a_slot_is_reused_early": ("      wait(shared.slot_empty(place.stage), place.parity ^ 1);\n", ""),
    "a_slot_is_never_free": ("          arrive(shared.slot_empty(slot.stage));\n", ""),
    "a_stage_is_reused_early": (
        "wait(is_key ? shared.k_empty(place.stage) : shared.v_empty(place.stage), place.parity ^ 1);",
        "",
    ),
    "a_unit_is_left_out": ("if (first < left)", "if (first + UNIT < left)"),
    "a_unit_is_not_copied": ("is_there = position < tile", "is_there = position + UNIT < tile"),
    "pieces_are_not_permuted": ("piece_of(row, piece * 32", "(row * 128 + piece * 32"),
    "values_are_keys": ("codes = half % 2 == 0 ? p.k_codes : p.v_codes;", "codes = p.k_codes;"),
    "values_have_scales_of_keys": (
        "scales = half % 2 == 0 ? p.k_scales : p.v_scales;",
        "scales = p.k_scales;",
    ),
}


@needs_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MISTAKES)
def test_the_emulation_notices_mistakes(name: str) -> None:
    case = Case("llama_1b", torch.bfloat16, spread=2)
    with pytest.raises((RuntimeError, AssertionError), match=r"deadlock|barrier|Tensor-likes are not close"):
        for seed in range(5):
            case.check(variant=TWO_STAGES, mistake=MISTAKES[name], seed=seed)


@needs_compiler
@pytest.mark.exhaustive
def test_the_emulation_notices_spans_that_change_places() -> None:
    case = Case("small_128", torch.bfloat16)
    mistake = "codes + row * HEAD_DIM + span * 64", "codes + row * HEAD_DIM + (1 - span) * 64"
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        case.check(variant=VARIANTS[128], mistake=mistake)


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "heads_of_64" else pytest.mark.slow) for name in COMPILED]
)
def test_products_run_beside_the_exponents_and_nothing_spills(name: str, tmp_path: Path) -> None:
    own, variant = COMPILED[name]
    text = check_machine_code(replace(own, is_fp8=True), variant, tmp_path)
    # A unit's codes, two at a time, without a loop.
    assert text.count("E4M3.UNPACK_B") == launch.UNIT * own.head_dim // 32 // 2


def test_what_the_kernel_cannot_take_is_named() -> None:
    def fp8(dtype: torch.dtype, head_dim: int = 64) -> Fp8Cache:
        codes = meta(10, 2, 16, head_dim, dtype=torch.float8_e4m3fn)
        return Fp8Cache(codes, meta(10, 2, 16, dtype=torch.bfloat16), dtype)

    half, plain_cache = fp8(torch.float16), meta(10, 2, 16, 64, dtype=torch.bfloat16)
    q, cache = meta(5, 8, 64, dtype=torch.bfloat16), fp8(torch.bfloat16)
    assert obstacle(q, cache, cache, 0.1, None) is None
    for caches, softcap, reason in (
        ((half, half), None, "the cache's type torch.float16 is not that of the queries"),
        ((cache, plain_cache), None, "one cache is in FP8"),
        ((cache, cache), 5.0, "a soft cap"),
        ((fp8(torch.bfloat16, 80),) * 2, None, "the head size 80"),
    ):
        found = obstacle(q, *caches, 0.1, softcap)
        assert found is not None and re.search(reason, found)


def test_scales_at_an_odd_address_are_an_obstacle() -> None:
    case = Case("tokens", torch.bfloat16)
    odd = torch.zeros(case.v.scales.numel() + 1, dtype=torch.bfloat16)[1:].view(case.v.scales.shape)
    assert obstacle(case.q, case.k, case.v, 0.1, None) is None
    found = obstacle(case.q, case.k, replace(case.v, scales=odd), 0.1, None)
    assert found == "an address is no multiple of 16"


def test_the_engine_asks_it_for_caches_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def note(kernel: str) -> Any:
        def attend(*_: object, **__: object) -> Tensor:
            taken.append(kernel)
            return torch.ones(1)

        return attend

    monkeypatch.setattr(launch, "is_hopper", lambda device: True)
    monkeypatch.setattr(launch, "attend", note("hopper"))
    monkeypatch.setattr(prefill_attention, "attend_chunks", note("triton"))
    case = Case("tokens", torch.bfloat16)
    prefill_attention.attend_fast(case.q, case.k, case.v, *case.tables, 0.125)
    assert taken == ["hopper"]
