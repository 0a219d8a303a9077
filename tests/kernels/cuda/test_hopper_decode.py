"""The Hopper kernel of decode attention without a GPU: emulated, and as the compiler leaves it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.cubin import resource_usage
from tests.helpers.hopper_decode import attend_emulated
from tests.helpers.hopper_prefill import missing_compiler
from tests.helpers.kernel_compiler import missing_tools
from tiny_vllm.kernels import rope_and_attend
from tiny_vllm.kernels.cuda.nvrtc import compile_cubin
from tiny_vllm.kernels.fp8_cache import Cache, Fp8Cache, cache_tensors, quantise_rows
from tiny_vllm.kernels.hopper_decode import launch
from tiny_vllm.kernels.hopper_decode.launch import (
    VARIANTS,
    Shape,
    Variant,
    macros,
    num_threads,
    obstacle,
    shared_bytes,
    source,
)
from tiny_vllm.kernels.paged_decode_attention import paged_decode_attention_ref
from tiny_vllm.kernels.rope_from_parts import HeadNorms, rope_from_parts_ref

needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))

# Of the largest value: weights and the result are rounded once each.
TOLERANCE = 2**-7
# With FP8: of the result, which is rounded to 8 bits, and of what it sums, without signs: products round
# weights to 11 bits, and nothing else.
RESULT_TOLERANCE, SUM_TOLERANCE = 2**-8, 2**-10
SHARED_LIMIT = 232448  # bytes a block of an H200 can have
SMALL = {64: Variant(stages=4), 128: Variant(tile=32, stages=4)}
LENS = {
    "ragged": [100, 1, 385, 64, 65, 200, 16, 17, 63],
    "one_token": [1] * 20,
    "long": [1500],
    "alike": [128] * 6,
    "many": [index * 7 % 90 + 1 for index in range(70)],
}


@dataclass(frozen=True)
class Case:
    """A batch with NaN wherever no sequence owns a cell, and the FP64 answer. late: what the preceding kernel
    writes, queries and the newest tokens' rows. allowed: differences from the answer."""

    q: Tensor
    k_cache: Cache
    v_cache: Cache
    page_table: Tensor
    context_lens: Tensor
    table_rows: Tensor
    late: list[Tensor]
    expected: Tensor
    allowed: Tensor

    def check(self, blocks: int = 5, seed: int = 0, **options: Any) -> Tensor:
        actual = attend_emulated(
            self.q, self.k_cache, self.v_cache, self.page_table, self.context_lens, self.q.shape[2] ** -0.5,
            table_rows=self.table_rows, late=self.late, blocks=blocks, seed=seed,
            **({"variant": SMALL[self.q.shape[2]]} | options),
        )  # fmt: skip
        apart = (actual.double() - self.expected) / self.allowed
        torch.testing.assert_close(apart, torch.zeros_like(apart), rtol=0, atol=1)
        return actual


