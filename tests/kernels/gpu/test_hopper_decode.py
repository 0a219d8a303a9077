"""The Hopper kernel of decode attention on a GPU, with NaN wherever no sequence owns a cell."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tiny_vllm.kernels.cuda.nvrtc import compile_cubin
from tiny_vllm.kernels.fp8_cache import Cache, Fp8Cache, dequantise_rows, quantise_rows
from tiny_vllm.kernels.hopper_decode import launch
from tiny_vllm.kernels.hopper_decode.launch import Shape, Variant, attend, obstacle
from tiny_vllm.kernels.hopper_prefill.launch import is_hopper
from tiny_vllm.kernels.paged_decode_attention import attend_pages
from tiny_vllm.kernels.rope_and_attend import HeadNorms, rope_and_attend

pytestmark = pytest.mark.gpu

# Of the largest value: weights and the result are rounded once each.
TOLERANCE = 2**-7
# With FP8: of the result, which is rounded to 8 bits, and of what it sums, without signs: products round
# weights to 11 bits, and nothing else.
RESULT_TOLERANCE, SUM_TOLERANCE = 2**-8, 2**-10
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
# By head size, and whether caches are in FP8.
OTHER_VARIANTS = {
    (64, False): [
        Variant(stages=4),
        Variant(tile=32, stages=16),
        Variant(stages=8, warps=8),
        Variant(stages=4, blocks=2),
    ],
    (128, False): [
        Variant(tile=64, stages=6, warps=2),
        Variant(tile=32, stages=8),
        Variant(tile=32, stages=4, blocks=2),
    ],
    (64, True): [
        Variant(stages=4),
        Variant(tile=32, stages=16, blocks=2),
        Variant(tile=128, stages=8, warps=8),
    ],
    (128, True): [
        Variant(tile=64, stages=8, warps=2),
        Variant(tile=64, stages=12),
        Variant(tile=32, stages=8, blocks=2),
    ],
}
in_both_types = pytest.mark.parametrize("is_fp8", [False, True], ids=["bf16", "fp8"])


def shape_of(kernel: str, is_fp8: bool) -> Shape:
    group, num_kv_heads, head_dim, page_size = KERNELS[kernel]
    return Shape(head_dim, group, num_kv_heads, page_size, torch.int64, torch.int64, is_fp8)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All kernels at once, into the cache on disk."""
    if not (torch.cuda.is_available() and is_hopper(torch.device("cuda", 0))):
        pytest.skip("needs a Hopper GPU")
    shapes = {(kernel, is_fp8): shape_of(kernel, is_fp8) for kernel in KERNELS for is_fp8 in (False, True)}
    tasks = [(shape, shape.variant) for shape in shapes.values()]
    for kernel in ("llama_1b", "llama_8b"):
        for is_fp8 in (False, True):
            variants = OTHER_VARIANTS[KERNELS[kernel][2], is_fp8]
            tasks += [(shapes[kernel, is_fp8], variant) for variant in variants]

    def compile_one(task: tuple[Shape, Variant]) -> None:
        compile_cubin(launch.source(), name="decode", defines=launch.macros(*task))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(compile_one, tasks))


def forget_cells(cache: Cache, where: tuple[Tensor, slice, Tensor]) -> None:
    """NaN in these cells."""
    if isinstance(cache, Fp8Cache):
        cache.codes.view(torch.uint8)[where] = 0x7F
        cache.scales[where] = torch.nan
    else:
        cache[where] = torch.nan


def copy_of(cache: Cache) -> Cache:
    if isinstance(cache, Fp8Cache):
        return Fp8Cache(cache.codes.clone(), cache.scales.clone(), cache.dtype)
    return cache.clone()


def values_of(cache: Cache) -> Tensor:
    if isinstance(cache, Fp8Cache):
        return dequantise_rows(cache.codes, cache.scales, torch.float32)
    return cache.float()


