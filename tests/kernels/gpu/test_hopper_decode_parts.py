"""The Hopper kernel of decode attention that makes its queries of a product's parts, on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tiny_vllm.kernels.cuda.nvrtc import compile_cubin
from tiny_vllm.kernels.hopper_decode import launch
from tiny_vllm.kernels.hopper_decode.launch import QueryParts, Shape, Variant, Workspace, attend_from_parts
from tiny_vllm.kernels.hopper_prefill.launch import is_hopper
from tiny_vllm.kernels.paged_decode_attention import paged_decode_attention_ref
from tiny_vllm.kernels.rope_and_attend import rope_and_attend
from tiny_vllm.kernels.rope_from_parts import HeadNorms, rope_from_parts_ref
from tiny_vllm.kernels.tiled_linear import split_linear

pytestmark = pytest.mark.gpu

# Of the largest value: weights and the result are rounded once each.
TOLERANCE = 2**-7
# Of a written value: half a unit in the last place of BF16's 8 bits. Of the largest: arithmetic in FP32.
ROUNDING, SUMMING = 2**-8, 2**-18
# group, num_kv_heads, head_dim, page_size, has_bias, has_norms
KERNELS = {
    "llama_1b": (4, 8, 64, 16, False, False),
    "llama_8b": (4, 8, 128, 16, False, False),
    "qwen_0_6b": (2, 8, 128, 16, False, True),
    "qwen_bias": (7, 2, 64, 32, True, False),
    "all_of_64": (8, 2, 64, 64, True, True),
    "all_of_128": (8, 4, 128, 48, True, True),
    "group_1": (1, 8, 128, 128, False, False),
}
BATCHES = {
    "ragged": [100 + index * 37 % 1901 for index in range(256)],
    "around_tiles": [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 129, 255, 256, 257],
    "one_token": [1] * 512,
    "long": [4000, 1, 16000, *[30] * 14],
    "padded": [500 + index for index in range(100)] + [1] * 156,
}


def shape_of(kernel: str) -> Shape:
    group, num_kv_heads, head_dim, page_size, has_bias, has_norms = KERNELS[kernel]
    return Shape(
        head_dim, group, num_kv_heads, page_size, torch.int64, torch.int64, False, True, has_bias, has_norms
    )


def other_variants(kernel: str) -> list[Variant]:
    own = shape_of(kernel).variant
    warps = [replace(own, query_warps=count) for count in (1, 2) if count != own.query_warps]
    return [*warps, replace(own, stages=4, blocks=1, query_warps=4, extra=16)]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All kernels at once, into the cache on disk."""
    if not (torch.cuda.is_available() and is_hopper(torch.device("cuda", 0))):
        pytest.skip("needs a Hopper GPU")
    tasks = [(shape_of(kernel), shape_of(kernel).variant) for kernel in KERNELS]
    for kernel in ("llama_1b", "llama_8b"):
        tasks += [(shape_of(kernel), variant) for variant in other_variants(kernel)]

    def compile_one(task: tuple[Shape, Variant]) -> None:
        compile_cubin(launch.source(), name="decode", defines=launch.macros(*task))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(compile_one, tasks))


