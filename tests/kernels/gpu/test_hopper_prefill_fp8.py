"""The Hopper kernel of prefill attention over FP8 caches on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.gpu.test_fp8_attention import Fp8Pages
from tests.kernels.gpu.test_hopper_prefill import CHUNKS, KERNELS, OTHER_VARIANTS, RAGGED, Case, shape_of
from tiny_vllm.kernels.cuda.nvrtc import compile_cubin
from tiny_vllm.kernels.fp8_cache import dequantise_rows
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


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All kernels at once, into the cache on disk."""
    if not (torch.cuda.is_available() and is_hopper(torch.device("cuda", 0))):
        pytest.skip("needs a Hopper GPU")
    shapes = {kernel: replace(shape_of(kernel), is_fp8=True) for kernel in KERNELS}
    tasks = [(own, VARIANTS[own.head_dim]) for own in shapes.values()]
    tasks += [(own, SMALL_VARIANTS[64]) for own in shapes.values() if own.head_dim == 64]
    tasks += [(shapes[kernel], variant) for kernel, own in OTHER_VARIANTS.items() for variant in own]

    def compile_one(task: tuple[Shape, Variant]) -> None:
        compile_cubin(launch.source(), name="prefill", defines=launch.macros(*task))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(compile_one, tasks))


def make_case(kernel: str, chunks: list[tuple[int, int]], device: torch.device) -> Case:
    case = Case(kernel, chunks, device, Fp8Pages)
    assert isinstance(case.pages, Fp8Pages)
    case.arguments = case.q, case.pages.k, case.pages.v, *case.arguments[3:]
    return case


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_attends_to_what_is_stored(device: torch.device, kernel: str, chunks: str) -> None:
    case = make_case(kernel, CHUNKS[chunks], device)
    assert obstacle(*case.arguments[:3], case.arguments[-1], None) is None
    case.check(attend(*case.arguments, **case.options))


@pytest.mark.parametrize("kernel", OTHER_VARIANTS)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_other_variants_compute_the_same(device: torch.device, kernel: str, chunks: str) -> None:
    case = make_case(kernel, CHUNKS[chunks], device)
    for variant in OTHER_VARIANTS[kernel]:
        case.check(attend(*case.arguments, **case.options, variant=variant))


@pytest.mark.parametrize("kernel", ["llama_1b", "llama_8b", "group_2_pages_of_64_half", "window_and_sinks"])
def test_equals_the_kernel_of_16_bits_on_what_the_cache_stands_for(device: torch.device, kernel: str) -> None:
    """Bit for bit, also with rows of very different size and scores that the maximum lags behind."""
    case = make_case(kernel, RAGGED, device)
    pages = case.pages
    assert isinstance(pages, Fp8Pages)
    for cache in (pages.k, pages.v):
        exponents = torch.randint(-4, 5, cache.scales.shape, device=device)
        cache.scales.mul_(torch.exp2(exponents.float()))
    caches = [dequantise_rows(cache.codes, cache.scales, cache.dtype) for cache in (pages.k, pages.v)]
    actual = attend(*case.arguments, **case.options)
    expected = attend(case.q, *caches, *case.arguments[3:], **case.options)
    assert actual is not None and expected is not None
    assert actual.isfinite().all() and torch.equal(actual, expected)


@pytest.mark.parametrize("kernel", ["llama_1b", "llama_8b", "window_and_sinks"])
def test_repeats_itself_exactly(device: torch.device, kernel: str) -> None:
    case = make_case(kernel, RAGGED, device)
    first = attend(*case.arguments, **case.options)
    case.check(first)
    for _ in range(30):
        again = attend(*case.arguments, **case.options)
        assert again is not None and first is not None and torch.equal(first, again)


def test_every_code_is_decoded_as_it_is_stored(device: torch.device) -> None:
    """A context of one token is its value."""
    case = make_case("llama_1b", [(1, 1)] * 64, device)
    pages = case.pages
    assert isinstance(pages, Fp8Pages)
    cells: tuple[Tensor, slice, int] = pages.table[:, 0], slice(None), 0
    codes = torch.arange(64 * 8 * 64, device=device).to(torch.uint8).view(64, 8, 64)
    pages.v.codes.view(torch.uint8)[cells] = codes
    sizes = torch.linspace(-100, 118, 64, device=device).floor()[:, None].expand(64, 8)
    pages.v.scales[cells] = (1.7 * torch.exp2(sizes)).bfloat16()
    expected = dequantise_rows(pages.v.codes, pages.v.scales, torch.bfloat16)[cells].repeat_interleave(4, 1)
    actual = attend(*case.arguments)
    assert actual is not None
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
