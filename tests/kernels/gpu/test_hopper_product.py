"""The Hopper kernel for products of decode steps on a GPU, with NaN around everything that it reads and
writes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.gpu.test_hopper_linear import ROUNDING, TYPES, surrounded
from tiny_vllm.kernels.finish_rows import finish_rows
from tiny_vllm.kernels.gated_activation import gated_activation_ref
from tiny_vllm.kernels.hopper_linear import decode_launch
from tiny_vllm.kernels.hopper_linear.decode_launch import (
    Variant,
    candidates,
    choose_variant,
    compile_product,
    gated_product,
    launch_product,
    load_product,
    obstacle,
    split_product,
)
from tiny_vllm.kernels.hopper_prefill.launch import is_hopper

pytestmark = pytest.mark.gpu

ROWS = (9, 17, 32, 33, 64, 65, 100, 127, 128, 129, 192, 200, 256)
# N, K: QKV, output and down of Llama-3.2-1B, down of Llama-3.1-8B, and what fills no tile.
SHAPES = ((3072, 2048), (2048, 2048), (2048, 8192), (4096, 14336), (1048, 448))
GATED_SHAPES = ((8192, 2048), (14336, 4096), (1048, 448))
# Kernels that all must work, whatever is chosen.
VARIANTS = sorted({v for rows in (33, 65, 192, 256) for v in candidates(rows, 1048, 448, False)}, key=repr)
OTHERS = (Variant(2, 64, 2, stages=2), Variant(2, 96, 3, 2, stages=3), Variant(1, 64))


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """What is chosen, into the cache on disk, side by side."""
    if not (torch.cuda.is_available() and is_hopper(torch.device("cuda", 0))):
        pytest.skip("needs a Hopper GPU")
    kernels = {
        (dtype, choose_variant(rows, *shape, gated).kernel, gated)
        for dtype in TYPES
        for gated, all_rows, shapes in ((False, ROWS, SHAPES), (True, ROWS, GATED_SHAPES))
        for rows in all_rows
        for shape in shapes
    }
    kernels |= {(torch.bfloat16, v.fitted().kernel, False) for v in (*VARIANTS, *OTHERS)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda kernel: compile_product(*kernel), kernels))


@pytest.fixture
def poisoned_results(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def poisoned(*args: object, **options: object) -> Tensor:
        result = empty(*args, **options)  # type: ignore[call-overload]
        return result.fill_(torch.nan) if result.is_floating_point() else result

    monkeypatch.setattr(decode_launch.torch, "empty", poisoned)


def make_case(
    rows: int, width: int, terms: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    x = surrounded(rows, terms, dtype, device)
    return x, surrounded(width, terms, dtype, device).mul_(2 * terms**-0.5)


def check(parts: Tensor | None, x: Tensor, weight: Tensor) -> None:
    assert parts is not None, "the kernel is not taken"
    assert parts.dtype == torch.float32
    # Tensor cores cut sums off after each 16 terms, which costs 2^-24 of them; they are 16 at most.
    atol = x.shape[1] / 16 * 2**-24 * 16
    torch.testing.assert_close(parts.sum(0), F.linear(x.float(), weight.float()), rtol=1e-5, atol=2 * atol)


@pytest.mark.usefixtures("poisoned_results")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_parts_are_those_of_the_product_in_fp32(
    device: torch.device, rows: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x, weight = make_case(rows, *shape, dtype, device)
    assert obstacle(x, weight) is None
    check(split_product(x, weight), x, weight)


@pytest.mark.usefixtures("poisoned_results")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", GATED_SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_gated_products_are_those_of_fp32_rounded_once(
    device: torch.device, rows: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x, weight = make_case(rows, 2 * shape[0], shape[1], dtype, device)
    assert obstacle(x, weight, gated=True) is None
    actual = gated_product(x, weight)
    assert actual is not None and actual.dtype == dtype
    expected = gated_activation_ref(F.linear(x.float(), weight.float()), "silu")
    sums = shape[1] / 16 * 2**-24
    rtol, atol = ROUNDING[dtype] + 2 * sums, sums * 2 * 16
    torch.testing.assert_close(actual.float(), expected, rtol=rtol, atol=atol)


@pytest.mark.usefixtures("poisoned_results")
@pytest.mark.parametrize("variant", [*VARIANTS, *OTHERS], ids=repr)
def test_every_variant(device: torch.device, variant: Variant) -> None:
    variant = variant.fitted()
    kernel = load_product(torch.bfloat16, variant.kernel, False, device)
    for rows in (33, variant.rows * variant.row_blocks):
        x, weight = make_case(rows, 1048, 448, torch.bfloat16, device)
        check(launch_product(kernel, x, weight, variant, gated=False, pdl=False), x, weight)


def test_writes_all_of_the_result_and_nothing_else(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = make_case(129, 1048, 448, torch.bfloat16, device)
    variant = choose_variant(129, 1048, 448)
    size = variant.splits * 129 * 1048
    whole = torch.full((size + 100_000,), torch.nan, device=device)
    monkeypatch.setattr(torch, "empty", lambda *shape, **_: whole[:size].view(shape))
    check(split_product(x, weight), x, weight)
    assert whole[size:].isnan().all()


@pytest.mark.parametrize("rows", [33, 65, 256])
def test_repeats_itself_exactly(device: torch.device, rows: int) -> None:
    """Whatever copies and products overlap: sums have one order."""
    x, weight = make_case(rows, 2048, 8192, torch.bfloat16, device)
    first = split_product(x, weight)
    check(first, x, weight)
    for _ in range(50):
        again = split_product(x, weight)
        assert again is not None and first is not None and torch.equal(first, again)


@pytest.mark.parametrize("rows", [33, 65, 192, 256])
def test_a_graph_of_overlapping_kernels_replays_it_on_new_values(device: torch.device, rows: int) -> None:
    """The kernels before write x, and the one behind reads the parts, all launched early."""
    hidden, intermediate = 1024, 2048
    norm = torch.ones(hidden, device=device)
    residual = torch.randn(rows, hidden, device=device).bfloat16()
    gate_up = torch.randn(2 * intermediate, hidden, device=device).mul_(hidden**-0.5).bfloat16()
    down = torch.randn(hidden, intermediate, device=device).mul_(intermediate**-0.5).bfloat16()

    def run(pdl: bool) -> Tensor:
        hidden_rows, normed = finish_rows(residual.float().unsqueeze(0), residual, norm, 1e-5)
        for _ in range(8):
            activated = gated_product(normed, gate_up, pdl)
            assert activated is not None
            parts = split_product(activated, down, pdl)
            assert parts is not None
            hidden_rows, normed = finish_rows(parts, hidden_rows, norm, 1e-5, pdl=pdl)
        return normed

    run(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(True)
    for _ in range(20):
        residual.normal_()
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, run(False))
