"""The Hopper kernel of decode attention on a GPU, with NaN wherever no sequence owns a cell."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tiny_vllm.kernels.cuda.nvrtc import compile_cubin
from tiny_vllm.kernels.hopper_decode import launch
from tiny_vllm.kernels.hopper_decode.launch import VARIANTS, Shape, Variant, attend, obstacle
from tiny_vllm.kernels.hopper_prefill.launch import is_hopper
from tiny_vllm.kernels.paged_decode_attention import attend_pages
from tiny_vllm.kernels.rope_and_attend import HeadNorms, rope_and_attend

pytestmark = pytest.mark.gpu

# Of the largest value: weights and the result are rounded once each.
TOLERANCE = 2**-7
# group, num_kv_heads, head_dim, page_size
KERNELS = {
    "llama_1b": (4, 8, 64, 16),
    "llama_8b": (4, 8, 128, 16),
    "qwen_0_6b": (2, 8, 128, 16),
    "group_1_pages_of_32": (1, 8, 128, 32),
    "group_8_pages_of_64": (8, 2, 64, 64),
    "group_8_of_128": (8, 4, 128, 64),
    "group_7_pages_of_48": (7, 2, 64, 48),
    "group_3_pages_of_128": (3, 3, 64, 128),
}
BATCHES = {
    "ragged": [100 + index * 37 % 1901 for index in range(256)],
    "around_tiles": [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 129, 255, 256, 257],
    "one_token": [1] * 512,
    "long": [4000, 1, 16000, *[30] * 14],
    "alike": [1100] * 64,
}
OTHER_VARIANTS = {
    64: [
        Variant(stages=4),
        Variant(tile=32, stages=16),
        Variant(stages=8, warps=8),
        Variant(stages=4, blocks=2),
    ],
    128: [
        Variant(tile=64, stages=6, warps=2),
        Variant(tile=32, stages=8),
        Variant(tile=32, stages=4, blocks=2),
    ],
}


def shape_of(kernel: str) -> Shape:
    group, num_kv_heads, head_dim, page_size = KERNELS[kernel]
    return Shape(head_dim, group, num_kv_heads, page_size, torch.int64, torch.int64)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All kernels at once, into the cache on disk."""
    if not (torch.cuda.is_available() and is_hopper(torch.device("cuda", 0))):
        pytest.skip("needs a Hopper GPU")
    tasks = [(shape_of(kernel), VARIANTS[KERNELS[kernel][2]]) for kernel in KERNELS]
    for kernel in ("llama_1b", "llama_8b"):
        tasks += [(shape_of(kernel), variant) for variant in OTHER_VARIANTS[KERNELS[kernel][2]]]

    def compile_one(task: tuple[Shape, Variant]) -> None:
        compile_cubin(launch.source(), name="decode", defines=launch.macros(*task))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(compile_one, tasks))


