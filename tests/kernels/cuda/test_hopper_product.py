"""The Hopper kernel for products of decode steps without a GPU: emulated, and as the compiler leaves it."""

from __future__ import annotations

import re
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.cubin import resource_usage
from tests.helpers.hopper_prefill import missing_compiler
from tests.helpers.hopper_product import multiply_emulated
from tests.helpers.kernel_compiler import compiling, decode_chain, meta, missing_tools
from tests.kernels.cuda.test_hopper_linear import find_loop
from tiny_vllm.kernels.cuda.errors import CompileError
from tiny_vllm.kernels.gated_activation import gated_activation_ref
from tiny_vllm.kernels.hopper_linear import decode_launch
from tiny_vllm.kernels.hopper_linear.decode_launch import (
    MAX_ROWS,
    MIN_ROWS,
    PAIRED_WEIGHTS,
    SHARED_LIMIT,
    Variant,
    candidates,
    choose_variant,
    compile_product,
    gated_product,
    obstacle,
    split_product,
)

needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))

# Of a value: it is rounded once.
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
BF16, FP16 = torch.bfloat16, torch.float16
# Type, M, N, K, variant; gated ones below.
Run = tuple[torch.dtype, int, int, int, Variant]
RUNS: dict[str, Run] = {
    "in_pairs": (BF16, 200, 200, 448, Variant(2, 48, 2, 2, stages=2)),
    "one_row_too_many": (BF16, 65, 112, 640, Variant(2, 48, 3, stages=3)),
    "alone": (FP16, 100, 72, 192, Variant(2, 32, 1, stages=2)),
    "fewer_rows_than_a_tile": (BF16, 9, 64, 256, Variant(1, 48, 1, stages=2)),
}
SLOW_RUNS: dict[str, Run] = {
    "all_rows": (BF16, 256, 136, 256, Variant(2, 96, 2, 2, stages=2)),
    "no_row_to_spare": (BF16, 128, 128, 128, Variant(2, 64, 2)),
    "one_row_less": (FP16, 127, 64, 320, Variant(2, 64, 4, stages=2)),
    "one_row_of_the_second_tile": (BF16, 129, 96, 256, Variant(2, 48, 1, 2, stages=2)),
    "pairs_of_one_warpgroup": (FP16, 100, 200, 320, Variant(1, 128, 2, 2, stages=3)),
    "three_warpgroups": (BF16, 190, 200, 320, Variant(3, 96, 3, stages=2)),
    "four_warpgroups": (BF16, 256, 128, 192, Variant(4, 128, 1, stages=2)),
    "few_rows": (BF16, 33, 64, 192, Variant(1, 48, 2, stages=2)),
    "fewer_steps_than_stages": (BF16, 70, 64, 64, Variant(1, 64, 1, 2)),
}
GATED_RUNS: dict[str, Run] = {
    "gated": (BF16, 200, 104, 192, Variant(2, 96, 1, 2, stages=2)),
}
SLOW_GATED_RUNS: dict[str, Run] = {
    "gated_alone": (FP16, 65, 72, 320, Variant(2, 64, stages=2)),
    "gated_in_large_tiles": (BF16, 256, 200, 128, Variant(2, 256, 1, 2, stages=2)),
    "gated_by_pairs_of_one_warpgroup": (FP16, 100, 136, 192, Variant(1, 192, 1, 2, stages=2)),
    "gated_by_three": (BF16, 192, 72, 128, Variant(3, 128, stages=2)),
}


def make_case(dtype: torch.dtype, rows: int, width: int, terms: int) -> tuple[Tensor, Tensor]:
    # Rows lie apart, with what must not be read between them.
    x = torch.full((rows, terms + 8), torch.nan, dtype=dtype)[:, :terms]
    weight = torch.full((width, terms + 16), torch.nan, dtype=dtype)[:, :terms]
    x.copy_(torch.randn(rows, terms))
    weight.copy_(2 * torch.randn(width, terms) * terms**-0.5)
    return x, weight


