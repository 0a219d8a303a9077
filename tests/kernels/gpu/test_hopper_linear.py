"""The Hopper kernel of gate and up on a GPU, with NaN around everything that it reads and writes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.hopper_linear import make_mlp
from tiny_vllm.kernels.gated_activation import gated_activation_ref
from tiny_vllm.kernels.hopper_linear import launch
from tiny_vllm.kernels.hopper_linear.launch import MIN_ROWS, compile_gated, multiply_gated, obstacle
from tiny_vllm.kernels.hopper_prefill.launch import is_hopper

pytestmark = pytest.mark.gpu

TYPES = [torch.bfloat16, torch.float16]
# Of a value: it is rounded once.
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
# M, K, N
SHAPES = {
    "llama_1b": (2048, 2048, 8192),
    "llama_8b": (1000, 4096, 14336),
    "one_row": (1, 2048, 8192),
    "less_than_a_tile": (77, 576, 1536),
    "odd_row_tiles": (2049, 2048, 8192),
    # 32 tiles are left for the 66 clusters of 132 multiprocessors.
    "a_split_tail": (4300, 576, 8192),
    "around_a_tile": (127, 2048, 8192),
    "columns_of_no_tile": (300, 64, 1000),
    "few_columns": (129, 960, 8),
}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Both kernels at once, into the cache on disk."""
    if not (torch.cuda.is_available() and is_hopper(torch.device("cuda", 0))):
        pytest.skip("needs a Hopper GPU")
    with ThreadPoolExecutor(len(TYPES)) as pool:
        list(pool.map(compile_gated, TYPES))


def surrounded(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random values in a larger tensor of NaN."""
    whole = torch.full((rows + 2, columns + 16), torch.nan, dtype=dtype, device=device)
    inner = whole[1:-1, 8:-8]
    return inner.copy_(torch.randn(rows, columns, device=device))


def make_case(shape: str, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, and the answer of FP32."""
    rows, terms, columns = SHAPES[shape]
    x = surrounded(rows, terms, dtype, device)
    weight = surrounded(2 * columns, terms, dtype, device).mul_(2 * terms**-0.5)
    return x, weight, gated_activation_ref(F.linear(x.float(), weight.float()), "silu")


def check(actual: Tensor | None, x: Tensor, expected: Tensor) -> None:
    assert actual is not None, "the kernel does not compile"
    assert actual.dtype == x.dtype
    # Tensor cores cut sums off after each 16 terms, which costs 2^-24 of them. Gate and up are some 2 each,
    # and 16 at most.
    terms = x.shape[1]
    rtol, atol = ROUNDING[x.dtype] + 2 * terms / 16 * 2**-24, terms / 16 * 2**-24 * 2 * 16
    torch.testing.assert_close(actual.float(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_is_the_operators_in_fp32_rounded_once(device: torch.device, shape: str, dtype: torch.dtype) -> None:
    x, weight, expected = make_case(shape, dtype, device)
    assert obstacle(x, weight) is None
    actual = multiply_gated(x, weight)
    check(actual, x, expected)
    assert actual is not None
    separate = gated_activation_ref(F.linear(x, weight), "silu")
    assert float((actual.float() - expected).norm()) < float((separate.float() - expected).norm())


def test_repeats_itself_exactly(device: torch.device) -> None:
    """Whatever copies and products overlap: sums have one order."""
    x, weight, expected = make_case("odd_row_tiles", torch.bfloat16, device)
    first = multiply_gated(x, weight)
    check(first, x, expected)
    for _ in range(50):
        again = multiply_gated(x, weight)
        assert again is not None and first is not None and torch.equal(first, again)


def test_writes_all_of_the_result_and_nothing_else(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, expected = make_case("odd_row_tiles", torch.bfloat16, device)
    rows, columns = expected.shape
    whole = torch.full((rows + 300, columns), torch.nan, dtype=x.dtype, device=device)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: whole[:rows])
    check(multiply_gated(x, weight), x, expected)
    assert whole[rows:].isnan().all()


def test_a_graph_replays_it_on_new_values(device: torch.device) -> None:
    x, weight, expected = make_case("less_than_a_tile", torch.bfloat16, device)
    multiply_gated(x, weight)
    kept = x.clone()
    x.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = multiply_gated(x, weight)
    x.copy_(kept)
    graph.replay()
    check(y, x, expected)


def test_an_mlp_takes_it_for_many_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[Tensor | None] = []

    def record(x: Tensor, weight: Tensor) -> Tensor | None:
        results.append(multiply_gated(x, weight))
        return results[-1]

    monkeypatch.setattr(launch, "multiply_gated", record)
    x = torch.randn(MIN_ROWS, 576, device=device).bfloat16()
    weight = torch.randn(2 * 1536, 576, device=device).mul_(576**-0.5).bfloat16()
    mlp = make_mlp(weight)
    actual = mlp(x, torch.zeros_like(x))
    # The last product is by an identity: the first columns come through.
    check(actual, x, gated_activation_ref(F.linear(x.float(), weight.float()), "silu")[:, :576])
    assert len(results) == 1 and results[0] is not None
    mlp(x[1:], torch.zeros_like(x[1:]))
    assert len(results) == 1