def make_case(
    lens: list[int],
    group: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype = torch.int64,
    *,
    is_fp8: bool = False,
    spread: int = 0,
) -> Case:
    """spread: values are up to 2^spread larger or smaller than usual, row by row, a KV head's queries by
    2^(2 spread) and its keys by the inverse, which leaves scores as they are."""
    width = -(-max(lens) // page_size) + 1
    num_pages = sum(-(-length // page_size) for length in lens) + 1
    free = (torch.randperm(num_pages - 1) + 1).tolist()
    rows = (2, num_pages, num_kv_heads, page_size)
    # In FP8: both NaN of codes, and for scales NaN of both signs and infinity.
    codes = torch.tensor([0x7F, 0xFF], dtype=torch.uint8)[torch.randint(2, (*rows, head_dim))]
    scales = torch.tensor([torch.nan, -torch.nan, torch.inf]).bfloat16()[torch.randint(3, rows)]
    caches = torch.full((*rows, head_dim), torch.nan).bfloat16()
    table_rows = torch.randperm(len(lens) + 2)[: len(lens)]
    page_table = torch.zeros(len(lens) + 2, width, dtype=dtype)
    q = 2 * torch.randn(len(lens), num_kv_heads, group, head_dim)
    expected = torch.empty(len(lens), num_kv_heads * group, head_dim, dtype=torch.float64)
    sizes, largest = torch.empty_like(expected), 0.0
    late = []
    for index, length in enumerate(lens):
        both = torch.randn(2, num_kv_heads, length, head_dim)
        exponents = torch.randint(-2 * spread, 2 * spread + 1, (num_kv_heads, 1, 1))
        q[index] *= torch.exp2(exponents)
        both[0] *= torch.exp2(-exponents)
        both[1] *= torch.exp2(torch.randint(-spread, spread + 1, (num_kv_heads, length, 1)))
        both = both.bfloat16()
        stored = both.double()
        own_codes, own_scales = quantise_rows(both)
        if is_fp8:
            stored = own_codes.float().double() * own_scales.double().unsqueeze(-1)
        newest = (length - 1) % page_size
        for start in range(0, length, page_size):
            page = free.pop()
            page_table[table_rows[index], start // page_size] = page
            end = min(start + page_size, length)
            caches[:, page, :, : end - start] = both[:, :, start:end]
            codes[:, page, :, : end - start] = own_codes.view(torch.uint8)[:, :, start:end]
            scales[:, page, :, : end - start] = own_scales[:, :, start:end]
        for cache in (codes, scales) if is_fp8 else (caches,):
            late += [part[page, head, newest] for part in cache for head in range(num_kv_heads)]
        keys, values = stored.repeat_interleave(group, 1)
        queries = q[index].bfloat16().double().flatten(0, 1)
        weights = (torch.einsum("hd,hld->hl", queries, keys) * head_dim**-0.5).softmax(-1)
        expected[index] = torch.einsum("hl,hld->hd", weights, values)
        sizes[index] = torch.einsum("hl,hld->hd", weights, values.abs())
        largest = max(largest, float(values.abs().max()))
    queries = q.bfloat16().flatten(1, 2)
    allowed = torch.full_like(expected, TOLERANCE * largest)
    if is_fp8:
        allowed = RESULT_TOLERANCE * expected.abs() + SUM_TOLERANCE * sizes
    both_caches: list[Cache] = [caches[0], caches[1]]
    if is_fp8:
        both_caches = [
            Fp8Cache(own_codes, own_scales, torch.bfloat16)
            for own_codes, own_scales in zip(codes.view(torch.float8_e4m3fn), scales, strict=True)
        ]
    context_lens = torch.tensor(lens, dtype=dtype)
    tables = page_table, context_lens, table_rows.to(dtype)
    return Case(queries, *both_caches, *tables, [queries, *late], expected, allowed)


# lens, group, num_kv_heads, head_dim, page_size, variant
RUNS: dict[str, tuple[str, int, int, int, int, Variant]] = {
    "llama_1b": ("ragged", 4, 2, 64, 16, SMALL[64]),
    "llama_8b": ("ragged", 4, 2, 128, 16, SMALL[128]),
    "one_token": ("one_token", 4, 3, 64, 16, SMALL[64]),
    "long": ("long", 8, 1, 64, 64, SMALL[64]),
    "many": ("many", 2, 2, 64, 32, SMALL[64]),
}
SLOW_RUNS: dict[str, tuple[str, int, int, int, int, Variant]] = {
    **{f"group_{group}": ("ragged", group, 1, 64, 16, SMALL[64]) for group in (1, 3, 5, 7, 8)},
    "group_7_of_128": ("ragged", 7, 1, 128, 16, SMALL[128]),
    "pages_of_32": ("ragged", 2, 2, 128, 32, SMALL[128]),
    "pages_of_48": ("ragged", 4, 1, 64, 48, SMALL[64]),
    "pages_of_64": ("ragged", 6, 2, 64, 64, SMALL[64]),
    "pages_of_128": ("ragged", 4, 1, 128, 128, SMALL[128]),
    "alike": ("alike", 4, 2, 64, 16, SMALL[64]),
    "tiles_of_32": ("ragged", 4, 2, 64, 64, Variant(tile=32, stages=4)),
    "tiles_of_128": ("ragged", 4, 2, 128, 16, Variant(tile=128, stages=2, warps=2)),
    "eight_warps": ("ragged", 4, 2, 64, 16, Variant(stages=8, warps=8)),
    "one_warp": ("ragged", 4, 2, 64, 16, Variant(stages=2, warps=1)),
    "no_extra": ("ragged", 4, 2, 64, 16, Variant(stages=4, extra=0)),
    "one_stage": ("ragged", 4, 2, 64, 16, Variant(stages=1, warps=1)),
    "as_launched_64": ("ragged", 4, 2, 64, 16, VARIANTS[64]),
    "as_launched_128": ("ragged", 4, 2, 128, 16, VARIANTS[128]),
}


@needs_compiler
@pytest.mark.parametrize("run", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_RUNS)])
def test_the_emulated_kernel_attends_to_the_own_context(run: str) -> None:
    lens, *sizes, variant = (RUNS | SLOW_RUNS)[run]
    case = make_case(LENS[lens], *sizes)
    for seed, blocks in enumerate((1, 2, 5, 13)):
        case.check(blocks, seed, variant=variant)


@needs_compiler
@pytest.mark.parametrize("extra", [0, 16, 80])
def test_a_block_may_end_anywhere(extra: int) -> None:
    case = make_case([40, 1, 33, 17], 2, 2, 64, 16)
    for blocks in range(1, 12):
        case.check(blocks, blocks, variant=Variant(stages=4, extra=extra))


@needs_compiler
def test_more_blocks_than_pieces() -> None:
    make_case([1, 40, 3], 4, 2, 64, 16).check(blocks=9)


@needs_compiler
def test_tables_of_32_bits() -> None:
    make_case(LENS["ragged"], 4, 2, 64, 16, torch.int32).check()


@needs_compiler
def test_without_rows_sequences_are_the_tables_rows() -> None:
    case = make_case(LENS["ragged"], 4, 2, 64, 16)
    own = replace(case, page_table=case.page_table[case.table_rows].contiguous())
    actual = attend_emulated(
        own.q, own.k_cache, own.v_cache, own.page_table, own.context_lens, 64**-0.5, variant=SMALL[64]
    )
    assert torch.equal(actual, case.check())


@needs_compiler
def test_padding_rows_read_the_null_page_and_change_nothing() -> None:
    case = make_case([100, 1, 64, 33], 4, 2, 64, 16)
    first = case.check(blocks=3)
    # Page 0, where the row's own token may be written at any time.
    table = torch.cat((case.page_table, torch.zeros_like(case.page_table[:1])))
    rows = torch.cat((case.table_rows, torch.tensor([len(table) - 1] * 2)))
    lens = torch.cat((case.context_lens, torch.ones(2, dtype=torch.int64)))
    q = torch.cat((case.q, torch.full_like(case.q[:2], torch.nan)))
    actual = attend_emulated(
        q, case.k_cache, case.v_cache, table, lens, 64**-0.5, variant=SMALL[64], table_rows=rows, blocks=3
    )
    torch.testing.assert_close(actual[:4], first, rtol=0, atol=2**-8 * float(first.abs().max()))
    assert actual[:4].isfinite().all()


@needs_compiler
def test_the_order_of_events_changes_nothing() -> None:
    case = make_case(LENS["ragged"], 4, 2, 64, 16)
    first = case.check(seed=0)
    for seed in range(1, 6):
        assert torch.equal(case.check(seed=seed), first)


def copy_of(cache: Cache) -> Cache:
    if isinstance(cache, Fp8Cache):
        codes = cache.codes.view(torch.uint8).clone().view(cache.codes.dtype)
        return Fp8Cache(codes, cache.scales.clone(), cache.dtype)
    return cache.clone()


@needs_compiler
@pytest.mark.parametrize(("pdl", "is_fp8"), [(False, False), (True, False), (True, True)])
def test_the_engine_rotates_first_and_then_attends(
    pdl: bool, is_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where queries are not made in the kernel. With the stand-ins for a CPU: everything arrives where it
    should."""
    case = make_case(LENS["ragged"], 4, 2, 64, 16, is_fp8=is_fp8)
    chained: list[bool] = []

    def stand_in(*arguments: Any, workspace: launch.Workspace, pdl: bool, **options: Any) -> Tensor:
        assert workspace is given
        chained.append(pdl)
        return attend_emulated(*arguments, variant=SMALL[64], **options)

    given = launch.Workspace(torch.empty(0), torch.empty(0))
    # Not with what queries are made of as an eighth.
    monkeypatch.setattr(launch, "takes", lambda *batch: len(batch) == 7)
    monkeypatch.setattr(launch, "attend", stand_in)
    monkeypatch.setattr(rope_and_attend, "rope_from_parts", rope_from_parts_ref)
    count, newest = len(case.context_lens), case.context_lens - 1
    parts = torch.randn(2, count, (8 + 2 * 2) * 64)
    cells = case.page_table[case.table_rows, newest // 16] * 16 + newest % 16
    angles = torch.arange(400)[:, None] * torch.rand(32)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    norms = HeadNorms(*(1 + 0.5 * torch.randn(2, 64)).bfloat16(), 1e-5)

    def run() -> tuple[Tensor, list[Cache]]:
        k_cache, v_cache = copy_of(case.k_cache), copy_of(case.v_cache)
        attended = rope_and_attend.rope_and_attend(
            parts, None, cos_sin, cells, k_cache, v_cache, case.page_table, case.context_lens, 8, 0.125,
            table_rows=case.table_rows, head_norms=norms, workspace=given, pdl=pdl,
        )  # fmt: skip
        return attended, [k_cache, v_cache]

    actual, caches = run()
    assert chained == [pdl]
    monkeypatch.undo()
    k_cache, v_cache = copy_of(case.k_cache), copy_of(case.v_cache)
    q = rope_from_parts_ref(
        parts, None, cos_sin, case.context_lens, cells, k_cache, v_cache, 8, head_norms=norms
    )
    rows = case.page_table[case.table_rows]
    expected = paged_decode_attention_ref(q, k_cache, v_cache, rows, case.context_lens, 0.125)
    atol = 2 * TOLERANCE * float(expected.float().abs().max())
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=atol)
    for cache, own in zip(caches, (k_cache, v_cache), strict=True):
        for written, wanted in zip(cache_tensors(cache), cache_tensors(own), strict=True):
            if written is not None:
                assert torch.equal(written.view(torch.uint8), wanted.view(torch.uint8))


MISTAKES = {
    "tiles_are_read_before_they_come": ("    wait(shared.full(stage), place.parity);\n", ""),
    "a_stage_is_reused_early": ("        wait(shared.empty(place.index), place.parity ^ 1);\n", ""),
}
MORE_MISTAKES = {
    "nobody_waits_for_the_predecessor": (
        "  wait_for_predecessor();\n  for (u32 round = 0;",
        "  for (u32 round = 0;",
    ),
    "the_newest_token_stays": (
        "put_newest(stage, valid - 1, slot + QUERY_BYTES, segment.context_len)",
        "warp_sync()",
    ),
    "values_behind_the_context_stay": ("      clear_values(stage, valid);\n", ""),
    "a_slot_is_reused_early": ("      wait(shared.slot_empty(place.index), place.parity ^ 1);\n", ""),
    "a_slot_is_read_before_it_comes": ("      wait(shared.slot_full(place.index), place.parity);\n", ""),
    "a_slot_is_never_free": ("      release(shared.slot_empty(place.index));\n", ""),
    "a_stage_is_never_free": ("    release(shared.empty(stage));\n", ""),
    "a_part_is_read_before_it_comes": (
        "        wait(shared.parts_full(place.index), place.parity);\n",
        "",
    ),
    "a_part_is_replaced_early": (
        "          wait(shared.part_empty(warp), (given++ & 1) ^ 1);\n",
        "",
    ),
    "parts_are_not_counted": ("(given++ & 1) ^ 1", "1"),
    "blocks_do_not_join": ("      if (segment.end < segment.count) add_blocks(segment, total_units);\n", ""),
    "flags_stay_raised": ("      if (lane == 0) lower_flag(p.flags + block);\n", ""),
    "positions_behind_the_context_count": ("add_tile<true>(stage, valid)", "add_tile<true>(stage, TILE)"),
}


@needs_compiler
@pytest.mark.parametrize(
    "name", [*MISTAKES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE_MISTAKES)]
)
def test_the_emulation_notices_mistakes(name: str) -> None:
    mistake = (MISTAKES | MORE_MISTAKES)[name]
    case = make_case(LENS["ragged"] * 3, 4, 2, 64, 16)
    with pytest.raises(
        (RuntimeError, AssertionError),
        match=r"deadlock|barrier|copy|preceding|flag stays|Tensor-likes are not close",
    ):
        for seed in range(3):
            case.check(blocks=4, seed=seed, mistake=mistake)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(head_dim=96), "the head size 96"),
        (dict(page_size=8), "the page size 8"),
        (dict(dtype=torch.float16), r"the cache's type torch\.float16"),
        (dict(dtype=torch.float16, fp8="kv"), r"the cache's type torch\.float16"),
        (dict(fp8="k"), "one cache is in FP8"),
        (dict(fp8="kv", scales=7), "no multiple of 16"),
        (dict(fp8="kv", page_size=24), "the page size 24"),
        (dict(num_heads=32), "16 query heads per KV head"),
        (dict(sequences=15), "15 sequences"),
        (dict(sequences=513), "513 sequences"),
        (dict(table=torch.int16), "tables are not of integers"),
        (dict(rows=torch.int32), "are of two types"),
        (dict(scale=-1.0), "the scale -1"),
    ],
)
def test_what_the_kernel_cannot_take_is_named(changes: dict[str, Any], reason: str) -> None:
    def find(
        head_dim: int = 64,
        page_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        num_heads: int = 16,
        sequences: int = 64,
        table: torch.dtype = torch.int32,
        rows: torch.dtype = torch.int64,
        scale: float = 0.1,
        fp8: str = "",
        scales: int = 0,
    ) -> str | None:
        shape = (5, 2, page_size, head_dim)
        space = torch.zeros(scales + 5 * 2 * page_size).bfloat16()[scales:].view(shape[:3])
        both = (
            Fp8Cache(torch.zeros(shape, dtype=torch.float8_e4m3fn), space, dtype)
            if name in fp8
            else torch.zeros(shape, dtype=dtype)
            for name in "kv"
        )
        lens = torch.ones(sequences, dtype=torch.int64)
        return obstacle(num_heads, *both, torch.zeros(sequences, 4, dtype=table), lens, lens.to(rows), scale)

    assert find() is None and find(fp8="kv") is None
    found = find(**changes)
    assert found is not None and re.search(reason, found)


def shape(head_dim: int, **changes: Any) -> Shape:
    fields = dict(
        head_dim=head_dim, group=4, num_kv_heads=8, page_size=16, table=torch.int64, lens=torch.int64
    )
    return Shape(**(fields | changes))


COMPILED = {
    "heads_of_64": shape(64),
    "heads_of_128": shape(128),
    "group_8": shape(128, group=8, page_size=32),
    "tables_of_32_bits": shape(
        64, group=1, num_kv_heads=3, page_size=48, table=torch.int32, lens=torch.int32
    ),
    **{
        f"parts_of_{head_dim}_{name}": shape(head_dim, from_parts=True, **options)
        for head_dim in (64, 128)
        for name, options in {
            "plain": {},
            "with_norms": dict(has_norms=True),
            "group_3_with_all": dict(group=3, has_bias=True, has_norms=True),
            "group_8_with_all": dict(group=8, has_bias=True, has_norms=True),
        }.items()
    },
    "fp8_of_64": shape(64, is_fp8=True),
    "fp8_of_128": shape(128, is_fp8=True),
    "fp8_pages_of_32": shape(128, group=8, page_size=32, is_fp8=True),
    "fp8_tables_of_32_bits": shape(
        64, group=7, num_kv_heads=2, page_size=64, table=torch.int32, lens=torch.int32, is_fp8=True
    ),
}


# Registers that a load of shared memory fills, of those that do not fill four.
WIDTHS = {"LDS.64": 2, "LDS.U16": 1}


def released_early(text: str) -> Iterator[str]:
    """Loads of shared memory under way at an arrival that lets their place be overwritten: an arrival does
    not wait for loads, but whatever names their registers does. The order of the text is enough, as no load
    is left unused at a jump back."""
    waiting: dict[str, set[int]] = {}
    for instruction in re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(.*?)\s*;", text):
        registers = {int(number) for number in re.findall(r"\bR(\d+)", instruction)}
        registers |= {number + 1 for number in registers if "HMMA" in instruction}
        if "SYNCS.ARRIVE.TRANS64.A1T0" in instruction:
            yield from (f"{load} before {instruction}" for load in waiting)
        waiting = {load: own for load, own in waiting.items() if not own & registers}
        if load := re.search(r"(?:LDSM\S*\.4|LDS\.(?:128|64|U16)) R(\d+)", instruction):
            count = next((count for width, count in WIDTHS.items() if width in instruction), 4)
            waiting[instruction] = set(range(int(load[1]), int(load[1]) + count))


def test_a_release_before_a_load_returns_is_found() -> None:
    release = "/*0030*/ @!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R9+URZ+0x8], RZ ;"
    load, product = "/*0010*/ LDSM.16.MT88.4 R4, [R2] ;", "/*0020*/ HMMA.16816.F32.BF16 R12, R4, R16, R12 ;"
    assert not list(released_early(f"{load} {product} {release}"))
    assert len(list(released_early(f"{load} {release} {product}"))) == 1
    half, use = "/*0010*/ LDS.U16 R4, [R2] ;", "/*0020*/ STS.U16 [R3], R4 ;"
    assert not list(released_early(f"{half} {use} {release}"))
    assert len(list(released_early(f"{half} {release} {use}"))) == 1


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
@pytest.mark.parametrize("name", COMPILED)
def test_nothing_spills_and_loads_return_before_their_place_is_free(name: str, tmp_path: Path) -> None:
    import triton

    own = COMPILED[name]
    variant = own.variant
    cubin = compile_cubin(source(), name="decode", defines=macros(own, variant))
    (usage,) = resource_usage(cubin).values()
    assert usage.stack_bytes == 0
    assert -(-usage.registers // 8) * 8 * num_threads(variant) * variant.blocks <= 65536
    assert shared_bytes(own, variant) <= SHARED_LIMIT

    (tmp_path / "cubin").write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    text = subprocess.run([tool, "-c", tmp_path / "cubin"], capture_output=True, text=True, check=True).stdout
    # Keys and values of tiles with and without an end, in blocks of 512 bytes; two codes an instruction.
    assert text.count("LDSM") >= 4 * variant.tile * own.row_bytes // 512
    codes = 4 * variant.tile * own.head_dim if own.is_fp8 else 0
    assert text.count("F2FP.F16.E4M3.UNPACK_B") == codes // 64
    assert text.count("HMMA") == 4 * variant.tile * own.head_dim // 256
    assert not list(released_early(text))
    # One thread copies, without a loop over the lanes round each copy.
    assert "UTMALDG.3D" in text and ("UBLKCP" in text) != own.from_parts and "VOTEU" not in text
    if own.from_parts:
        # All values of two parts are asked for before the first is added.
        behind_wait = text.split("ACQBULK")[1]
        asked = re.findall(r"LDG\.E\.(?:64|128)\.STRONG\.GPU", behind_wait[: behind_wait.index("FADD")])
        assert len(asked) == 2 * (own.group + 2)
