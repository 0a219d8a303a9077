"""The Hopper kernel of decode attention that makes its queries of the parts of a QKV product, emulated."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.hopper_decode import attend_from_parts_emulated
from tests.helpers.hopper_prefill import missing_compiler
from tests.kernels.cuda.test_hopper_decode import LENS, TOLERANCE, make_case
from tiny_vllm.kernels import rope_and_attend
from tiny_vllm.kernels.fp8_cache import Fp8Cache
from tiny_vllm.kernels.hopper_decode import launch
from tiny_vllm.kernels.hopper_decode.launch import PARTS_VARIANTS, QueryParts, Variant, obstacle_of_parts
from tiny_vllm.kernels.paged_decode_attention import paged_decode_attention_ref
from tiny_vllm.kernels.rope_from_parts import HeadNorms, rope_from_parts_ref

needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))

SMALL = {64: Variant(stages=4, query_warps=2), 128: Variant(tile=32, stages=4, query_warps=4)}
# Of a written value: half a unit in the last place of BF16's 8 bits. Of the largest: arithmetic in FP32.
ROUNDING, SUMMING = 2**-8, 2**-18


@dataclass(frozen=True)
class Case:
    """A batch whose newest keys and values are yet to be written: NaN, as all that no sequence owns."""

    made: QueryParts
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    context_lens: Tensor
    table_rows: Tensor
    num_heads: int

    def expect(self) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs of rounded queries, keys and values, and the caches before that rounding: FP32."""
        caches = self.k_cache.float(), self.v_cache.float()
        made = self.made
        q = rope_from_parts_ref(
            made.parts, made.bias, made.cos_sin, self.context_lens, made.cells, *caches, self.num_heads,
            head_norms=made.head_norms,
        )  # fmt: skip
        rounded = [tensor.bfloat16().float() for tensor in (q, *caches)]
        rows = self.page_table[self.table_rows]
        scale = self.k_cache.shape[3] ** -0.5
        return paged_decode_attention_ref(*rounded, rows, self.context_lens, scale), *caches

    def run(self, blocks: int = 5, seed: int = 0, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, and the caches that it writes."""
        caches = self.k_cache.clone(), self.v_cache.clone()
        head_dim = self.k_cache.shape[3]
        attended = attend_from_parts_emulated(
            self.made, *caches, self.page_table, self.context_lens, self.num_heads, head_dim**-0.5,
            table_rows=self.table_rows, blocks=blocks, seed=seed, **({"variant": SMALL[head_dim]} | options),
        )  # fmt: skip
        return attended, *caches

    def check(self, blocks: int = 5, seed: int = 0, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        actual = self.run(blocks, seed, **options)
        expected = self.expect()
        largest = float(expected[2].nan_to_num().abs().max())
        torch.testing.assert_close(actual[0].float(), expected[0], rtol=0, atol=TOLERANCE * largest)
        page_size = self.k_cache.shape[2]
        cells = self.made.cells // page_size, slice(None), self.made.cells % page_size
        for written, wanted, before in zip(
            actual[1:], expected[1:], (self.k_cache, self.v_cache), strict=True
        ):
            atol = SUMMING * float(wanted[cells].abs().max())
            torch.testing.assert_close(written[cells].float(), wanted[cells], rtol=ROUNDING, atol=atol)
            others = written.clone()
            others[cells] = before[cells]
            assert torch.equal(others.view(torch.int16), before.view(torch.int16)), (
                "a foreign cell is written"
            )
        return actual


def make_parts_case(
    lens: list[int],
    group: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int = 16,
    splits: int = 2,
    has_bias: bool = False,
    has_norms: bool = False,
    dtype: torch.dtype = torch.int64,
) -> Case:
    own = make_case(lens, group, num_kv_heads, head_dim, page_size, dtype)
    k_cache, v_cache = own.k_cache, own.v_cache
    assert isinstance(k_cache, Tensor) and isinstance(v_cache, Tensor)
    newest = own.context_lens.long() - 1
    cells = own.page_table[own.table_rows.long(), newest // page_size].long() * page_size + newest % page_size
    for cache in (k_cache, v_cache):
        cache[cells // page_size, :, cells % page_size] = torch.nan
    width = (group + 2) * num_kv_heads * head_dim
    angles = torch.arange(max(lens) + 1)[:, None] * torch.rand(head_dim // 2)
    made = QueryParts(
        torch.randn(splits, len(lens), width),
        torch.randn(width).bfloat16() if has_bias else None,
        torch.cat((angles.cos(), angles.sin()), -1),
        cells,
        HeadNorms(*(1 + 0.5 * torch.randn(2, head_dim)), 1e-3) if has_norms else None,
    )
    return Case(
        made, k_cache, v_cache, own.page_table, own.context_lens, own.table_rows, group * num_kv_heads
    )


# Newest tokens alone in a page, at its end, at its beginning, and in between.
EDGES = [16, 17, 1, 32, 33, 70]
# lens, group, num_kv_heads, head_dim, page_size, splits, has_bias, has_norms
RUNS: dict[str, tuple[Any, ...]] = {
    "plain_of_64": (EDGES, 4, 2, 64, 16, 2, False, False),
    "all_of_128": (EDGES, 2, 2, 128, 16, 3, True, True),
    "group_8": (EDGES, 8, 1, 64, 16, 4, False, True),
}
SLOW_RUNS: dict[str, tuple[Any, ...]] = {
    **{
        f"group_{group}_of_{head_dim}_from_{splits}": (
            EDGES,
            group,
            2,
            head_dim,
            32,
            splits,
            splits == 1,
            group % 2 == 0,
        )
        for head_dim in (64, 128)
        for group, splits in ((1, 4), (3, 1), (4, 5), (5, 2), (6, 3), (7, 4), (8, 2))
    },
    "one_token": (LENS["one_token"], 4, 3, 64, 16, 2, False, False),
    "long": (LENS["long"], 4, 1, 128, 64, 2, False, True),
    "many": (LENS["many"], 2, 2, 64, 48, 2, True, False),
    "ragged": (LENS["ragged"], 4, 2, 128, 16, 1, False, False),
}


@needs_compiler
@pytest.mark.parametrize("run", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_RUNS)])
def test_the_emulated_kernel_makes_queries_keys_and_values(run: str) -> None:
    """The helper sees that each word of memory is stored once, and that flags are 0 again."""
    case = make_parts_case(*(RUNS | SLOW_RUNS)[run])
    for seed, blocks in enumerate((1, 4, 9)):
        case.check(blocks, seed)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_as_launched(head_dim: int) -> None:
    make_parts_case(LENS["ragged"], 4, 2, head_dim).check(variant=PARTS_VARIANTS[head_dim])


@needs_compiler
def test_any_number_of_warps_makes_the_same() -> None:
    case = make_parts_case(LENS["ragged"], 4, 2, 64)
    first = case.check()
    for warps in (1, 4):
        for own, other in zip(case.run(variant=replace(SMALL[64], query_warps=warps)), first, strict=True):
            assert torch.equal(own.view(torch.int16), other.view(torch.int16))


@needs_compiler
def test_the_order_of_events_changes_nothing() -> None:
    case = make_parts_case(EDGES, 4, 2, 64)
    first = case.check(blocks=3)
    for seed in range(1, 5):
        for own, other in zip(case.run(blocks=3, seed=seed), first, strict=True):
            assert torch.equal(own.view(torch.int16), other.view(torch.int16))


@needs_compiler
def test_tables_of_32_bits_and_no_rows() -> None:
    case = make_parts_case(EDGES, 4, 2, 64, dtype=torch.int32)
    first = case.check()[0]
    caches = case.k_cache.clone(), case.v_cache.clone()
    pages = case.page_table[case.table_rows.long()].contiguous()
    attended = attend_from_parts_emulated(
        case.made, *caches, pages, case.context_lens, case.num_heads, 0.125, variant=SMALL[64]
    )
    assert torch.equal(attended, first)


@needs_compiler
@pytest.mark.parametrize("lens", [[40, 1, 33], [1]])
def test_rows_of_padding_are_zero_and_write_nothing(lens: list[int]) -> None:
    case = make_parts_case(lens, 4, 2, 64)
    made, count = case.made, len(lens)
    first = case.run(blocks=3)
    parts = torch.cat((made.parts, torch.full((2, 35, made.parts.shape[2]), torch.nan)), 1)
    padded = replace(
        case,
        made=replace(made, parts=parts, cells=torch.cat((made.cells, torch.zeros(35, dtype=torch.int64)))),
        context_lens=torch.cat((case.context_lens, torch.ones(35, dtype=torch.int64))),
        table_rows=torch.cat((case.table_rows, torch.zeros(35, dtype=torch.int64))),
    )
    # What is shared out is the same, so all is bit-equal.
    attended, *caches = padded.run(blocks=3)
    assert torch.equal(attended[:count], first[0]) and (attended[count:] == 0).all()
    for cache, wanted in zip(caches, first[1:], strict=True):
        assert torch.equal(cache.view(torch.int16), wanted.view(torch.int16))


@needs_compiler
def test_nothing_but_padding() -> None:
    case = make_parts_case([1, 1], 4, 2, 64)
    case = replace(case, made=replace(case.made, cells=torch.zeros(2, dtype=torch.int64)))
    attended, *caches = case.run(blocks=3)
    assert (attended == 0).all()
    for cache, wanted in zip(caches, (case.k_cache, case.v_cache), strict=True):
        assert torch.equal(cache.view(torch.int16), wanted.view(torch.int16))


MISTAKES = {
    "lanes_do_not_meet_before_the_arrival": (
        "    warp_sync();\n    if (lane == 0) arrive(shared.slot_full(place.index));\n",
        "    if (lane == 0) arrive(shared.slot_full(place.index));\n",
    ),
    "flags_stay_raised": ("      if (lane == 0) lower_flag(p.flags + block);\n", ""),
}
MORE_MISTAKES = {
    "nobody_waits_for_the_predecessor": (
        "  wait_for_predecessor();\n  for (u32 round = first;",
        "  for (u32 round = first;",
    ),
    "a_slot_is_reused_early": (
        "    wait(shared.slot_empty(place.index), place.parity ^ 1);\n    maker.store",
        "    maker.store",
    ),
    "a_slot_arrives_early": (
        "    maker.store(segment, shared.slot(place.index));\n    warp_sync();\n"
        "    if (lane == 0) arrive(shared.slot_full(place.index));\n",
        "    warp_sync();\n    if (lane == 0) arrive(shared.slot_full(place.index));\n"
        "    maker.store(segment, shared.slot(place.index));\n",
    ),
    "warps_do_not_take_turns": ("has_segment = skip(QUERY_WARPS)", "has_segment = skip(1)"),
    "every_block_of_a_pair_writes": (
        "if (head == GROUP && !segment.has_newest()) break;",
        "",
    ),
    "the_last_parts_are_left_out": ("left > 0; left -= PARTS_AT_ONCE", "left > 1; left -= PARTS_AT_ONCE"),
}


@needs_compiler
@pytest.mark.parametrize(
    "name", [*MISTAKES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE_MISTAKES)]
)
def test_the_emulation_notices_mistakes(name: str) -> None:
    case = make_parts_case(LENS["ragged"] * 3, 4, 2, 64, splits=5)
    with pytest.raises(
        (RuntimeError, AssertionError),
        match=r"deadlock|barrier|preceding|flag stays|stored twice|foreign|Tensor-likes are not close",
    ):
        for seed in range(3):
            case.check(4, seed, mistake=(MISTAKES | MORE_MISTAKES)[name])


def test_what_the_kernel_cannot_make_queries_of_is_named() -> None:
    case = make_parts_case(EDGES, 4, 2, 64, has_bias=True, has_norms=True)
    made, k_cache = case.made, case.k_cache
    assert made.bias is not None and made.head_norms is not None
    assert obstacle_of_parts(made, k_cache) is None
    # A row of a table with others may begin anywhere.
    assert obstacle_of_parts(replace(made, cells=torch.cat((made.cells, made.cells))[1:7]), k_cache) is None
    coded = Fp8Cache(torch.zeros(k_cache.shape, dtype=torch.float8_e4m3fn), k_cache[..., 0], torch.bfloat16)
    norms = HeadNorms(made.head_norms.q, made.head_norms.k.bfloat16(), 1e-5)
    odd = torch.zeros(made.parts.numel() + 1)[1:].view(made.parts.shape)
    for found, reason in (
        (obstacle_of_parts(made, coded), "caches are in FP8"),
        (obstacle_of_parts(replace(made, parts=made.parts.bfloat16()), k_cache), r"type torch\.bfloat16 is"),
        (obstacle_of_parts(replace(made, bias=made.bias.float()), k_cache), "the bias's type"),
        (obstacle_of_parts(replace(made, cos_sin=made.cos_sin[:, :32]), k_cache), "32 of 64 dimensions"),
        (obstacle_of_parts(replace(made, head_norms=norms), k_cache), "norms of heads"),
        (obstacle_of_parts(replace(made, parts=made.parts[..., ::2]), k_cache), "not contiguous"),
        (obstacle_of_parts(replace(made, parts=odd), k_cache), "no multiple of 16"),
        (obstacle_of_parts(replace(made, cells=made.cells[::2]), k_cache), "cells are not contiguous"),
    ):
        assert found is not None and re.search(reason, found)


@needs_compiler
@pytest.mark.parametrize("pdl", [False, True])
def test_the_engine_lets_it_make_queries(pdl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernel's stand-in for a CPU: everything arrives where it should, the workspace included."""
    case = make_parts_case(LENS["ragged"], 4, 2, 64, has_bias=True, has_norms=True)
    given = launch.Workspace(torch.empty(0), torch.empty(0))
    chained: list[bool] = []

    def stand_in(*arguments: Any, workspace: launch.Workspace, pdl: bool, **options: Any) -> Tensor:
        assert workspace is given
        chained.append(pdl)
        return attend_from_parts_emulated(*arguments, variant=SMALL[64], **options)

    monkeypatch.setattr(launch, "takes", lambda *_: True)
    monkeypatch.setattr(launch, "attend_from_parts", stand_in)
    made, caches = case.made, (case.k_cache.clone(), case.v_cache.clone())
    attended = rope_and_attend.rope_and_attend(
        made.parts, made.bias, made.cos_sin, made.cells, *caches, case.page_table, case.context_lens,
        case.num_heads, 0.125, table_rows=case.table_rows, head_norms=made.head_norms, workspace=given,
        pdl=pdl,
    )  # fmt: skip
    assert chained == [pdl]
    for own, wanted in zip((attended, *caches), case.check(), strict=True):
        assert torch.equal(own.view(torch.int16), wanted.view(torch.int16))


def test_what_it_takes_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_parts_case([1] * 16, 4, 2, 64)
    compiled: list[launch.Shape] = []
    monkeypatch.setattr(launch, "is_hopper", lambda _: True)
    monkeypatch.setattr(launch, "_compiled", lambda shape, *_: compiled.append(shape) or shape)
    batch = (
        case.num_heads,
        case.k_cache,
        case.v_cache,
        case.page_table,
        case.context_lens,
        case.table_rows,
        1.0,
    )
    assert launch.takes(*batch) and launch.takes(*batch, case.made)
    assert [shape.from_parts for shape in compiled] == [False, True]
    assert not launch.takes(*batch, replace(case.made, parts=case.made.parts.bfloat16()))
    monkeypatch.setattr(launch, "TAKES_PARTS", False)
    assert not launch.takes(*batch, case.made) and launch.takes(*batch)


def test_a_workspace_is_for_all_launches_over_such_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = torch.zeros(2, 2, 16, 64).bfloat16()
    assert launch.workspace_of(cache) is None
    monkeypatch.setattr(launch, "is_hopper", lambda _: True)
    monkeypatch.setattr(launch, "count_multiprocessors", lambda _: 5)
    for variants in (launch.VARIANTS, launch.FP8_VARIANTS, launch.PARTS_VARIANTS):
        assert variants[64].blocks == 2 and variants[128].blocks == 1
    workspace = launch.workspace_of(cache)
    assert workspace is not None and workspace.flags.tolist() == [0] * 10
    assert launch.workspace_of(torch.zeros(2, 2, 16, 96).bfloat16()) is None
