"""The Hopper kernel for products of prompts without a GPU: emulated, and as the compiler leaves it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.cubin import resource_usage
from tests.helpers.hopper_linear import make_mlp, multiply_emulated
from tests.helpers.hopper_prefill import missing_compiler
from tests.helpers.kernel_compiler import meta, missing_tools
from tests.kernels.cuda.test_hopper_decode import released_early
from tiny_vllm.kernels.cuda.errors import CompileError
from tiny_vllm.kernels.hopper_linear import launch
from tiny_vllm.kernels.hopper_linear.launch import (
    CLUSTER,
    CONSUMER_REGISTERS,
    GATED,
    MIN_ROWS,
    PRODUCER_REGISTERS,
    PRODUCTS_PER_CYCLE,
    SHARED_LIMIT,
    TILE_COLUMNS,
    Variant,
    choose_variant,
    compile_product,
    estimate_cycles,
    multiply_gated,
    multiply_plain,
    obstacle,
    split_tiles,
    take_product,
)
from tiny_vllm.kernels.silu_and_mul import silu_and_mul_ref
from tiny_vllm.models import mlp

needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))

# Of a value: it is rounded once. Sums of FP32 in another order add far less.
TOLERANCES = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
# Type, M, N, K
RUNS: dict[str, tuple[torch.dtype, int, int, int]] = {
    # Three rows of two tiles.
    "several_tiles": (torch.bfloat16, 700, 256, 320),
    # Three tiles: with two clusters, one is left, and halved.
    "a_split_tail": (torch.bfloat16, 700, 128, 192),
    "columns_of_no_tile": (torch.float16, 129, 200, 192),
}
SLOW_RUNS: dict[str, tuple[torch.dtype, int, int, int]] = {
    "odd_row_tiles": (torch.bfloat16, 257, 128, 128),
    # Five tiles: with three clusters, two are left, and whole.
    "a_whole_tail": (torch.bfloat16, 200, 640, 128),
    "one_row": (torch.bfloat16, 1, 128, 64),
    "few_columns": (torch.float16, 130, 8, 128),
    "many_stages": (torch.bfloat16, 500, 384, 832),
}


def check(
    dtype: torch.dtype,
    num_rows: int,
    columns: int,
    terms: int,
    *,
    seeds: range = range(3),
    mistake: tuple[str, str] | None = None,
) -> None:
    # Rows lie apart, with what must not be read between them.
    x = torch.full((num_rows, terms + 8), torch.nan, dtype=dtype)[:, :terms]
    weight = torch.full((2 * columns, terms + 16), torch.nan, dtype=dtype)[:, :terms]
    x.copy_(torch.randn(num_rows, terms))
    weight.copy_(2 * torch.randn(2 * columns, terms) * terms**-0.5)
    expected = silu_and_mul_ref(x.double() @ weight.double().T).float()
    assert obstacle(x, weight, gated=True) is None
    for seed in seeds:
        # Fewer blocks than tiles, another number each time.
        actual = multiply_emulated(x, weight, GATED, clusters=1 + seed, seed=seed, mistake=mistake)
        torch.testing.assert_close(actual.float(), expected, rtol=TOLERANCES[dtype], atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("run", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_RUNS)])
def test_the_emulated_kernel_gates_each_row(run: str) -> None:
    check(*(RUNS | SLOW_RUNS)[run])


# Type, M, N, K, variant, whether y is the residual.
PlainRun = tuple[torch.dtype, int, int, int, Variant, bool]
WIDE, MIDDLE, NARROW = (Variant(tile_columns=columns) for columns in TILE_COLUMNS)
ADDING, ADDING_MIDDLE, ADDING_NARROW = (Variant(adds=True, tile_columns=columns) for columns in TILE_COLUMNS)
PLAIN_RUNS: dict[str, PlainRun] = {
    # Two rows of two tiles, the last of 8 columns.
    "in_place": (torch.bfloat16, 257, 264, 128, ADDING, True),
    "beside_the_residual": (torch.float16, 70, 200, 192, ADDING_MIDDLE, False),
}
SLOW_PLAIN_RUNS: dict[str, PlainRun] = {
    "no_residual": (torch.bfloat16, 130, 72, 192, WIDE, False),
    # Three tiles: with two clusters, one is left, and halved.
    "a_split_tail": (torch.bfloat16, 700, 256, 128, ADDING, True),
    "a_narrow_split_tail": (torch.bfloat16, 700, 128, 448, ADDING_NARROW, True),
    # Five tiles: with three clusters, two are left, and whole.
    "a_whole_tail": (torch.bfloat16, 200, 600, 64, NARROW, False),
    "tiles_of_192": (torch.bfloat16, 500, 400, 512, ADDING_MIDDLE, True),
    "tiles_of_192_alone": (torch.bfloat16, 700, 192, 384, MIDDLE, False),
    "one_row": (torch.float16, 1, 256, 64, ADDING, False),
    "few_columns": (torch.float16, 130, 8, 128, ADDING, True),
    "three_rounds": (torch.bfloat16, 300, 600, 320, WIDE, False),
    "many_stages": (torch.bfloat16, 500, 384, 832, ADDING, True),
    "many_narrow_stages": (torch.float16, 300, 384, 832, NARROW, False),
}


def check_plain(run: PlainRun, *, seeds: range = range(2), mistake: tuple[str, str] | None = None) -> None:
    dtype, rows, width, terms, variant, in_place = run
    # Rows lie apart, with what must not be read between them.
    x = torch.full((rows, terms + 8), torch.nan, dtype=dtype)[:, :terms]
    weight = torch.full((width, terms + 16), torch.nan, dtype=dtype)[:, :terms]
    residual = torch.full((rows, width + 24), torch.nan, dtype=dtype)[:, :width] if variant.adds else None
    x.copy_(torch.randn(rows, terms))
    weight.copy_(2 * torch.randn(width, terms) * terms**-0.5)
    expected = x.double() @ weight.double().T
    if residual is not None:
        expected += residual.copy_(8 * torch.randn(rows, width)).double()
    assert obstacle(x, weight, residual) is None
    for seed in seeds:
        actual = multiply_emulated(
            x, weight, variant, residual, in_place=in_place, clusters=1 + seed, seed=seed, mistake=mistake
        )
        # Sums of some 30 at most, of up to 832 terms.
        torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCES[dtype], atol=1e-4)


@needs_compiler
@pytest.mark.parametrize(
    "run", [*PLAIN_RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_PLAIN_RUNS)]
)
def test_the_emulated_kernel_multiplies_and_adds_the_residual(run: str) -> None:
    check_plain((PLAIN_RUNS | SLOW_PLAIN_RUNS)[run])


def one_by_one(gates: Tensor, ups: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and a matrix with a single term: gates[i] and ups[j] meet in [i, j], and each gate in all rows."""
    x, weight = torch.zeros(len(gates), 64), torch.zeros(2 * len(ups), 64)
    x[:, 0], weight[: len(ups), 0] = gates, 1
    x[:, 1], weight[len(ups) :, 1] = 1, ups
    return x.bfloat16(), weight.bfloat16()