class Case:
    """A batch in shuffled pages, and parts. NaN in the newest tokens' cells and where no sequence has any."""

    def __init__(self, kernel: str, lens: list[int], device: torch.device, splits: int = 2) -> None:
        group, num_kv_heads, head_dim, page_size, has_bias, has_norms = KERNELS[kernel]
        self.num_heads, self.scale, count = group * num_kv_heads, head_dim**-0.5, len(lens)
        counts = [-(-length // page_size) for length in lens]
        pages = (torch.randperm(sum(counts), device=device) + 1).split(counts)
        self.table = torch.zeros(count + 3, max(counts) + 1, dtype=torch.int64, device=device)
        self.rows = torch.randperm(count + 3, device=device)[:count]
        self.lens = torch.tensor(lens, device=device)
        shape = (2, sum(counts) + 1, num_kv_heads, page_size, head_dim)
        caches = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
        for index, length in enumerate(lens):
            self.table[self.rows[index], : counts[index]] = pages[index]
            places = torch.arange(length - 1, device=device)
            values = torch.randn(2, length - 1, num_kv_heads, head_dim, device=device).bfloat16()
            caches[:, pages[index][places // page_size], :, places % page_size] = values.transpose(0, 1)
        self.k_cache, self.v_cache = caches
        newest = self.lens - 1
        cells = self.table[self.rows, newest // page_size] * page_size + newest % page_size
        self.where = cells // page_size, slice(None), cells % page_size
        angles = torch.arange(max(lens), device=device)[:, None] * torch.rand(head_dim // 2, device=device)
        width = (group + 2) * num_kv_heads * head_dim
        self.made = QueryParts(
            torch.randn(splits, count, width, device=device),
            torch.randn(width, device=device).bfloat16() if has_bias else None,
            torch.cat((angles.cos(), angles.sin()), -1),
            cells,
            HeadNorms(*(1 + 0.5 * torch.randn(2, head_dim, device=device)), 1e-5) if has_norms else None,
        )

    def attend(
        self, variant: Variant | None = None, workspace: Workspace | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, and the caches that it writes."""
        caches = self.k_cache.clone(), self.v_cache.clone()
        attended = attend_from_parts(
            self.made, *caches, self.table, self.lens, self.num_heads, self.scale, table_rows=self.rows,
            variant=variant, workspace=workspace,
        )  # fmt: skip
        assert attended is not None, "the kernel does not compile"
        return attended, *caches

    def check(self, actual: tuple[Tensor, Tensor, Tensor]) -> None:
        caches = self.k_cache.float(), self.v_cache.float()
        made = self.made
        q = rope_from_parts_ref(
            made.parts, made.bias, made.cos_sin, self.lens, made.cells, *caches, self.num_heads,
            head_norms=made.head_norms,
        )  # fmt: skip
        for written, wanted, before in zip(actual[1:], caches, (self.k_cache, self.v_cache), strict=True):
            atol = SUMMING * float(wanted[self.where].abs().max())
            torch.testing.assert_close(
                written[self.where].float(), wanted[self.where], rtol=ROUNDING, atol=atol
            )
            others = written.clone()
            others[self.where] = before[self.where]
            assert torch.equal(others.view(torch.int16), before.view(torch.int16)), (
                "a foreign cell is written"
            )
        # Sequence by sequence: gathered contexts of all would be large.
        rounded = [tensor.bfloat16().float() for tensor in caches]
        atol = TOLERANCE * float(rounded[1].nan_to_num().abs().max())
        for index in range(0, len(self.lens), 32):
            part = slice(index, index + 32)
            lens = self.lens[part]
            pages = -(-int(lens.max()) // self.k_cache.shape[2])
            rows = self.table[self.rows[part], :pages]
            expected = paged_decode_attention_ref(
                q[part].bfloat16().float(), *rounded, rows, lens, self.scale
            )
            torch.testing.assert_close(actual[0][part].float(), expected, rtol=0, atol=atol)


def same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    """To the bit, NaN included."""
    return all(
        torch.equal(own.view(torch.int16), wanted.view(torch.int16))
        for own, wanted in zip(actual, expected, strict=True)
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("batch", BATCHES)
def test_makes_queries_keys_and_values(device: torch.device, kernel: str, batch: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    case = Case(kernel, BATCHES[batch], device)
    case.check(case.attend())


@pytest.mark.parametrize("splits", [1, 3, 4, 5])
@pytest.mark.parametrize("kernel", ["llama_1b", "all_of_128"])
def test_any_number_of_parts(device: torch.device, kernel: str, splits: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    case = Case(kernel, BATCHES["around_tiles"], device, splits)
    case.check(case.attend())


@pytest.mark.parametrize("kernel", ["llama_1b", "llama_8b"])
def test_other_variants_compute_the_same(device: torch.device, kernel: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for batch in ("ragged", "around_tiles", "long"):
        case = Case(kernel, BATCHES[batch], device)
        for variant in other_variants(kernel):
            case.check(case.attend(variant))


@pytest.mark.parametrize("batch", ["ragged", "long", "padded"])
@pytest.mark.parametrize("kernel", ["llama_1b", "llama_8b", "qwen_0_6b"])
def test_repeats_itself_exactly_and_lowers_its_flags(device: torch.device, kernel: str, batch: str) -> None:
    """With one workspace for all launches."""
    case = Case(kernel, BATCHES[batch], device)
    first = case.attend()
    workspace = launch.workspace_of(case.k_cache)
    assert workspace is not None
    for _ in range(100):
        assert same(case.attend(workspace=workspace), first)
        assert not workspace.flags.any()


@pytest.mark.parametrize("kernel", ["llama_1b", "llama_8b", "qwen_0_6b"])
def test_layers_of_a_graph_overlap_and_change_nothing(device: torch.device, kernel: str) -> None:
    """Attention and the product that makes the next layer's parts of it, by programmatic dependent launch, in
    graphs of two numbers of rows that share a workspace, one after another: to the bit what the same kernels
    compute one at a time."""
    group, num_kv_heads, head_dim, _, _, _ = KERNELS[kernel]
    width = (group + 2) * num_kv_heads * head_dim
    weight = torch.randn(width, group * num_kv_heads * head_dim, device=device).bfloat16() * 0.1
    cases = [Case(kernel, BATCHES["ragged"], device), Case(kernel, BATCHES["around_tiles"], device)]
    workspace = launch.workspace_of(cases[0].k_cache)
    assert workspace is not None
    layers = [[(case.k_cache.clone(), case.v_cache.clone()) for _ in range(4)] for case in cases]

    def run(index: int, pdl: bool) -> list[Tensor]:
        case, outputs, parts = cases[index], [], cases[index].made.parts
        for k_cache, v_cache in layers[index]:
            outputs.append(
                rope_and_attend(
                    parts, case.made.bias, case.made.cos_sin, case.made.cells, k_cache, v_cache, case.table,
                    case.lens, case.num_heads, case.scale, table_rows=case.rows,
                    head_norms=case.made.head_norms, workspace=workspace if pdl else None, pdl=pdl,
                )
            )  # fmt: skip
            parts = split_linear(outputs[-1].flatten(1), weight, pdl)
        return outputs

    def state(index: int, outputs: list[Tensor]) -> tuple[Tensor, ...]:
        caches = [cache[cases[index].where] for caches in layers[index] for cache in caches]
        return *(output.clone() for output in outputs), *caches

    def forget(index: int) -> None:
        for cache in (cache for caches in layers[index] for cache in caches):
            cache[cases[index].where] = torch.nan

    expected, graphs, outputs = [], [], []
    for index in range(2):
        expected.append(state(index, run(index, pdl=False)))
        assert all(tensor.isfinite().all() for tensor in expected[-1])
        run(index, pdl=True)
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outputs.append(run(index, pdl=True))
    for replay in range(100):
        for index in (0, 1):
            forget(index)
        for index in (0, 1, 0) if replay % 2 else (1, 0, 1):
            graphs[index].replay()
        for index in (0, 1):
            assert same(state(index, outputs[index]), expected[index])
    assert not workspace.flags.any()


@pytest.mark.parametrize("kernel", ["llama_1b", "llama_8b", "all_of_64"])
def test_rows_of_padding_are_zero_and_write_nothing(device: torch.device, kernel: str) -> None:
    """To the bit what the other rows are without them, though their parts are NaN."""
    case = Case(kernel, BATCHES["around_tiles"], device)
    first, made, count = case.attend(), case.made, len(case.lens)
    page_size = case.k_cache.shape[2]
    nothing = torch.full((2, 236, made.parts.shape[2]), torch.nan, device=device)
    null = torch.arange(236, device=device) % page_size
    case.made = replace(made, parts=torch.cat((made.parts, nothing), 1), cells=torch.cat((made.cells, null)))
    case.lens = torch.cat((case.lens, torch.ones_like(null)))
    # Rows of the table that sequences have: nothing may be read there for padding.
    case.rows = torch.cat((case.rows, case.rows[null % count]))
    attended, *caches = case.attend()
    assert same((attended[:count], *caches), first)
    assert (attended[count:].view(torch.int16) == 0).all()


def test_the_engine_takes_what_it_can_make(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair of kernels for the rest, which agrees."""
    case = Case("llama_1b", BATCHES["ragged"], device)
    expected = case.attend()
    asked: list[QueryParts] = []

    def spy(made: QueryParts, *arguments: object, **options: object) -> Tensor | None:
        asked.append(made)
        return attend_from_parts(made, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(launch, "attend_from_parts", spy)

    def run(parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made, caches = case.made, (case.k_cache.clone(), case.v_cache.clone())
        attended = rope_and_attend(
            parts, made.bias, made.cos_sin, made.cells, *caches, case.table, case.lens, case.num_heads,
            case.scale, table_rows=case.rows, head_norms=made.head_norms,
        )  # fmt: skip
        return attended, *caches

    assert same(run(case.made.parts), expected) and len(asked) == 1
    rounded = replace(case.made, parts=case.made.parts[:1].bfloat16().float())
    case.made = rounded
    expected = case.attend()
    actual = run(rounded.parts.bfloat16())
    assert len(asked) == 1
    atol = 2 * TOLERANCE * float(expected[0].float().abs().max())
    torch.testing.assert_close(actual[0].float(), expected[0].float(), rtol=0, atol=atol)