class Case:
    """Random queries, keys and values of a batch in shuffled pages, and the answer in FP32."""

    def __init__(self, kernel: str, lens: list[int], device: torch.device) -> None:
        group, num_kv_heads, head_dim, page_size = KERNELS[kernel]
        self.num_heads, self.scale = group * num_kv_heads, head_dim**-0.5
        counts = [-(-length // page_size) for length in lens]
        pages = (torch.randperm(sum(counts), device=device) + 1).split(counts)
        self.table = torch.zeros(len(lens) + 3, max(counts) + 1, dtype=torch.int64, device=device)
        self.rows = torch.randperm(len(lens) + 3, device=device)[: len(lens)]
        self.lens = torch.tensor(lens, device=device)
        shape = (2, sum(counts) + 1, num_kv_heads, page_size, head_dim)
        caches = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
        self.q = (2 * torch.randn(len(lens), self.num_heads, head_dim, device=device)).bfloat16()
        self.expected = torch.empty(self.q.shape, device=device)
        self.largest = 0.0
        for index, length in enumerate(lens):
            both = torch.randn(2, num_kv_heads, length, head_dim, device=device).bfloat16()
            self.table[self.rows[index], : counts[index]] = pages[index]
            padded = both.new_full((2, num_kv_heads, counts[index] * page_size, head_dim), torch.nan)
            padded[:, :, :length] = both
            caches[:, pages[index]] = padded.unflatten(2, (-1, page_size)).transpose(1, 2)
            keys, values = both.float()
            queries = self.q[index].float().view(num_kv_heads, group, head_dim)
            weights = (queries @ keys.mT * self.scale).softmax(-1)
            self.expected[index] = (weights @ values).flatten(0, 1)
            self.largest = max(self.largest, float(values.abs().max()))
        self.k_cache, self.v_cache = caches[0], caches[1]

    def attend(self, variant: Variant | None = None) -> Tensor:
        output = torch.full_like(self.q, torch.nan)
        actual = attend(
            self.q, self.k_cache, self.v_cache, self.table, self.lens, self.scale, table_rows=self.rows,
            output=output, variant=variant,
        )  # fmt: skip
        assert actual is output, "the kernel does not compile"
        return output

    def check(self, actual: Tensor) -> None:
        torch.testing.assert_close(actual.float(), self.expected, rtol=0, atol=TOLERANCE * self.largest)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("batch", BATCHES)
def test_attends_to_the_own_context(device: torch.device, kernel: str, batch: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    case = Case(kernel, BATCHES[batch], device)
    arguments = case.k_cache, case.v_cache, case.table, case.lens, case.rows, case.scale
    assert obstacle(case.num_heads, *arguments) is None
    case.check(case.attend())


@pytest.mark.parametrize("kernel", ["llama_1b", "llama_8b"])
def test_other_variants_compute_the_same(device: torch.device, kernel: str) -> None:
    for batch in ("ragged", "around_tiles", "long"):
        case = Case(kernel, BATCHES[batch], device)
        for variant in OTHER_VARIANTS[KERNELS[kernel][2]]:
            case.check(case.attend(variant))


@pytest.mark.parametrize("batch", ["ragged", "long", "around_tiles"])
@pytest.mark.parametrize("kernel", ["llama_1b", "llama_8b"])
def test_repeats_itself_exactly(device: torch.device, kernel: str, batch: str) -> None:
    """Whatever arrives first: sums have one order."""
    case = Case(kernel, BATCHES[batch], device)
    first = case.attend()
    case.check(first)
    for _ in range(100):
        assert torch.equal(case.attend(), first)


@pytest.mark.parametrize("kernel", ["llama_1b", "llama_8b"])
def test_a_graph_serves_all_lengths(device: torch.device, kernel: str) -> None:
    case = Case(kernel, BATCHES["ragged"], device)
    first = case.attend()
    kept = case.lens.clone()
    case.lens.fill_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = case.attend()
    for _ in range(3):
        case.lens.copy_(kept)
        graph.replay()
        assert torch.equal(output, first)
        case.lens.fill_(1)
        graph.replay()
        assert not torch.equal(output, first)


def test_the_engine_takes_it_for_given_queries(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("llama_1b", BATCHES["ragged"], device)
    first = case.attend()
    monkeypatch.setattr(launch, "TAKES_HOPPER_DECODE", True)
    pages = case.k_cache, case.v_cache, case.table, case.lens
    actual = attend_pages(case.q, *pages, case.scale, table_rows=case.rows)
    assert torch.equal(actual, first)
    # Triton's kernels go on where it ends.
    few = attend_pages(case.q[:9], *pages[:3], case.lens[:9], case.scale, table_rows=case.rows[:9])
    torch.testing.assert_close(few.float(), case.expected[:9], rtol=0, atol=TOLERANCE * case.largest)


@pytest.mark.parametrize("kernel", ["llama_1b", "llama_8b"])
def test_it_follows_the_rotation_in_a_chain(
    device: torch.device, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By programmatic dependent launch, layer after layer in a graph, as in a decode step: both compute what
    the kernel that rotates itself does. Rows of padding write to the null page."""
    case = Case(kernel, BATCHES["ragged"], device)
    group, num_kv_heads, head_dim, page_size = KERNELS[kernel]
    count = len(case.lens)
    case.lens[-3:], case.rows[-3:] = 1, 0
    newest = case.lens - 1
    cells = case.table[case.rows, newest // page_size] * page_size + newest % page_size
    cells[-3:] = 0
    angles = torch.arange(2001, device=device)[:, None] * torch.rand(head_dim // 2, device=device)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    norms = HeadNorms(*(1 + 0.5 * torch.randn(2, head_dim, device=device).bfloat16()), 1e-5)
    width = (group + 2) * num_kv_heads * head_dim
    layers = [
        (torch.randn(2, count, width, device=device), case.k_cache.clone(), case.v_cache.clone())
        for _ in range(3)
    ]

    def run() -> list[Tensor]:
        return [
            rope_and_attend(
                parts, None, cos_sin, cells, k_cache, v_cache, case.table, case.lens, case.num_heads,
                case.scale, table_rows=case.rows, head_norms=norms, pdl=True,
            )
            for parts, k_cache, v_cache in layers
        ]  # fmt: skip

    expected = run()
    caches = [cache.clone() for layer in layers for cache in layer[1:]]
    monkeypatch.setattr(launch, "TAKES_HOPPER_DECODE", True)

    def forget() -> None:
        for _, k_cache, v_cache in layers:
            for cache in (k_cache, v_cache):
                cache[cells // page_size, :, cells % page_size] = torch.nan

    forget()
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = run()
    for _ in range(20):
        forget()
        graph.replay()
        for own, wanted in zip(actual, expected, strict=True):
            atol = 2 * TOLERANCE * float(wanted[:-3].float().abs().max())
            torch.testing.assert_close(own[:-3].float(), wanted[:-3].float(), rtol=0, atol=atol)
    for cache, wanted in zip((cache for layer in layers for cache in layer[1:]), caches, strict=True):
        torch.testing.assert_close(cache[1:], wanted[1:], rtol=2**-7, atol=2**-7, equal_nan=True)
