"""The Hopper kernel of prefill attention on a GPU, with NaN wherever no sequence owns a cell."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.gpu.test_attention import Pages
from tiny_vllm.kernels import prefill_attention
from tiny_vllm.kernels.cuda.nvrtc import compile_cubin
from tiny_vllm.kernels.hopper_prefill import launch
from tiny_vllm.kernels.hopper_prefill.launch import (
    SMALL_VARIANTS,
    VARIANTS,
    Shape,
    Variant,
    attend,
    is_hopper,
    obstacle,
)

pytestmark = pytest.mark.gpu

# Of the largest value: weights and the result are rounded once each.
TOLERANCES = {torch.bfloat16: 2**-7, torch.float16: 2**-10}
RAGGED = [(512, 512), (1, 900), (300, 2000), (64, 64), (2048, 2048), (7, 7), (129, 257), (65, 4100)]
SHORT = [(index % 9 + 1, index + 10) for index in range(100)]
TINY = [(index % 3 + 1, index % 7 + 3) for index in range(1100)]
# Kernels: (num_heads, num_kv_heads, head_dim, page_size, dtype, options)
KERNELS: dict[str, tuple[int, int, int, int, torch.dtype, dict[str, Any]]] = {
    "llama_1b": (32, 8, 64, 16, torch.bfloat16, {}),
    "llama_8b": (32, 8, 128, 16, torch.bfloat16, {}),
    "group_1_pages_of_32": (8, 8, 128, 32, torch.bfloat16, {}),
    "group_2_pages_of_64_half": (4, 2, 64, 64, torch.float16, {}),
    "group_8_half": (16, 2, 128, 64, torch.float16, {}),
    "group_7": (14, 2, 64, 16, torch.bfloat16, {}),
    "window_and_sinks": (64, 8, 64, 16, torch.bfloat16, dict(window=128, sinks=True)),
    "window": (8, 2, 128, 16, torch.bfloat16, dict(window=300)),
}
CHUNKS = {
    "ragged": RAGGED,
    "many_short": SHORT,
    "one": [(1, 1)],
    "around_tiles": [(length, length) for length in (15, 16, 17, 127, 128, 129, 191, 192, 193, 255, 256)],
    "prefix_hits": [(length, 1024 + length) for length in (1, 31, 32, 33, 100, 128)],
}
OTHER_VARIANTS = {
    "llama_1b": [SMALL_VARIANTS[64], Variant(warpgroups=3, stages=2)],
    "group_2_pages_of_64_half": [SMALL_VARIANTS[64]],
    "window_and_sinks": [SMALL_VARIANTS[64]],
}


def shape_of(kernel: str) -> Shape:
    num_heads, num_kv_heads, head_dim, page_size, dtype, options = KERNELS[kernel]
    sizes = head_dim, num_heads // num_kv_heads, num_kv_heads, page_size
    integer = torch.int64
    return Shape(*sizes, dtype, "window" in options, "sinks" in options, integer, integer, integer)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All kernels at once, into the cache on disk."""
    if not (torch.cuda.is_available() and is_hopper(torch.device("cuda", 0))):
        pytest.skip("needs a Hopper GPU")
    tasks = [(shape_of(kernel), VARIANTS[KERNELS[kernel][2]]) for kernel in KERNELS]
    tasks += [(own, SMALL_VARIANTS[64]) for own, _ in tasks if own.head_dim == 64]
    tasks += [(shape_of(kernel), variant) for kernel, own in OTHER_VARIANTS.items() for variant in own]

    def compile_one(task: tuple[Shape, Variant]) -> None:
        compile_cubin(launch.source(), name="prefill", defines=launch.macros(*task))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(compile_one, tasks))


