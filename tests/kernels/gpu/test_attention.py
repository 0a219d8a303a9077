"""Attention kernels over pages against FP64 softmax, with poison wherever no sequence owns a cell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_vllm.kernels.paged_decode_attention import attend_pages, prepare_decode_attention
from tiny_vllm.kernels.prefill_attention import attend_chunks, prepare_prefill_attention
from tiny_vllm.kernels.rope_and_attend import HeadNorms, rope_and_attend
from tiny_vllm.kernels.triton_support import INTERPRETED, has_pdl

pytestmark = pytest.mark.gpu

# Of the largest value. FP32: scores of size 10 from 256 products. Others: weights rounded once (as in flash
# attention) and the result once; the interpreter cuts BF16 off where a GPU rounds.
TOLERANCES = {
    torch.float32: 10 * 256 * 2**-24,
    torch.bfloat16: 2**-6 if INTERPRETED else 2**-7,
    torch.float16: 2**-10,
}
# context_lens, num_heads, num_kv_heads, head_dim, page_size
DECODE_CASES = {
    "typical": ([17, 100, 64, 1], 8, 2, 64, 16),
    "head_80_pages_of_1": ([3, 70], 4, 4, 80, 1),
    "head_96_group_3": ([33, 65, 5], 6, 2, 96, 32),
    "head_128_group_16": ([130], 16, 1, 128, 64),
    "head_256_group_7": ([129, 2], 7, 1, 256, 16),
    "many_parts": ([1100, 5], 2, 1, 64, 16),
}
# (chunk length, context length) of each sequence, then as above
PREFILL_CASES = {
    "prompts": ([(17, 17), (70, 70), (1, 1)], 8, 2, 64, 16),
    "chunks_and_prefix_hits": ([(5, 69), (33, 40), (1, 130)], 4, 4, 64, 16),
    "head_80_pages_of_1": ([(20, 23)], 2, 1, 80, 1),
    "head_96_group_3": ([(40, 72)], 6, 2, 96, 32),
    "head_128_group_16": ([(9, 20), (3, 3)], 16, 1, 128, 64),
    "head_256_group_7": ([(10, 21)], 7, 1, 256, 16),
    "more_sequences_than_are_looked_at_together": (
        [(index % 3 + 1, index % 5 + 3) for index in range(130)],
        2,
        1,
        64,
        16,
    ),
}
if not INTERPRETED:
    DECODE_CASES |= {
        "llama_1b": ([129, 640, 4096, 1, 63, 64, 65], 32, 8, 64, 16),
        "many_splits": ([32768, 2049, 2048], 32, 8, 128, 16),
        "batch_64": ([513 + 7 * index for index in range(64)], 32, 8, 64, 16),
        "one_group": ([700, 31], 16, 16, 128, 32),
    }
    PREFILL_CASES |= {
        "llama_1b": ([(512, 512), (1, 900), (300, 2000), (64, 64), (2048, 2048)], 32, 8, 64, 16),
        "llama_8b": ([(1000, 1000), (257, 4096)], 32, 8, 128, 16),
        "many_sequences": ([(index % 9 + 1, index + 10) for index in range(100)], 8, 2, 64, 16),
    }


# Scores have a size of about 2: these caps bend them, and these sinks take a share of them.
VARIANTS = {
    "soft_cap": dict(softcap=2.0),
    "soft_cap_that_is_reached": dict(softcap=0.05),
    "sinks": dict(sinks=True),
    "all": dict(window=40, softcap=3.0, sinks=True, scale=0.2),
}


def options_of(variant: str, num_heads: int, device: torch.device) -> dict[str, Any]:
    options: dict[str, Any] = dict(VARIANTS[variant])
    if "sinks" in options:
        options["sinks"] = 3 * torch.randn(num_heads, device=device)
    return options


class Pages:
    """Random keys and values of several sequences, in shuffled pages of a poisoned cache."""

    def __init__(
        self, lens: list[int], num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        width = -(-max(lens) // page_size) + 1
        num_pages = sum(-(-length // page_size) for length in lens) + 1
        free_pages = (torch.randperm(num_pages - 1) + 1).tolist()
        shape = (2, num_pages, num_kv_heads, page_size, head_dim)
        self.k_cache, self.v_cache = torch.full(shape, float("nan"), dtype=dtype, device=device)
        self.table = torch.zeros(len(lens), width, dtype=torch.int64, device=device)
        self.lens = torch.tensor(lens, device=device)
        self.keys, self.values = [], []
        for index, length in enumerate(lens):
            keys, values = torch.randn(2, length, num_kv_heads, head_dim, device=device).to(dtype)
            for start in range(0, length, page_size):
                page = free_pages.pop()
                self.table[index, start // page_size] = page
                end = min(start + page_size, length)
                self.k_cache[page, :, : end - start] = keys[start:end].transpose(0, 1)
                self.v_cache[page, :, : end - start] = values[start:end].transpose(0, 1)
            self.keys.append(keys)
            self.values.append(values)

    def attend(
        self,
        index: int,
        q: Tensor,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """q [n, Hq, D], the last n tokens of sequence `index`, in FP64."""
        group = q.shape[1] // self.keys[index].shape[1]
        keys = self.keys[index].double().repeat_interleave(group, 1)
        values = self.values[index].double().repeat_interleave(group, 1)
        positions = torch.arange(len(keys), device=q.device)
        queries = positions[-len(q) :, None]
        hidden = positions > queries
        if window is not None:
            hidden |= positions <= queries - window
        scores = torch.einsum("nhd,lhd->hnl", q.double(), keys) * (scale or q.shape[-1] ** -0.5)
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        scores.masked_fill_(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
        weights = scores.softmax(-1)[..., : len(keys)]
        return torch.einsum("hnl,lhd->nhd", weights, values)


def check(actual: Tensor, expected: Tensor, pages: Pages) -> None:
    largest = max(float(values.abs().max()) for values in pages.values)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=TOLERANCES[actual.dtype] * largest)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("case", DECODE_CASES)
def test_decode_sees_the_own_context_only(
    device: torch.device, case: str, window: int | None, dtype: torch.dtype
) -> None:
    lens, num_heads, num_kv_heads, head_dim, page_size = DECODE_CASES[case]
    pages = Pages(lens, num_kv_heads, head_dim, page_size, dtype, device)
    q = (2 * torch.randn(len(lens), num_heads, head_dim, device=device)).to(dtype)
    actual = attend_pages(
        q, pages.k_cache, pages.v_cache, pages.table, pages.lens, head_dim**-0.5, window=window
    )
    expected = torch.cat([pages.attend(index, q[index : index + 1], window) for index in range(len(lens))])
    check(actual, expected, pages)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", DECODE_CASES)
def test_decode_has_the_variants_of_the_families(
    device: torch.device, case: str, variant: str, dtype: torch.dtype
) -> None:
    lens, num_heads, num_kv_heads, head_dim, page_size = DECODE_CASES[case]
    pages = Pages(lens, num_kv_heads, head_dim, page_size, dtype, device)
    q = (2 * torch.randn(len(lens), num_heads, head_dim, device=device)).to(dtype)
    options = options_of(variant, num_heads, device)
    expected = [pages.attend(index, q[index : index + 1], **options) for index in range(len(lens))]
    scale = options.pop("scale", head_dim**-0.5)
    actual = attend_pages(q, pages.k_cache, pages.v_cache, pages.table, pages.lens, scale, **options)
    check(actual, torch.cat(expected), pages)


@pytest.mark.parametrize("index_type", [torch.int32, torch.int64], ids=str)
def test_decode_reads_chosen_rows_of_a_table_of_slots(device: torch.device, index_type: torch.dtype) -> None:
    pages = Pages([9, 80, 33], 2, 64, 16, torch.float16, device)
    rows = torch.tensor([2, 1], device=device)
    q = torch.randn(2, 4, 64, device=device).half()
    actual = attend_pages(
        q,
        pages.k_cache,
        pages.v_cache,
        pages.table.to(index_type),
        pages.lens[rows].to(index_type),
        0.125,
        table_rows=rows,
        pdl=has_pdl(device),
    )
    check(actual, torch.cat([pages.attend(2, q[:1]), pages.attend(1, q[1:])]), pages)


def test_a_decode_does_not_depend_on_its_batch(device: torch.device) -> None:
    pages = Pages([70, 200, 131], 2, 64, 16, torch.float16, device)
    q = torch.randn(3, 8, 64, device=device).half()
    together = attend_pages(q, pages.k_cache, pages.v_cache, pages.table, pages.lens, 0.125)
    for index in range(3):
        one = slice(index, index + 1)
        alone = attend_pages(
            q[one].contiguous(), pages.k_cache, pages.v_cache, pages.table[one], pages.lens[one], 0.125,
            max_context_len=256,
        )  # fmt: skip
        assert torch.equal(alone, together[one])


@pytest.mark.parametrize("max_context_len", [64, 1024])
def test_decodes_and_chunks_write_to_parts_of_one_tensor(device: torch.device, max_context_len: int) -> None:
    """A decode's context in one part, and in several that another kernel joins."""
    pages = Pages([30, 64, 23], 2, 64, 16, torch.float16, device)
    q = torch.randn(2 + 7, 8, 64, device=device).half()
    output = torch.full_like(q, float("nan"))
    caches, chunk = (pages.k_cache, pages.v_cache), slice(2, 3)
    attend_pages(
        q[:2], *caches, pages.table[:2], pages.lens[:2], 0.125, max_context_len=max_context_len,
        output=output[:2],
    )  # fmt: skip
    assert output[2:].isnan().all()
    starts = torch.tensor([0, 7], device=device)
    attend_chunks(q[2:], *caches, pages.table[chunk], starts, pages.lens[chunk], 0.125, output=output[2:])
    expected = pages.attend(0, q[:1]), pages.attend(1, q[1:2]), pages.attend(2, q[2:])
    check(output, torch.cat(expected), pages)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("rotation", "variant"), [("whole", None), ("partial", None), ("whole", "all")])