@needs_compiler
def test_gates_of_every_size() -> None:
    gates = torch.tensor([0, 1e-30, -1e-30, 5, -5, 40, -40, -43, -44, -90, 300, -300, 1e30, -1e30, -3e38])
    ups = torch.tensor([1.0, -1, 1e-20, 1e3, -3e8, 0, 7, 8])
    x, weight = one_by_one(gates, ups)
    expected = silu_and_mul_ref(x.double() @ weight.double().T).float()
    actual = multiply_emulated(x, weight, GATED).float()
    error = (actual - expected).abs()
    assert (error <= 2**-8 * expected.abs() + 6e-18 * ups.bfloat16().float().abs()).all()


@needs_compiler
def test_what_is_no_number_stays_so_in_its_row_alone() -> None:
    gates, ups = torch.tensor([1.0, torch.nan, 2]), torch.arange(8.0)
    x, weight = one_by_one(gates, ups)
    expected = silu_and_mul_ref(x @ weight.T).isnan()
    actual = multiply_emulated(x, weight, GATED).isnan()
    assert torch.equal(actual, expected) and expected.sum() == len(ups)


MISTAKES = {
    "no_fence": ("    fence_shared();\n", ""),
    "x_is_copied_before_it_is_written": ("      wait_for_predecessor();\n", ""),
}
MORE_MISTAKES = {
    "a_stage_is_reused_early": (
        "wait(shared.empty(place.stage), place.parity ^ 1);\n      if (round > 0",
        "if (round > 0",
    ),
    "the_other_block_is_not_waited_for": (
        "if (lane < CLUSTER) arrive_at(shared.empty(stage), lane);",
        "if (lane < CLUSTER) arrive_at(shared.empty(stage), cluster_rank());",
    ),
    "a_stage_is_read_before_it_comes": (
        "      wait(shared.full(place.stage), place.parity);\n      products_begin();",
        "      products_begin();",
    ),
    "a_stage_is_free_under_a_product": ("      products_wait<1>();\n", ""),
    "sums_are_read_before_they_come": ("    products_wait<0>();\n", ""),
    "results_are_overwritten": (
        "      if (thread == 0) stores_wait();\n      named_sync",
        "      named_sync",
    ),
    "results_are_stored_before_they_come": (
        "      fence_shared();\n      named_sync(OWN + warpgroup, 128);",
        "      fence_shared();",
    ),
    "the_last_stores_are_not_waited_for": (
        "    }\n    if (thread == 0) stores_wait();",
        "    }",
    ),
    "barriers_are_used_before_they_are_there": (
        "  cluster_sync();\n  const int warpgroup",
        "  const int warpgroup",
    ),
    "a_block_ends_too_early": ("must stay.\n  cluster_sync();", ""),
    "skipped_stages_stay": ("      release(place.stage);\n    }\n  }", "    }\n  }"),
}
ADDING_MISTAKES = {
    "the_residual_is_read_before_it_comes": (
        "        wait(shared.full(place.stage), place.parity);\n#pragma unroll",
        "#pragma unroll",
    ),
    "the_residual_replaces_terms": (
        "wait(shared.empty(place.stage), place.parity ^ 1);\n      copy_residual",
        "copy_residual",
    ),
    "the_residual_stays": (
        "        release(place.stage);\n        place.advance();",
        "        place.advance();",
    ),
    "the_second_pass_overwrites_the_first": (
        "      if (thread == 0) stores_wait();\n      named_sync",
        "      named_sync",
    ),
}


