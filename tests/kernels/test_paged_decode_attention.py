"""Decode attention, reference and CPU path, against FP64 softmax per sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_vllm.kernels.paged_decode_attention import (
    DecodeContext,
    PagedContext,
    paged_decode_attention,
    paged_decode_attention_ref,
    prepare_decode_attention,
)

# Of the largest value. FP32: scores of size 10 from 128 products. Others: weights rounded once (as in flash
# attention) and the result once.
TOLERANCES = {torch.float32: 10 * 128 * 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-10}
# context_lens, num_heads, num_kv_heads, head_dim, page_size
CASES = {
    "typical": ([17, 100, 64, 1], 9, 3, 64, 16),
    "equal_lengths": ([33, 33, 33], 4, 2, 32, 16),
    "irregular": ([5, 19], 6, 1, 20, 4),
    "one_token": ([1], 4, 4, 16, 16),
    "tokens_as_pages": ([3, 9, 1], 4, 2, 16, 1),
    "beyond_one_tile": ([700, 1, 257, 256], 4, 2, 64, 32),
    "products": ([300, 290, 1, 128, 300, 17, 64, 299], 8, 4, 64, 16),
    "lengths_far_apart": ([3, 2100, 520, 1, 2099, 600, 511], 4, 2, 16, 16),
    "largest": ([512] * 16, 8, 2, 128, 64),
}


def make_case(
    case: str,
    dtype: torch.dtype,
    poison: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k_cache, v_cache, page_table, context_lens, and the FP64 answer. All other cells hold the poison."""
    lens, num_heads, num_kv_heads, head_dim, page_size = CASES[case]
    width = -(-max(lens) // page_size) + 1
    num_pages = len(lens) * width + 1
    free_pages = (torch.randperm(num_pages - 1) + 1).tolist()
    k_cache, v_cache = torch.full((2, num_pages, num_kv_heads, page_size, head_dim), poison, dtype=dtype)
    page_table = torch.zeros(len(lens), width, dtype=torch.int64)
    q = (2 * torch.randn(len(lens), num_heads, head_dim)).to(dtype)
    outputs = []
    for index, length in enumerate(lens):
        keys, values = torch.randn(2, length, num_kv_heads, head_dim).to(dtype)
        for start in range(0, length, page_size):
            page = free_pages.pop()
            page_table[index, start // page_size] = page
            end = min(start + page_size, length)
            k_cache[page, :, : end - start] = keys[start:end].transpose(0, 1)
            v_cache[page, :, : end - start] = values[start:end].transpose(0, 1)
        group = num_heads // num_kv_heads
        keys, values = keys.double().repeat_interleave(group, 1), values.double().repeat_interleave(group, 1)
        scores = torch.einsum("hd,lhd->hl", q[index].double(), keys) * head_dim**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if window is not None:
            scores[:, : max(length - window, 0)] = -torch.inf
        if sinks is not None:
            scores = torch.cat((scores, sinks.double().unsqueeze(1)), 1)
        outputs.append(torch.einsum("hl,lhd->hd", scores.softmax(-1)[:, :length], values))
    return q, k_cache, v_cache, page_table, torch.tensor(lens), torch.stack(outputs)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("poison", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("case", CASES)
def test_equals_softmax_over_the_own_context_only(case: str, poison: float, dtype: torch.dtype) -> None:
    q, k_cache, v_cache, page_table, context_lens, expected = make_case(case, dtype, poison)
    scale = q.shape[-1] ** -0.5
    contexts = prepare_decode_attention(page_table, context_lens, *k_cache.shape[1:3], dtype)
    for actual in (
        paged_decode_attention_ref(q, k_cache, v_cache, page_table, context_lens, scale),
        paged_decode_attention(q, k_cache, v_cache, contexts, scale),
    ):
        assert actual.dtype == dtype
        atol = TOLERANCES[dtype] * float(v_cache[v_cache.isfinite()].abs().max())
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=atol)


VARIANTS: dict[str, dict[str, Any]] = {
    "window": dict(window=7),
    "window_of_one": dict(window=1),
    "softcap": dict(softcap=3.0),
    "sinks": dict(sinks=True),
    "everything": dict(window=300, softcap=3.0, sinks=True),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", ["typical", "irregular", "beyond_one_tile", "products"])
def test_windows_softcaps_and_sinks(case: str, variant: str) -> None:
    options = dict(VARIANTS[variant])
    if "sinks" in options:
        options["sinks"] = 2 * torch.randn(CASES[case][1])
    *inputs, expected = make_case(case, torch.float32, float("nan"), **options)
    q, k_cache, v_cache, page_table, context_lens = inputs
    scale = q.shape[-1] ** -0.5
    context = PagedContext(page_table, context_lens)
    atol = TOLERANCES[torch.float32] * float(v_cache[v_cache.isfinite()].abs().max())
    for actual in (
        paged_decode_attention_ref(*inputs, scale, **options),
        paged_decode_attention(q, k_cache, v_cache, [context], scale, **options),
    ):
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("is_gathered", [True, False])
@pytest.mark.parametrize("case", ["typical", "lengths_far_apart"])
def test_writes_to_a_part_of_another_tensor(case: str, is_gathered: bool) -> None:
    q, k_cache, v_cache, *tables, expected = make_case(case, torch.float32, 0.0)
    contexts: list[DecodeContext] = [PagedContext(*tables)]
    if is_gathered:
        contexts = prepare_decode_attention(*tables, *k_cache.shape[1:3], q.dtype)
    whole = torch.full((len(q) + 3, *q.shape[1:]), torch.inf)
    paged_decode_attention(q, k_cache, v_cache, contexts, q.shape[-1] ** -0.5, output=whole[: len(q)])
    atol = TOLERANCES[torch.float32] * float(v_cache.abs().max())
    torch.testing.assert_close(whole[: len(q)].double(), expected, rtol=0, atol=atol)
    assert whole[len(q) :].isinf().all()


def test_scores_beyond_the_range_of_exp_stay_finite() -> None:
    q, k_cache, v_cache, page_table, context_lens, _ = make_case("typical", torch.float32, 0.0)
    contexts = prepare_decode_attention(page_table, context_lens, *k_cache.shape[1:3], q.dtype)
    huge = q * 1e4
    reference = paged_decode_attention_ref(huge, k_cache, v_cache, page_table, context_lens, 1.0)
    assert reference.isfinite().all()
    torch.testing.assert_close(paged_decode_attention(huge, k_cache, v_cache, contexts, 1.0), reference)


def test_one_long_context_does_not_pad_the_short_ones() -> None:
    context_lens = torch.tensor([100, 8000, 120, 90])
    page_table = torch.ones(4, 500, dtype=torch.int64)
    contexts = prepare_decode_attention(page_table, context_lens, 1, 16, torch.float32)
    assert sum(context.rows.numel() for context in contexts) == 3 * 8 + 500