@pytest.mark.parametrize("case", DECODE_CASES)
def test_rope_and_attend_ends_the_product_and_writes_the_newest_token(
    device: torch.device, case: str, rotation: str, variant: str | None, splits: int, dtype: torch.dtype
) -> None:
    lens, num_heads, num_kv_heads, head_dim, page_size = DECODE_CASES[case]
    if case == "many_splits":
        pytest.skip("needs angles of 32,768 positions, and splits contexts no differently")
    count, rotary_dim = len(lens), head_dim if rotation == "whole" else head_dim // 4 * 2
    pages = Pages(lens, num_kv_heads, head_dim, page_size, dtype, device)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    parts = torch.randn(splits, count, width, device=device) * splits**-0.5
    parts = parts.to(dtype) if splits == 1 else parts
    bias = torch.randn(width, device=device).to(dtype) if splits > 1 else None
    angles = torch.arange(max(lens), device=device)[:, None] * torch.rand(rotary_dim // 2, device=device)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)

    # The newest token's cell is poison until the kernel writes it.
    newest, index = pages.lens - 1, torch.arange(count, device=device)
    cells = pages.table[index, newest // page_size] * page_size + newest % page_size
    where = (cells // page_size, slice(None), cells % page_size)
    pages.k_cache[where] = pages.v_cache[where] = float("nan")
    qkv = parts.double().sum(0) + (0 if bias is None else bias.double())
    q, k, v = qkv.view(count, -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], 1)
    options = {} if variant is None else options_of(variant, num_heads, device)
    scale = options.pop("scale", head_dim**-0.5)
    head_norms = None
    if variant is not None:
        head_norms = HeadNorms(*(1 + 0.5 * torch.randn(2, head_dim, device=device).to(dtype)), 1e-5)
        q, k = (
            x * torch.rsqrt(x.square().mean(-1, True) + 1e-5) * weight.double()
            for x, weight in ((q, head_norms.q), (k, head_norms.k))
        )
    cos, sin = cos_sin[newest].double()[:, None].chunk(2, -1)

    def turn(x: Tensor) -> Tensor:
        first, second, rest = x.split([rotary_dim // 2, rotary_dim // 2, head_dim - rotary_dim], -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    before = pages.k_cache.clone(), pages.v_cache.clone()
    actual = rope_and_attend(
        parts, bias, cos_sin, cells, pages.k_cache, pages.v_cache, pages.table, pages.lens, num_heads, scale,
        head_norms=head_norms, pdl=has_pdl(device), **options,
    )  # fmt: skip
    for cache, old, expected in (
        (pages.k_cache, before[0], turn(k)),
        (pages.v_cache, before[1], v),
    ):
        size = float(expected.abs().max())
        torch.testing.assert_close(cache[where].double(), expected, rtol=0, atol=TOLERANCES[dtype] / 2 * size)
        rest = cache.clone()
        rest[where] = float("nan")
        assert torch.equal(rest.nan_to_num(7.0), old.nan_to_num(7.0))
    # What was stored is what later steps see, and what this step used.
    for sequence in range(count):
        pages.keys[sequence][-1] = pages.k_cache[where][sequence]
        pages.values[sequence][-1] = pages.v_cache[where][sequence]
    rounded = turn(q).to(dtype)
    options["scale"] = scale
    expected = torch.cat([pages.attend(row, rounded[row : row + 1], **options) for row in range(count)])
    check(actual, expected, pages)


def test_rope_and_attend_of_padding_leaves_the_first_slot_alone(device: torch.device) -> None:
    pages = Pages([20], 2, 64, 16, torch.float16, device)
    before = pages.k_cache.clone()
    integers = dict(dtype=torch.int64, device=device)
    rope_and_attend(
        torch.randn(2, 1, 6 * 64, device=device), None, torch.ones(4, 64, device=device),
        torch.zeros(1, **integers), pages.k_cache, pages.v_cache, pages.table, torch.ones(1, **integers), 2,
        0.125, table_rows=torch.zeros(1, **integers),
    )  # fmt: skip
    assert torch.equal(pages.k_cache[1:].nan_to_num(7.0), before[1:].nan_to_num(7.0))


def test_no_decodes_and_no_chunks_need_no_context(device: torch.device) -> None:
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    table = torch.zeros(0, 4, dtype=torch.int64, device=device)
    assert prepare_decode_attention(table, empty, 2, 16, torch.float16) == []
    assert prepare_prefill_attention(table, torch.zeros_like(table[:1, 0]), empty, 2, 16) == []


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("case", PREFILL_CASES)
def test_prefill_is_causal_over_the_own_context(
    device: torch.device, case: str, window: int | None, dtype: torch.dtype
) -> None:
    chunks, num_heads, num_kv_heads, head_dim, page_size = PREFILL_CASES[case]
    pages = Pages([context for _, context in chunks], num_kv_heads, head_dim, page_size, dtype, device)
    starts = torch.tensor([0] + [chunk for chunk, _ in chunks], device=device).cumsum(0)
    q = (2 * torch.randn(int(starts[-1]), num_heads, head_dim, device=device)).to(dtype)
    actual = attend_chunks(
        q, pages.k_cache, pages.v_cache, pages.table, starts, pages.lens, head_dim**-0.5, window=window
    )
    parts = starts.tolist()
    expected = [
        pages.attend(index, q[parts[index] : parts[index + 1]], window) for index in range(len(chunks))
    ]
    check(actual, torch.cat(expected), pages)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", PREFILL_CASES)
def test_prefill_has_the_variants_of_the_families(
    device: torch.device, case: str, variant: str, dtype: torch.dtype
) -> None:
    chunks, num_heads, num_kv_heads, head_dim, page_size = PREFILL_CASES[case]
    pages = Pages([context for _, context in chunks], num_kv_heads, head_dim, page_size, dtype, device)
    starts = torch.tensor([0] + [chunk for chunk, _ in chunks], device=device).cumsum(0)
    q = (2 * torch.randn(int(starts[-1]), num_heads, head_dim, device=device)).to(dtype)
    options = options_of(variant, num_heads, device)
    parts = starts.tolist()
    expected = [
        pages.attend(index, q[parts[index] : parts[index + 1]], **options) for index in range(len(chunks))
    ]
    scale = options.pop("scale", head_dim**-0.5)
    actual = attend_chunks(q, pages.k_cache, pages.v_cache, pages.table, starts, pages.lens, scale, **options)
    check(actual, torch.cat(expected), pages)


@pytest.mark.parametrize("window", [None, 5])
def test_chunks_without_tokens_and_rows_of_no_chunk_change_nothing(
    device: torch.device, window: int | None
) -> None:
    """As graphs of small steps pad them: behind the others, with a context of one token on the null page."""
    chunks, padding = [(17, 17), (5, 69), (1, 1)], 5
    pages = Pages([context for _, context in chunks], 2, 64, 16, torch.float32, device)
    pages.k_cache[0] = pages.v_cache[0] = 1e30
    starts = torch.tensor([0] + [chunk for chunk, _ in chunks], device=device).cumsum(0)
    q = 2 * torch.randn(64, 8, 64, device=device)
    output = torch.full_like(q, 7.0)
    table = torch.cat((pages.table, pages.table.new_zeros(padding, pages.table.shape[1])))
    padded_starts = torch.cat((starts, starts[-1:].expand(padding)))
    lens = torch.cat((pages.lens, pages.lens.new_ones(padding)))
    caches = pages.k_cache, pages.v_cache
    attend_chunks(q, *caches, table, padded_starts, lens, 0.125, window=window, output=output)
    count = int(starts[-1])
    expected = attend_chunks(q[:count], *caches, pages.table, starts, pages.lens, 0.125, window=window)
    assert torch.equal(output[:count], expected)
    assert (output[count:] == 7).all()
