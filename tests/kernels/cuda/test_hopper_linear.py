"""The Hopper kernel of gate and up without a GPU: emulated, and as the compiler leaves it."""

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
from tiny_vllm.kernels.gated_activation import gated_activation_ref
from tiny_vllm.kernels.hopper_linear import launch
from tiny_vllm.kernels.hopper_linear.launch import (
    CONSUMER_REGISTERS,
    MIN_ROWS,
    PRODUCER_REGISTERS,
    SHARED_BYTES,
    compile_gated,
    multiply_gated,
    obstacle,
)
from tiny_vllm.models import mlp

SHARED_LIMIT = 232448  # bytes a block of an H200 can have

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
    expected = gated_activation_ref(x.double() @ weight.double().T, "silu").float()
    assert obstacle(x, weight) is None
    for seed in seeds:
        # Fewer blocks than tiles, another number each time.
        actual = multiply_emulated(x, weight, clusters=1 + seed, seed=seed, mistake=mistake)
        torch.testing.assert_close(actual.float(), expected, rtol=TOLERANCES[dtype], atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("run", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_RUNS)])
def test_the_emulated_kernel_gates_each_row(run: str) -> None:
    check(*(RUNS | SLOW_RUNS)[run])


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
    expected = gated_activation_ref(x.double() @ weight.double().T, "silu").float()
    actual = multiply_emulated(x, weight).float()
    error = (actual - expected).abs()
    assert (error <= 2**-8 * expected.abs() + 6e-18 * ups.bfloat16().float().abs()).all()


@needs_compiler
def test_what_is_no_number_stays_so_in_its_row_alone() -> None:
    gates, ups = torch.tensor([1.0, torch.nan, 2]), torch.arange(8.0)
    x, weight = one_by_one(gates, ups)
    expected = gated_activation_ref(x @ weight.T, "silu").isnan()
    actual = multiply_emulated(x, weight).isnan()
    assert torch.equal(actual, expected) and expected.sum() == len(ups)


MISTAKES = {
    "no_fence": ("    fence_shared();\n", ""),
}
MORE_MISTAKES = {
    "a_stage_is_reused_early": ("      wait(shared.empty(place.stage), place.parity ^ 1);\n", ""),
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
    "results_are_overwritten": ("    if (thread == 0) stores_wait();\n    named_sync", "    named_sync"),
    "results_are_stored_before_they_come": (
        "    fence_shared();\n    named_sync(OWN + warpgroup, 128);",
        "    fence_shared();",
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


@needs_compiler
@pytest.mark.parametrize(
    "name", [*MISTAKES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE_MISTAKES)]
)
def test_the_emulation_notices_mistakes(name: str) -> None:
    mistake = (MISTAKES | MORE_MISTAKES)[name]
    with pytest.raises((RuntimeError, AssertionError), match=r"deadlock|barrier|wait|ended|Tensor-likes"):
        check(torch.bfloat16, 700, 384, 320, seeds=range(8), mistake=mistake)


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_products_run_beside_one_another_and_nothing_spills(dtype: torch.dtype, tmp_path: Path) -> None:
    import triton

    cubin = compile_gated(dtype)
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
    sums = set(range(first, first + 128))
    assert not {int(number) for number in re.findall(r"\bR(\d+)", others)} & sums
    assert not list(released_early(text))


def find_loop(text: str) -> str:
    """From where the first jump back behind the products goes, to the jump."""
    end = text.index("DEPBAR.LE gsb0, 0x1")
    for jump in re.compile(r"BRA `\((\.L\w+)\)").finditer(text, end):
        start = text.index(f"\n{jump[1]}:")
        if start < end:
            return text[start : jump.end()]
    raise AssertionError("no loop")


def test_a_block_fits_into_a_multiprocessor() -> None:
    assert SHARED_BYTES <= SHARED_LIMIT
    assert 128 * (PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS) <= 65536


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
    assert obstacle(meta(5, 128), meta(64, 128)) is None
    found = obstacle(x, weight)
    assert found is not None and re.search(reason, found)


def test_a_kernel_that_does_not_compile_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise CompileError("NVRTC is not here")

    monkeypatch.setattr(launch, "compile_gated", fail)
    x, weight = meta(5, 128), meta(64, 128)
    with pytest.warns(RuntimeWarning, match="NVRTC is not here"):
        assert multiply_gated(x, weight) is None
    # Warnings are errors.
    assert multiply_gated(x, weight) is None


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

    def stand_in(x: Tensor, weight: Tensor) -> Tensor | None:
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