def check(run: Run, *, seeds: range = range(2), mistake: tuple[str, str] | None = None) -> None:
    dtype, rows, width, terms, variant = run
    x, weight = make_case(dtype, rows, width, terms)
    steps = terms // 64
    bounds = [steps * part // variant.splits * 64 for part in range(variant.splits + 1)]
    expected = torch.stack([x[:, a:b].double() @ weight[:, a:b].double().T for a, b in pairwise(bounds)])
    results = [multiply_emulated(x, weight, variant, seed=seed, mistake=mistake) for seed in seeds]
    for result in results:
        torch.testing.assert_close(result, expected.float(), rtol=1e-5, atol=2e-5)
        assert torch.equal(result, results[0])


def check_gated(run: Run) -> None:
    dtype, rows, width, terms, variant = run
    x, weight = make_case(dtype, rows, 2 * width, terms)
    expected = gated_activation_ref(x.double() @ weight.double().T, "silu").float()
    for seed in range(2):
        result = multiply_emulated(x, weight, variant, gated=True, seed=seed)
        torch.testing.assert_close(result.float(), expected, rtol=ROUNDING[dtype], atol=1e-5)


def named(runs: dict[str, Run], slow: dict[str, Run]) -> list[Any]:
    return [*runs, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)]


@needs_compiler
@pytest.mark.parametrize("run", named(RUNS, SLOW_RUNS))
def test_the_emulated_kernel_sums_each_part(run: str) -> None:
    check((RUNS | SLOW_RUNS)[run])


@needs_compiler
@pytest.mark.parametrize("run", named(GATED_RUNS, SLOW_GATED_RUNS))
def test_the_emulated_kernel_gates_each_row(run: str) -> None:
    check_gated((GATED_RUNS | SLOW_GATED_RUNS)[run])


MISTAKES = {
    "x_is_copied_before_it_is_written": ("    wait_for_predecessor();\n", ""),
    "a_stage_is_reused_early": ("wait(shared.empty(place.stage), place.parity);", ""),
}
MORE_MISTAKES = {
    "other_rows_are_not_waited_for": (
        "arrive_at(shared.empty(stage), lane);",
        "arrive_at(shared.empty(stage), cluster_rank());",
    ),
    "a_stage_is_read_before_it_comes": ("wait(shared.full(place.stage), place.parity);", ""),
    "a_stage_is_free_under_a_product": ("      products_wait<1>();\n", ""),
    "sums_are_read_before_they_come": ("    products_wait<0>();\n", ""),
    "barriers_are_used_before_they_are_there": ("  else\n    cluster_sync();\n", ""),
    "a_block_ends_too_early": ("if (CLUSTER > 1) cluster_sync();", "if (CLUSTER > 1) cluster_arrive();"),
}
NOTICED = r"deadlock|barrier|wait|ended|Tensor-likes"


@needs_compiler
@pytest.mark.parametrize(
    "name", [*MISTAKES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE_MISTAKES)]
)
def test_the_emulation_notices_mistakes(name: str) -> None:
    mistake = (MISTAKES | MORE_MISTAKES)[name]
    with pytest.raises((RuntimeError, AssertionError), match=NOTICED):
        check(RUNS["in_pairs"], seeds=range(8), mistake=mistake)