@needs_compiler
@pytest.mark.parametrize(
    "name", [*MISTAKES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE_MISTAKES)]
)
def test_the_emulation_notices_mistakes(name: str) -> None:
    mistake = (MISTAKES | MORE_MISTAKES)[name]
    with pytest.raises((RuntimeError, AssertionError), match=r"deadlock|barrier|wait|ended|Tensor-likes"):
        check(torch.bfloat16, 700, 384, 320, seeds=range(8), mistake=mistake)


@needs_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ADDING_MISTAKES)
def test_the_emulation_notices_mistakes_with_a_residual(name: str) -> None:
    # Three tiles: with two clusters, one is left, and halved.
    run = (torch.bfloat16, 700, 256, 320, ADDING, True)
    with pytest.raises((RuntimeError, AssertionError), match=r"deadlock|barrier|wait|ended|Tensor-likes"):
        check_plain(run, seeds=range(8), mistake=ADDING_MISTAKES[name])


VARIANTS = (GATED, WIDE, MIDDLE, NARROW, ADDING, ADDING_MIDDLE, ADDING_NARROW)
# The others are compiled by the slow tests.
EXAMPLES = [(torch.bfloat16, GATED), (torch.float16, ADDING), (torch.bfloat16, ADDING_MIDDLE)]
OTHERS = [
    pytest.param(dtype, variant, marks=pytest.mark.slow)
    for dtype in TOLERANCES
    for variant in VARIANTS
    if (dtype, variant) not in EXAMPLES
]


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
@pytest.mark.parametrize(("dtype", "variant"), [*EXAMPLES, *OTHERS], ids=repr)
def test_products_run_beside_one_another_and_nothing_spills(
    dtype: torch.dtype, variant: Variant, tmp_path: Path
) -> None:
    import triton

    cubin = compile_product(dtype, variant)
    ((name, usage),) = resource_usage(cubin).items()
    assert name == variant.kernel and usage.stack_bytes == 0
    # What a block starts with is enough for what its warpgroups claim.
    assert 3 * usage.registers >= PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS

    (tmp_path / "cubin").write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    text = subprocess.run([tool, "-c", tmp_path / "cubin"], capture_output=True, text=True, check=True).stdout
    # Serialised products would each have a wait of their own.
    product = f"HGMMA.64x{variant.tile_columns}x16"
    order = re.findall(r"HGMMA\.64x\d+x16|DEPBAR\.LE gsb0, 0x\d", text)
    assert order == [product] * 4 + ["DEPBAR.LE gsb0, 0x1", "DEPBAR.LE gsb0, 0x0"]
    loop = find_loop(text)
    products = re.findall(r"HGMMA\S+ (R\d+), gdesc\[UR\d+\], (R\d+)", loop)
    assert len(products) == 4 and len({register for pair in products for register in pair}) == 1
    first = int(products[0][0][1:])
    others = re.sub(r"HGMMA[^;]+;", "", loop)
    sums = set(range(first, first + variant.tile_columns // 2))
    assert not {int(number) for number in re.findall(r"\bR(\d+)", others)} & sums
    # A stage with a residual is free when its values have come.
    assert text.count("LDSM") == (variant.columns // 16 if variant.adds else 0)
    assert not list(released_early(text))
    # W is asked for before the preceding kernel is waited for.
    copies = re.findall(r"UTMALDG\.2D(?:\.MULTICAST)?|ACQBULK", text)
    assert copies[:2] == ["UTMALDG.2D.MULTICAST", "ACQBULK"] and "UTMALDG.2D" in copies[2:]


def find_loop(text: str) -> str:
    """From where the first jump back behind the products goes, to the jump."""
    end = text.index("DEPBAR.LE gsb0, 0x1")
    for jump in re.compile(r"BRA `\((\.L\w+)\)").finditer(text, end):
        start = text.index(f"\n{jump[1]}:")
        if start < end:
            return text[start : jump.end()]
    raise AssertionError("no loop")


@pytest.mark.parametrize("variant", VARIANTS, ids=repr)
def test_a_block_fits_into_a_multiprocessor(variant: Variant) -> None:
    assert variant.shared_bytes <= SHARED_LIMIT
    assert 128 * (PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS) <= 65536


CLUSTERS = 66  # of an H200's multiprocessors
# Columns of y and terms of QKV, output and down: Llama-3.2-1B, Llama-3.1-8B, Qwen3-0.6B.
SHAPES = (
    *((3072, 2048), (2048, 2048), (2048, 8192)),
    *((6144, 4096), (4096, 4096), (4096, 14336)),
    *((4096, 1024), (1024, 2048), (1024, 3072)),
)


def fill(variant: Variant, rows: int, width: int) -> float:
    """The share of the multiprocessors' time in which they compute a tile, if halves take half the time."""
    row_tiles, column_tiles = variant.count_tiles(rows, width)
    whole, halved = split_tiles(row_tiles * column_tiles, CLUSTERS)
    return (whole + halved) / CLUSTERS / (-(-whole // CLUSTERS) + 0.5 * bool(halved))


def efficiency(variant: Variant, rows: int, width: int, terms: int) -> float:
    """What would take the tensor cores this time, as a share of the estimate."""
    products = rows * width * terms / PRODUCTS_PER_CYCLE / (CLUSTERS * CLUSTER)
    return products / estimate_cycles(variant, rows, width, terms, CLUSTERS)


@pytest.mark.parametrize("rows", [512, 768, 1024, 1536, 2048, 3000, 4096, 6000, 8192, 16384])
def test_chosen_tiles_fill_the_multiprocessors(rows: int) -> None:
    for width, terms in SHAPES:
        results = rows * width
        # Fewer than 2^20 are too few for all multiprocessors; a round of wide tiles has 2^22.
        if results < 2**20:
            continue
        chosen = choose_variant(rows, width, terms, True, CLUSTERS)
        shares = [
            efficiency(Variant(adds=True, tile_columns=columns), rows, width, terms)
            for columns in TILE_COLUMNS
        ]
        assert efficiency(chosen, rows, width, terms) == max(shares)
        least_fill, least_efficiency = (0.96, 0.72) if results >= 2**22 else (0.72, 0.49)
        assert fill(chosen, rows, width) >= least_fill, f"{rows} x {width}: {chosen}"
        assert max(shares) >= least_efficiency, f"{rows} x {width}, {terms} terms: {chosen}"


def test_narrower_tiles_are_for_what_wide_ones_leave_idle() -> None:
    # 16 wide tiles, halved 32; 32 narrow ones, halved 64.
    assert choose_variant(512, 2048, 2048, False, CLUSTERS) == NARROW
    # A wide tile for nearly every cluster.
    assert choose_variant(2048, 2048, 2048, True, CLUSTERS) == ADDING
    # 48 wide tiles; 64 of 192 columns.
    assert fill(WIDE, 1024, 3072) < 0.75 < 0.95 < fill(MIDDLE, 1024, 3072)
    assert choose_variant(1024, 3072, 2048, False, CLUSTERS) == MIDDLE


def test_an_estimate_counts_rounds() -> None:
    def estimate(rows: int) -> float:
        return estimate_cycles(WIDE, rows, 2048, 2048, CLUSTERS)

    # 64 tiles are one round, 72 need a bit of a second one, 104 all of it.
    assert estimate(2048) < estimate(2304) < estimate(3328) == 2 * estimate(2048)


@pytest.mark.parametrize(
    ("x", "weight", "reason"),
    [
        (meta(5, 128, dtype=torch.float32), meta(64, 128), r"torch\.float32 has no tensor cores"),
        (meta(5, 128, dtype=torch.float16), meta(64, 128), r"torch\.bfloat16 is not that of the rows"),
        (meta(5, 96), meta(64, 96), "96 terms are no multiple of 64"),
        (meta(5, 128), meta(72, 128), "36 columns are no multiple of 8"),
        (meta(128, 5).T, meta(64, 128), "the rows' values are not contiguous"),
        (meta(5, 128), meta(64, 132)[:, :128], "the matrix' values are not contiguous, or rows do not begin"),
    ],
)
def test_what_the_kernel_cannot_take_is_named(x: Tensor, weight: Tensor, reason: str) -> None:
    assert obstacle(meta(5, 128), meta(64, 128), gated=True) is None
    found = obstacle(x, weight, gated=True)
    assert found is not None and re.search(reason, found)


@pytest.mark.parametrize(
    ("residual", "reason"),
    [
        (meta(5, 72, dtype=torch.float32), r"the residual's type torch\.float32 is not that of the rows"),
        (meta(72, 5).T, "the residual' values are not contiguous"),
    ],
)
def test_a_residual_that_cannot_be_added_is_named(residual: Tensor, reason: str) -> None:
    x, weight = meta(5, 128), meta(72, 128)
    assert obstacle(x, weight) is None and obstacle(x, weight, meta(5, 72)) is None
    found = obstacle(x, weight, residual)
    assert found is not None and re.search(reason, found)


@pytest.mark.parametrize(("is_hopper", "rows", "terms"), [(True, 9, 64), (True, 8, 96), (False, 8, 64)])
def test_plain_products_are_taken_for_rows_that_were_measured(
    is_hopper: bool, rows: int, terms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[dict[str, Any]] = []

    def stand_in(x: Tensor, weight: Tensor, residual: Tensor | None, **options: Any) -> Tensor:
        taken.append(options)
        return x

    monkeypatch.setattr(launch, "multiply_plain", stand_in)
    monkeypatch.setattr(launch, "is_hopper", lambda device: is_hopper)
    # None were.
    assert take_product(meta(2048, 64), meta(64, 64)) is None
    monkeypatch.setattr(launch, "PLAIN_ROWS", range(8, 9))
    assert take_product(meta(rows, terms), meta(64, terms)) is None and not taken
    if is_hopper:
        assert take_product(meta(8, 64), meta(64, 64), meta(8, 64), True) is not None
        assert taken == [{"in_place": True, "pdl": True}]


def test_a_kernel_that_does_not_compile_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise CompileError("NVRTC is not here")

    monkeypatch.setattr(launch, "compile_product", fail)
    x, weight = meta(5, 128), meta(64, 128)
    with pytest.warns(RuntimeWarning, match="NVRTC is not here"):
        assert multiply_gated(x, weight) is None
    # Warnings are errors.
    assert multiply_gated(x, weight) is None
    assert multiply_plain(x, weight, variant=WIDE) is None


@pytest.mark.parametrize(
    ("is_hopper", "is_compiled", "rows", "terms", "traits", "is_asked"),
    [
        (True, True, MIN_ROWS, 64, {}, True),
        (True, False, MIN_ROWS, 64, {}, True),
        (False, True, MIN_ROWS, 64, {}, False),
        (True, True, MIN_ROWS - 1, 64, {}, False),
        (True, True, MIN_ROWS, 32, {}, False),
        (True, True, MIN_ROWS, 64, {"activation": "gelu_tanh"}, False),
        (True, True, MIN_ROWS, 64, {"bias": torch.zeros(128, dtype=torch.float16)}, False),
    ],
)
def test_an_mlp_takes_it_on_hopper_for_many_rows(
    is_hopper: bool,
    is_compiled: bool,
    rows: int,
    terms: int,
    traits: dict[str, Any],
    is_asked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, ...]] = []

    def stand_in(x: Tensor, weight: Tensor, pdl: bool) -> Tensor | None:
        asked.append((*x.shape, *weight.shape))
        return torch.full((len(x), 64), 2, dtype=x.dtype) if is_compiled else None

    monkeypatch.setattr(mlp, "is_hopper", lambda device: is_hopper)
    monkeypatch.setattr(launch, "multiply_gated", stand_in)
    # A type whose matrices stay plain on a CPU, too.
    layer = make_mlp(torch.ones(128, terms, dtype=torch.float16), **traits)
    hidden, residual = torch.zeros(rows, terms).half(), torch.ones(rows, terms).half()
    result = layer(hidden, residual)
    assert asked == [(rows, terms, 128, terms)] * is_asked
    assert (result == (3 if is_asked and is_compiled else 1)).all()
