"""Prefill attention, reference and CPU path, against FP64 causal softmax per sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_vllm.kernels import prefill_attention as module
from tiny_vllm.kernels.prefill_attention import (
    PagedChunks,
    PrefillContext,
    prefill_attention,
    prefill_attention_ref,
    prepare_prefill_attention,
)

# As for decode attention, see test_paged_decode_attention.py.
TOLERANCES = {torch.float32: 10 * 128 * 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-10}
# (chunk_len, context_len) of each sequence, num_heads, num_kv_heads, head_dim, page_size
CASES = {
    "typical": ([(40, 40), (17, 100), (1, 33)], 9, 3, 64, 16),
    "irregular": ([(3, 5), (19, 19), (2, 31)], 6, 1, 20, 4),
    "one_token": ([(1, 1)], 4, 4, 16, 16),
    "tokens_as_pages": ([(3, 9), (4, 4)], 4, 2, 16, 1),
    "beyond_one_query_tile": ([(300, 300), (129, 200)], 4, 2, 32, 32),
    "beyond_one_key_tile": ([(20, 1030), (140, 1100)], 2, 1, 16, 64),
    "largest": ([(512, 512)], 8, 2, 128, 64),
}


def make_case(
    case: str,
    dtype: torch.dtype,
    poison: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor], Tensor]:
    """q, k_cache, v_cache, (page_table, query_starts, context_lens), and the FP64 answer."""
    chunks, num_heads, num_kv_heads, head_dim, page_size = CASES[case]
    width = -(-max(length for _, length in chunks) // page_size) + 1
    num_pages = len(chunks) * width + 1
    free_pages = (torch.randperm(num_pages - 1) + 1).tolist()
    k_cache, v_cache = torch.full((2, num_pages, num_kv_heads, page_size, head_dim), poison, dtype=dtype)
    page_table = torch.zeros(len(chunks), width, dtype=torch.int64)
    starts, queries, outputs = [0], [], []
    for index, (chunk_len, length) in enumerate(chunks):
        q = (2 * torch.randn(chunk_len, num_heads, head_dim)).to(dtype)
        keys, values = torch.randn(2, length, num_kv_heads, head_dim).to(dtype)
        for start in range(0, length, page_size):
            page = free_pages.pop()
            page_table[index, start // page_size] = page
            end = min(start + page_size, length)
            k_cache[page, :, : end - start] = keys[start:end].transpose(0, 1)
            v_cache[page, :, : end - start] = values[start:end].transpose(0, 1)
        group = num_heads // num_kv_heads
        keys, values = keys.double().repeat_interleave(group, 1), values.double().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,lhd->hql", q.double(), keys) * head_dim**-0.5
        positions = torch.arange(length - chunk_len, length)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores.masked_fill_(torch.arange(length) > positions.unsqueeze(1), -torch.inf)
        if window is not None:
            scores.masked_fill_(torch.arange(length) <= positions.unsqueeze(1) - window, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, chunk_len, 1)), -1)
        outputs.append(torch.einsum("hql,lhd->qhd", scores.softmax(-1)[..., :length], values))
        queries.append(q)
        starts.append(starts[-1] + chunk_len)
    context_lens = torch.tensor([length for _, length in chunks])
    tables = page_table, torch.tensor(starts), context_lens
    return torch.cat(queries), k_cache, v_cache, tables, torch.cat(outputs)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("poison", [0.0, float("nan")])
@pytest.mark.parametrize("case", CASES)
def test_equals_causal_softmax_over_the_own_context_only(
    case: str, poison: float, dtype: torch.dtype
) -> None:
    q, k_cache, v_cache, tables, expected = make_case(case, dtype, poison)
    scale = q.shape[-1] ** -0.5
    contexts = prepare_prefill_attention(*tables, *k_cache.shape[1:3])
    for actual in (
        prefill_attention_ref(q, k_cache, v_cache, *tables, scale),
        prefill_attention(q, k_cache, v_cache, contexts, scale),
    ):
        assert actual.dtype == dtype
        atol = TOLERANCES[dtype] * float(v_cache[v_cache.isfinite()].abs().max())
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=atol)


VARIANTS: dict[str, dict[str, Any]] = {
    "window": dict(window=7),
    "window_of_one": dict(window=1),
    "window_of_more_than_a_key_tile": dict(window=1050),
    "softcap": dict(softcap=3.0),
    "sinks": dict(sinks=True),
    "everything": dict(window=30, softcap=3.0, sinks=True),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", ["typical", "irregular", "beyond_one_query_tile", "beyond_one_key_tile"])
def test_windows_softcaps_and_sinks(case: str, variant: str) -> None:
    options = dict(VARIANTS[variant])
    if "sinks" in options:
        options["sinks"] = 2 * torch.randn(CASES[case][1])
    q, k_cache, v_cache, tables, expected = make_case(case, torch.float32, float("nan"), **options)
    scale = q.shape[-1] ** -0.5
    atol = TOLERANCES[torch.float32] * float(v_cache[v_cache.isfinite()].abs().max())
    for actual in (
        prefill_attention_ref(q, k_cache, v_cache, *tables, scale, **options),
        prefill_attention(q, k_cache, v_cache, [PagedChunks(*tables)], scale, **options),
    ):
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("is_gathered", [True, False])
def test_writes_to_a_part_of_another_tensor(is_gathered: bool) -> None:
    q, k_cache, v_cache, tables, expected = make_case("typical", torch.float32, 0.0)
    contexts: list[PrefillContext] = [PagedChunks(*tables)]
    if is_gathered:
        contexts = prepare_prefill_attention(*tables, *k_cache.shape[1:3])
    whole = torch.full((3 + len(q), *q.shape[1:]), torch.inf)
    prefill_attention(q, k_cache, v_cache, contexts, q.shape[-1] ** -0.5, output=whole[3:])
    atol = TOLERANCES[torch.float32] * float(v_cache.abs().max())
    torch.testing.assert_close(whole[3:].double(), expected, rtol=0, atol=atol)
    assert whole[:3].isinf().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_contexts_take_fewer_queries_at_a_time(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k_cache, v_cache, tables, expected = make_case("beyond_one_query_tile", dtype, 0.0)
    contexts = prepare_prefill_attention(*tables, *k_cache.shape[1:3])
    monkeypatch.setattr(module, "MAX_TILE_SCORES", 1)
    actual = prefill_attention(q, k_cache, v_cache, contexts, q.shape[-1] ** -0.5)
    atol = TOLERANCES[dtype] * float(v_cache.abs().max())
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=atol)