# Llama-3.2-1B, Llama-3.1-8B, Qwen3-0.6B: QKV, output, down as N, K; then gate and up.
SHAPES = [
    *((3072, 2048), (2048, 2048), (2048, 8192)),
    *((6144, 4096), (4096, 4096), (4096, 14336)),
    *((4096, 1024), (1024, 2048), (1024, 3072)),
]
GATED_SHAPES = [(8192, 2048), (14336, 4096), (3072, 1024)]
ALL_ROWS = (9, 64, 65, 96, 128, 129, 192, 200, 256)
CHOSEN = sorted(
    {(choose_variant(rows, *shape).kernel, False) for rows in ALL_ROWS for shape in SHAPES}
    | {(choose_variant(rows, *shape, True).kernel, True) for rows in ALL_ROWS for shape in GATED_SHAPES},
    key=repr,
)
EXAMPLES = [
    (BF16, Variant(2, 96, 1, 2).fitted(), False),
    (FP16, Variant(3, 128).fitted(), True),
]


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
@pytest.mark.parametrize(
    ("dtype", "variant", "gated"),
    [*EXAMPLES, *(pytest.param(BF16, *chosen, marks=pytest.mark.slow) for chosen in CHOSEN)],
    ids=repr,
)
def test_products_run_beside_one_another_and_nothing_spills(
    dtype: torch.dtype, variant: Variant, gated: bool, tmp_path: Path
) -> None:
    import triton

    cubin = compile_product(dtype, variant, gated)
    (usage,) = resource_usage(cubin).values()
    assert usage.stack_bytes == 0

    (tmp_path / "cubin").write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    text = subprocess.run([tool, "-c", tmp_path / "cubin"], capture_output=True, text=True, check=True).stdout
    # Serialised products would each have a wait of their own.
    order = re.findall(r"HGMMA\.64x\d+x16|DEPBAR\.LE gsb0, 0x\d", text)
    product = f"HGMMA.64x{variant.columns}x16"
    assert order == [product] * 4 + ["DEPBAR.LE gsb0, 0x1", "DEPBAR.LE gsb0, 0x0"]
    loop = find_loop(text)
    products = re.findall(r"HGMMA\S+ (R\d+), gdesc\[UR\d+\], (R\d+)", loop)
    assert len(products) == 4 and len({register for pair in products for register in pair}) == 1
    first = int(products[0][0][1:])
    others = re.sub(r"HGMMA[^;]+;", "", loop)
    sums = set(range(first, first + variant.columns // 2))
    assert not {int(number) for number in re.findall(r"\bR(\d+)", others)} & sums


@pytest.mark.parametrize("rows", ALL_ROWS)
def test_a_choice_holds_all_rows_and_fits_into_a_multiprocessor(rows: int) -> None:
    for gated, shapes in ((False, SHAPES), (True, GATED_SHAPES)):
        for width, terms in shapes:
            variant = choose_variant(rows, width, terms, gated)
            assert 0 <= variant.rows * variant.row_blocks - rows < 64
            assert variant.shared_bytes <= SHARED_LIMIT and variant.stages >= 3
            assert variant.splits <= terms // 64
            # One round, except of what is too large for tiles of the largest size.
            blocks = variant.count_blocks(width, gated)
            assert blocks <= 132 or (width, gated) == (14336, True)
            assert variant in set(candidates(rows, width, terms, gated))


@pytest.mark.parametrize(
    ("rows", "shape", "gated", "fastest"),
    [
        (64, (2048, 2048), False, Variant(1, 48, 3)),
        (96, (2048, 2048), False, Variant(2, 48, 3)),
        (128, (4096, 1024), False, Variant(2, 48, 1)),
        (128, (4096, 4096), False, Variant(2, 64, 2)),
        (128, (6144, 4096), False, Variant(1, 96, 1, 2)),
        (256, (2048, 8192), False, Variant(2, 96, 3, 2)),
        (32, (3072, 1024), True, Variant(1, 64)),
        (64, (8192, 2048), True, Variant(1, 128)),
        (64, (14336, 4096), True, Variant(1, 224)),
        (128, (8192, 2048), True, Variant(2, 128)),
        (128, (14336, 4096), True, Variant(2, 224)),
        (192, (8192, 2048), True, Variant(3, 128)),
        (256, (8192, 2048), True, Variant(2, 256, 1, 2)),
        (256, (14336, 4096), True, Variant(2, 224, 1, 2)),
    ],
)
def test_what_was_fastest_on_an_h200_is_chosen(
    rows: int, shape: tuple[int, int], gated: bool, fastest: Variant
) -> None:
    assert choose_variant(rows, *shape, gated) == fastest.fitted()


@pytest.mark.parametrize(
    ("rows", "tiles"),
    [
        (64, {(1, 1)}),
        (65, {(2, 1)}),
        (128, {(2, 1)}),
        (192, {(3, 1)}),
        (256, {(4, 1), (2, 2)}),
    ],
)
@pytest.mark.parametrize("gated", [False, True])
def test_rows_are_a_tile_or_two_halves_that_share_weights(
    rows: int, tiles: set[tuple[int, int]], gated: bool
) -> None:
    found = list(candidates(rows, 4096, 320, gated))
    assert {(variant.warpgroups, variant.row_blocks) for variant in found} == tiles
    # Of five steps at most five parts.
    assert {variant.splits for variant in found} == ({1} if gated else {1, 2, 3, 4})


@pytest.mark.parametrize("gated", [False, True])
def test_128_rows_are_shared_out_where_weights_are_many(gated: bool) -> None:
    assert PAIRED_WEIGHTS == 4096 * 4096
    for terms, is_paired in ((4160, not gated), (4096, False)):
        found = candidates(128, 4096, terms, gated)
        assert any(variant.row_blocks == 2 for variant in found) == is_paired


@pytest.mark.parametrize(
    ("x", "weight", "gated", "reason"),
    [
        (meta(99, 128, dtype=torch.float32), meta(2048, 128), False, r"torch\.float32 has no tensor cores"),
        (meta(99, 128, dtype=FP16), meta(2048, 128), False, r"torch\.bfloat16 is not that of the rows"),
        (meta(MIN_ROWS - 1, 128), meta(2048, 128), False, "8 rows are not 9 to 256"),
        (meta(MIN_ROWS - 1, 128), meta(2048, 128), True, "8 rows are not 9 to 256"),
        (meta(MAX_ROWS + 1, 128), meta(2048, 128), True, "257 rows are not 9 to 256"),
        (meta(99, 96), meta(2048, 96), False, "96 terms are no multiple of 64"),
        (meta(99, 128), meta(1016, 128), False, "1016 rows of the matrix are fewer"),
        (meta(99, 128), meta(2052, 128), False, "2052 columns are no multiple of 8"),
        (meta(99, 128), meta(2056, 128), True, "1028 columns are no multiple of 8"),
        (meta(128, 99).T, meta(2048, 128), False, "the rows' values are not contiguous"),
        (meta(99, 128), meta(2048, 132)[:, :128], False, "the matrix' values are not contiguous, or rows"),
    ],
)
def test_what_the_kernel_cannot_take_is_named(x: Tensor, weight: Tensor, gated: bool, reason: str) -> None:
    assert obstacle(meta(99, 128), meta(2048, 128), gated=gated) is None
    found = obstacle(x, weight, gated=gated)
    assert found is not None and re.search(reason, found)


def be_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_launch, "is_hopper", lambda device: True)
    decode_launch._loaded.cache_clear()


def test_a_kernel_that_does_not_compile_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise CompileError("NVRTC is not here")

    be_hopper(monkeypatch)
    monkeypatch.setattr(decode_launch, "compile_product", fail)
    with pytest.warns(RuntimeWarning, match="NVRTC is not here"):
        assert split_product(meta(99, 128), meta(2048, 128)) is None
    # Warnings are errors; this is another variant.
    assert gated_product(meta(200, 128), meta(2048, 128)) is None
    decode_launch._loaded.cache_clear()


@pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
@pytest.mark.parametrize("is_taken", [True, False])
def test_a_decode_step_takes_it_for_all_products(is_taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, int, int, bool]] = []

    def multiply(x: Tensor, weight: Tensor, gated: bool, pdl: bool) -> Tensor | None:
        asked.append((gated, *weight.shape, pdl))
        if not is_taken:
            return None
        return meta(len(x), len(weight) // 2) if gated else meta(3, len(x), len(weight), dtype=torch.float32)

    be_hopper(monkeypatch)
    monkeypatch.setattr(decode_launch, "_multiply", multiply)
    with compiling() as kernels:
        decode_chain(100)
    layer = [
        (False, 3072, 2048, True),
        (False, 2048, 2048, True),
        (True, 16384, 2048, True),
        (False, 2048, 8192, True),
    ]
    # The chain's second kernel, its first norm, is not launched early, but the product behind it is.
    assert asked == layer * 2
    names = [kernel.name for kernel in kernels]
    assert ("_tiled_product_kernel" in names) != is_taken
    joined = {
        kernel.constants["SPLITS"]
        for kernel in kernels
        if kernel.name in ("_finish_rows_kernel", "_rope_and_attend_kernel")
    }
    assert (joined == {3}) == is_taken