class Case:
    """Random queries, keys and values of a kernel's shape, and the answer."""

    def __init__(
        self,
        kernel: str,
        chunks: list[tuple[int, int]],
        device: torch.device,
        make_pages: type[Pages] = Pages,
    ) -> None:
        num_heads, num_kv_heads, head_dim, page_size, self.dtype, options = KERNELS[kernel]
        self.options = dict(options)
        if "sinks" in options:
            self.options["sinks"] = 3 * torch.randn(num_heads, device=device)
        lens = [context for _, context in chunks]
        self.pages = make_pages(lens, num_kv_heads, head_dim, page_size, self.dtype, device)
        starts = [0]
        for chunk, _ in chunks:
            starts.append(starts[-1] + chunk)
        self.q = (2 * torch.randn(starts[-1], num_heads, head_dim, device=device)).to(self.dtype)
        tables = self.pages.table, torch.tensor(starts, device=device), self.pages.lens
        self.arguments: tuple[Any, ...] = (
            self.q,
            self.pages.k_cache,
            self.pages.v_cache,
            *tables,
            head_dim**-0.5,
        )
        self.expected = torch.cat(
            [
                self.pages.attend(index, self.q[starts[index] : starts[index + 1]], **self.options)
                for index in range(len(chunks))
            ]
        )

    def check(self, actual: Tensor | None) -> None:
        assert actual is not None, "the kernel does not compile"
        assert actual.dtype == self.dtype
        size = max(float(values.abs().max()) for values in self.pages.values)
        torch.testing.assert_close(actual.double(), self.expected, rtol=0, atol=TOLERANCES[self.dtype] * size)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_is_causal_over_the_own_context(device: torch.device, kernel: str, chunks: str) -> None:
    case = Case(kernel, CHUNKS[chunks], device)
    assert obstacle(*case.arguments[:3], case.arguments[-1], None) is None
    case.check(attend(*case.arguments, **case.options))


@pytest.mark.parametrize("kernel", OTHER_VARIANTS)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_other_variants_compute_the_same(device: torch.device, kernel: str, chunks: str) -> None:
    case = Case(kernel, CHUNKS[chunks], device)
    for variant in OTHER_VARIANTS[kernel]:
        case.check(attend(*case.arguments, **case.options, variant=variant))


@pytest.mark.parametrize("kernel", ["llama_1b", "llama_8b", "group_2_pages_of_64_half", "window"])
def test_scores_that_rise_beyond_the_exponents_of_fp32(device: torch.device, kernel: str) -> None:
    """Weights that refer to an older maximum become infinite, and are made again."""
    case = Case(kernel, [(300, 2000), (700, 700), (64, 1500)], device)
    pages = case.pages
    for index, keys in enumerate(pages.keys):
        page_size = pages.k_cache.shape[2]
        columns = torch.arange(len(keys), device=device) // page_size
        keys *= 1 + columns[:, None, None] * page_size / 256
        for column in range(-(-len(keys) // page_size)):
            part = keys[column * page_size : (column + 1) * page_size]
            pages.k_cache[pages.table[index, column], :, : len(part)] = part.transpose(0, 1)
    starts, scale = case.arguments[4].tolist(), 2.0
    expected = torch.cat(
        [
            pages.attend(index, case.q[first:last], scale=scale, **case.options)
            for index, (first, last) in enumerate(pairwise(starts))
        ]
    )
    size = max(float(values.abs().max()) for values in pages.values)
    for variants in (VARIANTS, SMALL_VARIANTS):
        if (variant := variants.get(case.q.shape[-1])) is None:
            continue
        actual = attend(*case.arguments[:-1], scale, **case.options, variant=variant)
        assert actual is not None
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=TOLERANCES[case.dtype] * size)


@pytest.mark.parametrize("kernel", ["llama_1b", "llama_8b", "window_and_sinks"])
def test_repeats_itself_exactly(device: torch.device, kernel: str) -> None:
    """Whatever copies and products overlap: sums have one order."""
    case = Case(kernel, RAGGED, device)
    first = attend(*case.arguments, **case.options)
    case.check(first)
    for _ in range(30):
        again = attend(*case.arguments, **case.options)
        assert again is not None and first is not None and torch.equal(first, again)


def test_writes_to_a_part_of_another_tensor(device: torch.device) -> None:
    case = Case("llama_8b", CHUNKS["around_tiles"], device)
    whole = torch.full((3 + len(case.q), *case.q.shape[1:]), torch.inf, dtype=case.dtype, device=device)
    attend(*case.arguments, output=whole[3:])
    case.check(whole[3:])
    assert whole[:3].isinf().all()


def test_more_than_a_thousand_sequences(device: torch.device) -> None:
    case = Case("llama_8b", TINY, device)
    case.check(attend(*case.arguments))


def test_a_graph_replays_it_on_new_values(device: torch.device) -> None:
    case = Case("llama_1b", CHUNKS["prefix_hits"], device)
    q = case.arguments[0]
    attend(*case.arguments)
    kept = q.clone()
    q.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend(*case.arguments)
    q.copy_(kept)
    graph.replay()
    case.check(output)


def test_the_engine_takes_it(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("llama_8b", CHUNKS["around_tiles"], device)
    taken: list[Tensor | None] = []
    attend_before = launch.attend

    def note(*arguments: Any, **options: Any) -> Tensor | None:
        taken.append(attend_before(*arguments, **options))
        return taken[-1]

    monkeypatch.setattr(launch, "attend", note)
    case.check(prefill_attention.attend_fast(*case.arguments))
    assert len(taken) == 1
