"""The Hopper kernel of decode attention over keys and values in FP8, emulated."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.hopper_decode import attend_emulated
from tests.kernels.cuda.test_hopper_decode import (
    LENS,
    RESULT_TOLERANCE,
    SMALL,
    SUM_TOLERANCE,
    Case,
    copy_of,
    make_case,
    needs_compiler,
)
from tiny_vllm.kernels.cuda.errors import CompileError
from tiny_vllm.kernels.fp8_cache import Cache, Fp8Cache
from tiny_vllm.kernels.hopper_decode import launch
from tiny_vllm.kernels.hopper_decode.launch import FP8_VARIANTS, Variant

# lens, group, num_kv_heads, head_dim, page_size, variant
RUNS: dict[str, tuple[str, int, int, int, int, Variant]] = {
    "llama_1b": ("ragged", 4, 2, 64, 16, SMALL[64]),
    "llama_8b": ("ragged", 4, 2, 128, 16, SMALL[128]),
    "one_token": ("one_token", 4, 3, 64, 16, SMALL[64]),
}
SLOW_RUNS: dict[str, tuple[str, int, int, int, int, Variant]] = {
    **{f"group_{group}": ("ragged", group, 1, 64, 16, SMALL[64]) for group in (1, 3, 5, 7, 8)},
    "group_7_of_128": ("ragged", 7, 1, 128, 16, SMALL[128]),
    "long": ("long", 8, 1, 64, 64, SMALL[64]),
    "many": ("many", 2, 2, 128, 32, SMALL[128]),
    "alike": ("alike", 4, 2, 64, 16, SMALL[64]),
    "pages_of_32": ("ragged", 2, 2, 128, 32, SMALL[128]),
    "pages_of_48": ("ragged", 4, 1, 64, 48, SMALL[64]),
    "pages_of_64": ("ragged", 6, 2, 64, 64, SMALL[64]),
    "pages_of_128": ("ragged", 4, 1, 128, 128, SMALL[128]),
    "tiles_of_32": ("ragged", 4, 2, 64, 64, Variant(tile=32, stages=4)),
    "tiles_of_96": ("ragged", 4, 2, 64, 32, Variant(tile=96, stages=4)),
    "tiles_of_128": ("ragged", 4, 2, 64, 16, Variant(tile=128, stages=4)),
    "wide_tiles_of_128": ("ragged", 4, 2, 128, 16, Variant(tile=128, stages=2, warps=2)),
    "one_stage": ("ragged", 4, 2, 64, 16, Variant(stages=1, warps=1)),
    "as_launched_64": ("ragged", 4, 2, 64, 16, FP8_VARIANTS[64]),
    "as_launched_128": ("ragged", 4, 2, 128, 16, FP8_VARIANTS[128]),
}


@needs_compiler
@pytest.mark.parametrize("run", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_RUNS)])
def test_the_emulated_kernel_attends_to_the_own_context(run: str) -> None:
    lens, *sizes, variant = (RUNS | SLOW_RUNS)[run]
    case = make_case(LENS[lens], *sizes, is_fp8=True)
    for seed, blocks in enumerate((1, 2, 5, 13)):
        case.check(blocks, seed, variant=variant)


@needs_compiler
@pytest.mark.parametrize("extra", [0, 80])
def test_a_block_may_end_anywhere(extra: int) -> None:
    case = make_case([40, 1, 33, 17], 2, 2, 64, 16, is_fp8=True)
    for blocks in range(1, 12):
        case.check(blocks, blocks, variant=Variant(stages=4, extra=extra))


@needs_compiler
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sizes_beyond_fp16_are_as_exact_as_others(head_dim: int) -> None:
    """Queries of 2^-40 to 2^40 (FP16 ends at 2^16), and values 2^40 apart in one context."""
    make_case(LENS["ragged"], 4, 2, head_dim, 16, is_fp8=True, spread=20).check()


@needs_compiler
def test_weights_that_are_tiny_still_count() -> None:
    """As with a first token that most attention goes to and whose value is small: the others' weights, 3e-7
    each, would have 3 bits in FP16, and are half of the result."""
    case = make_case([300] * 3, 4, 2, 64, 16, is_fp8=True)
    k_cache, v_cache = copy_of(case.k_cache), copy_of(case.v_cache)
    assert isinstance(k_cache, Fp8Cache) and isinstance(v_cache, Fp8Cache)
    pages = case.page_table[case.table_rows, 0]
    k_cache.codes.view(torch.uint8)[pages, :, 0] = 0x38  # 1
    k_cache.scales[pages, :, 0] = 2
    v_cache.scales[pages, :, 0] *= 2.0**-14
    q = (0.1 * case.q.float() + 15 / 16).bfloat16()
    check_against_fp64(replace(case, q=q, k_cache=k_cache, v_cache=v_cache, late=[]))


def check_against_fp64(case: Case) -> None:
    """The answer anew, from what the caches hold."""
    assert isinstance(case.k_cache, Fp8Cache) and isinstance(case.v_cache, Fp8Cache)
    num_heads, head_dim = case.q.shape[1:]
    group = num_heads // case.k_cache.shape[1]
    for index, length in enumerate(case.context_lens.tolist()):
        pages = case.page_table[case.table_rows[index]]
        keys, values = (
            (cache.codes.float().double() * cache.scales.double().unsqueeze(-1))[pages]
            .transpose(0, 1)
            .flatten(1, 2)[:, :length]
            .repeat_interleave(group, 0)
            for cache in (case.k_cache, case.v_cache)
        )
        scores = torch.einsum("hd,hld->hl", case.q[index].double(), keys) * head_dim**-0.5
        weights = scores.softmax(-1)
        case.expected[index] = torch.einsum("hl,hld->hd", weights, values)
        sizes = torch.einsum("hl,hld->hd", weights, values.abs())
        case.allowed[index] = RESULT_TOLERANCE * case.expected[index].abs() + SUM_TOLERANCE * sizes
    case.check()


@needs_compiler
@pytest.mark.parametrize("poison", [torch.nan, -torch.nan, torch.inf])
def test_a_broken_sequence_breaks_no_other(poison: float) -> None:
    case = make_case(LENS["ragged"], 4, 2, 64, 16, is_fp8=True)
    first = case.check()
    v_cache = copy_of(case.v_cache)
    assert isinstance(v_cache, Fp8Cache)
    v_cache.scales[case.page_table[case.table_rows[2], 3], :, 5] = poison
    actual = attend_emulated(
        case.q, case.k_cache, v_cache, case.page_table, case.context_lens, 64**-0.5, variant=SMALL[64],
        table_rows=case.table_rows,
    )  # fmt: skip
    assert not actual[2].isfinite().any()
    others = [index for index in range(len(first)) if index != 2]
    assert torch.equal(actual[others], first[others])


@needs_compiler
def test_queries_of_zeros_and_infinities() -> None:
    case = make_case(LENS["ragged"], 4, 2, 64, 16, is_fp8=True)
    q = case.q.clone()
    q[0] = 0
    q[3, 1] = torch.inf
    check_finite = attend_emulated(
        q, case.k_cache, case.v_cache, case.page_table, case.context_lens, 64**-0.5, variant=SMALL[64],
        table_rows=case.table_rows,
    )  # fmt: skip
    assert check_finite[0].isfinite().all()
    broken = check_finite.isnan().any(-1)
    assert broken.nonzero().tolist() == [[3, 1]]


@needs_compiler
def test_the_order_of_events_changes_nothing() -> None:
    case = make_case(LENS["ragged"], 4, 2, 64, 16, is_fp8=True)
    first = case.check(seed=0)
    for seed in range(1, 4):
        assert torch.equal(case.check(seed=seed), first)


MISTAKES = {
    "the_newest_tokens_scales_stay": ("store_shared_half(scales + position * 2, load_shared_half(own))", ""),
    "scales_behind_the_context_stay": ("store_shared_half(shared.value_scales(stage) + i * 2, 0)", ""),
}
MORE_MISTAKES = {
    "bytes_do_not_change_places": ("swap_middle_bytes(codes[half * 2])", "codes[half * 2]"),
    "outputs_keep_their_unit": ("        if constexpr (FP8) drop_unit();\n", ""),
    "sums_do_not_follow_the_unit": ("      if constexpr (FP8) shrink[head] *= rescale;\n", ""),
    "scales_of_the_wrong_positions": ("lane % 2 * 16);", "0);"),
    "keys_have_no_scale": ("      multiply_scales(scores, scales, 1);\n", ""),
    "queries_keep_their_scale": ("(int)broadcast(exponent, (lane % 4 * 2 + i) * 4) - 14", "127"),
    "the_newest_scale_is_its_neighbours": ("(context_len - 1) % 8 * 2", "context_len % 8 * 2"),
    "columns_change_places": ("FP8 ? (left & 0xffff) | right << 16 : left", "left"),
}


@needs_compiler
@pytest.mark.parametrize(
    "name", [*MISTAKES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE_MISTAKES)]
)
def test_the_emulation_notices_mistakes(name: str) -> None:
    mistake = (MISTAKES | MORE_MISTAKES)[name]
    case = make_case(LENS["ragged"] * 2, 4, 2, 64, 16, is_fp8=True, spread=3)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        case.check(blocks=4, mistake=mistake)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_where_it_does_not_compile_one_warning_says_so(is_fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.zeros(5, 2, 16, 64, dtype=torch.float8_e4m3fn if is_fp8 else torch.bfloat16)
    scales = torch.zeros(5, 2, 16).bfloat16()
    cache: Cache = Fp8Cache(values, scales, torch.bfloat16) if is_fp8 else values
    lens = torch.ones(20, dtype=torch.int64)
    arguments: Any = (8, cache, cache, torch.zeros(20, 4, dtype=torch.int64), lens, lens, 0.125)

    def refuse(shape: launch.Shape, *_: Any) -> None:
        assert shape.is_fp8 == is_fp8
        raise CompileError("not here")

    monkeypatch.setattr(launch, "TAKES_HOPPER_DECODE", True)
    monkeypatch.setattr(launch, "is_hopper", lambda _: True)
    monkeypatch.setattr(launch, "compile_attention", refuse)
    launch._compiled.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert not launch.takes(*arguments) and not launch.takes(*arguments)
    finally:
        launch._compiled.cache_clear()
    assert len(seen) == 1
    assert re.search("instead of it: a slower Triton kernel .*not here", str(seen[0].message))