class Case:
    """Random queries, keys and values of a batch in shuffled pages, and the answer in FP32. spread: queries
    are up to 2^spread times as large as usual, or as small, and a sequence's keys the inverse."""

    def __init__(
        self, kernel: str, lens: list[int], device: torch.device, is_fp8: bool, spread: int = 0
    ) -> None:
        group, num_kv_heads, head_dim, page_size = KERNELS[kernel]
        self.num_heads, self.scale = group * num_kv_heads, head_dim**-0.5
        counts = [-(-length // page_size) for length in lens]
        pages = (torch.randperm(sum(counts), device=device) + 1).split(counts)
        self.table = torch.zeros(len(lens) + 3, max(counts) + 1, dtype=torch.int64, device=device)
        self.rows = torch.randperm(len(lens) + 3, device=device)[: len(lens)]
        self.lens = torch.tensor(lens, device=device)
        shape = (2, sum(counts) + 1, num_kv_heads, page_size, head_dim)
        caches = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
        sizes = torch.exp2(torch.randint(-spread, spread + 1, (len(lens), 1, 1), device=device))
        self.q = (2 * sizes * torch.randn(len(lens), self.num_heads, head_dim, device=device)).bfloat16()
        self.expected = torch.empty(self.q.shape, device=device)
        summed, largest = torch.empty_like(self.expected), 0.0
        for index, length in enumerate(lens):
            both = torch.randn(2, num_kv_heads, length, head_dim, device=device)
            both[0] /= sizes[index]
            both = both.bfloat16()
            self.table[self.rows[index], : counts[index]] = pages[index]
            padded = both.new_full((2, num_kv_heads, counts[index] * page_size, head_dim), torch.nan)
            padded[:, :, :length] = both
            caches[:, pages[index]] = padded.unflatten(2, (-1, page_size)).transpose(1, 2)
            stored = dequantise_rows(*quantise_rows(both), torch.float32) if is_fp8 else both.float()
            keys, values = stored
            queries = self.q[index].float().view(num_kv_heads, group, head_dim)
            weights = (queries @ keys.mT * self.scale).softmax(-1)
            self.expected[index] = (weights @ values).flatten(0, 1)
            summed[index] = (weights @ values.abs()).flatten(0, 1)
            largest = max(largest, float(values.abs().max()))
        self.allowed = torch.full_like(summed, TOLERANCE * largest)
        if is_fp8:
            allowed = RESULT_TOLERANCE * self.expected.abs() + SUM_TOLERANCE * summed
            # A value whose code is zero allows nothing.
            self.allowed = allowed.clamp_min(torch.finfo(torch.float32).tiny)
        self.k_cache, self.v_cache = (
            Fp8Cache(*quantise_rows(cache), torch.bfloat16) if is_fp8 else cache for cache in caches
        )

    def attend(self, variant: Variant | None = None) -> Tensor:
        output = torch.full_like(self.q, torch.nan)
        actual = attend(
            self.q, self.k_cache, self.v_cache, self.table, self.lens, self.scale, table_rows=self.rows,
            output=output, variant=variant,
        )  # fmt: skip
        assert actual is output, "the kernel does not compile"
        return output

    def check(self, actual: Tensor) -> None:
        apart = (actual.float() - self.expected) / self.allowed
        torch.testing.assert_close(apart, torch.zeros_like(apart), rtol=0, atol=1)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("batch", BATCHES)
@in_both_types
def test_attends_to_the_own_context(device: torch.device, kernel: str, batch: str, is_fp8: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    case = Case(kernel, BATCHES[batch], device, is_fp8)
    arguments = case.k_cache, case.v_cache, case.table, case.lens, case.rows, case.scale
    assert obstacle(case.num_heads, *arguments) is None
    case.check(case.attend())


@pytest.mark.parametrize("kernel", ["llama_1b", "llama_8b"])
def test_fp8_takes_queries_of_any_size(device: torch.device, kernel: str) -> None:
    """Products are of FP16, which ends at 2^16."""
    torch.backends.cuda.matmul.allow_tf32 = False
    case = Case(kernel, BATCHES["ragged"], device, is_fp8=True, spread=40)
    assert float(case.q.abs().max()) > 2**30
    case.check(case.attend())


@pytest.mark.parametrize("kernel", ["llama_1b", "llama_8b"])
@in_both_types
def test_other_variants_compute_the_same(device: torch.device, kernel: str, is_fp8: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for batch in ("ragged", "around_tiles", "long"):
        case = Case(kernel, BATCHES[batch], device, is_fp8)
        for variant in OTHER_VARIANTS[KERNELS[kernel][2], is_fp8]:
            case.check(case.attend(variant))


@pytest.mark.parametrize("batch", ["ragged", "long", "around_tiles"])
@pytest.mark.parametrize("kernel", ["llama_1b", "llama_8b"])
@in_both_types
def test_repeats_itself_exactly(device: torch.device, kernel: str, batch: str, is_fp8: bool) -> None:
    """Whatever arrives first: sums have one order."""
    torch.backends.cuda.matmul.allow_tf32 = False
    case = Case(kernel, BATCHES[batch], device, is_fp8)
    first = case.attend()
    case.check(first)
    for _ in range(100):
        assert torch.equal(case.attend(), first)


@pytest.mark.parametrize("kernel", ["llama_1b", "llama_8b"])
@in_both_types
def test_a_graph_serves_all_lengths(device: torch.device, kernel: str, is_fp8: bool) -> None:
    case = Case(kernel, BATCHES["ragged"], device, is_fp8)
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


@in_both_types
def test_the_engine_takes_it_for_given_queries(
    device: torch.device, is_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    case = Case("llama_1b", BATCHES["ragged"], device, is_fp8)
    first = case.attend()
    monkeypatch.setattr(launch, "TAKES_HOPPER_DECODE", True)
    pages = case.k_cache, case.v_cache, case.table, case.lens
    actual = attend_pages(case.q, *pages, case.scale, table_rows=case.rows)
    assert torch.equal(actual, first)
    # Triton's kernels go on where it ends.
    few = attend_pages(case.q[:9], *pages[:3], case.lens[:9], case.scale, table_rows=case.rows[:9])
    # They round keys, values and weights of FP8 to BF16.
    atol = TOLERANCE * float(values_of(case.v_cache).nan_to_num().abs().max())
    torch.testing.assert_close(few.float(), case.expected[:9], rtol=0, atol=atol)


@pytest.mark.parametrize("kernel", ["llama_1b", "llama_8b"])
@in_both_types
def test_it_follows_the_rotation_in_a_chain(
    device: torch.device, kernel: str, is_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it makes no queries: by programmatic dependent launch, layer after layer in a graph, as in a
    decode step. Both compute what the kernel that rotates itself does. Rows of padding write to the null
    page."""
    case = Case(kernel, BATCHES["ragged"], device, is_fp8)
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
    workspace = launch.workspace_of(case.k_cache)
    monkeypatch.setattr(launch, "TAKES_PARTS", False)
    layers = [
        (torch.randn(2, count, width, device=device), copy_of(case.k_cache), copy_of(case.v_cache))
        for _ in range(3)
    ]

    def run() -> list[Tensor]:
        return [
            rope_and_attend(
                parts, None, cos_sin, cells, k_cache, v_cache, case.table, case.lens, case.num_heads,
                case.scale, table_rows=case.rows, head_norms=norms, workspace=workspace, pdl=True,
            )
            for parts, k_cache, v_cache in layers
        ]  # fmt: skip

    monkeypatch.setattr(launch, "TAKES_HOPPER_DECODE", False)
    expected = run()
    caches = [values_of(cache) for layer in layers for cache in layer[1:]]
    monkeypatch.setattr(launch, "TAKES_HOPPER_DECODE", True)

    def forget() -> None:
        for _, k_cache, v_cache in layers:
            for cache in (k_cache, v_cache):
                forget_cells(cache, (cells // page_size, slice(None), cells % page_size))

    forget()
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = run()
    for _ in range(20):
        forget()
        graph.replay()
        for own, wanted in zip(actual, expected, strict=True):
            # A key's number may fall on the other side of a border between two codes.
            atol = (4 if is_fp8 else 2) * TOLERANCE * float(wanted[:-3].float().abs().max())
            torch.testing.assert_close(own[:-3].float(), wanted[:-3].float(), rtol=0, atol=atol)
    rtol = 2**-3 if is_fp8 else 2**-7
    for cache, wanted in zip((cache for layer in layers for cache in layer[1:]), caches, strict=True):
        stored = values_of(cache)[1:]
        torch.testing.assert_close(stored, wanted[1:], rtol=rtol, atol=2**-7, equal_nan=True)
        others = (stored != wanted[1:]) & ~stored.isnan()
        assert int(others.sum()) < 0.01 * 3 * count * num_kv_heads * head_dim
