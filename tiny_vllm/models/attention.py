"""Self-attention of one layer: projections, rotation, pages, decode and prefill side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tiny_vllm.kernels.fp8_cache import Cache
from tiny_vllm.kernels.linear import Linear
from tiny_vllm.kernels.paged_decode_attention import (
    DecodeContext,
    PagedContext,
    paged_decode_attention,
    prepare_decode_attention,
)
from tiny_vllm.kernels.prefill_attention import (
    PagedChunks,
    PrefillContext,
    prefill_attention,
    prepare_prefill_attention,
)
from tiny_vllm.kernels.rms_norm import norm_in_place
from tiny_vllm.kernels.rope import HeadNorms, RopeStep, prepare_rope, rope_and_cache
from tiny_vllm.kernels.triton_support import runs_triton
from tiny_vllm.models.batch import ForwardBatch
from tiny_vllm.models.kv_cache import KVCache
from tiny_vllm.models.residual import ResidualJoin
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.models.weights import LayerWeights


@dataclass(frozen=True, slots=True)
class AttentionContexts:
    """The pages of a step's sequences, in the form that one kind of layer reads. Empty lists: none.

    ends: of the chunks, where only their last rows attend, in place of `prefill`.
    """

    decode: list[DecodeContext]
    prefill: list[PrefillContext]
    ends: list[DecodeContext]


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What the attention of every layer shares in one step.

    ropes: by table. plain, varied: contexts of layers without and with a window, soft cap or sinks. longest:
    tokens of the longest context, beyond which a window hides some; unknown on a GPU, hence infinite.
    rows: int64 [R], which of the T rows attend; None: all, R = T. output: [R, Hq, D] that all layers write;
    rows of padding stay 0 in it.
    """

    ropes: list[RopeStep]
    num_decodes: int
    plain: AttentionContexts
    varied: AttentionContexts
    longest: float
    rows: Tensor | None
    output: Tensor


def prepare_attention(
    batch: ForwardBatch, kv_cache: KVCache, tables: Sequence[Tensor], spec: ModelSpec, *, plain_limit: float
) -> AttentionStep:
    """tables: cosines and sines, see `rope_table`. plain_limit: the largest one of all layers."""
    num_kv_heads, page_size = spec.num_kv_heads, kv_cache.page_size
    plain, varied = AttentionContexts([], [], []), AttentionContexts([], [], [])
    longest = math.inf
    if not runs_triton(batch.positions):
        lens = torch.cat((batch.decode_context_lens, batch.prefill_context_lens))
        longest = int(lens.max()) if len(lens) else 0
    if longest <= plain_limit:
        plain = AttentionContexts(
            prepare_decode_attention(
                batch.decode_page_table,
                batch.decode_context_lens,
                num_kv_heads,
                page_size,
                kv_cache.dtype,
            ),
            prepare_prefill_attention(
                batch.prefill_page_table,
                batch.prefill_query_starts,
                batch.prefill_context_lens,
                num_kv_heads,
                page_size,
            ),
            [],
        )
    if batch.num_decodes:
        varied.decode.append(PagedContext(batch.decode_page_table, batch.decode_context_lens))
    if batch.num_prefills:
        varied.prefill.append(
            PagedChunks(batch.prefill_page_table, batch.prefill_query_starts, batch.prefill_context_lens)
        )
    ropes = [prepare_rope(table, batch.positions, batch.cells, num_kv_heads, page_size) for table in tables]
    make = torch.zeros if batch.is_padded else torch.empty
    output = make(
        len(batch.positions),
        spec.num_heads,
        spec.head_dim,
        dtype=kv_cache.dtype,
        device=batch.positions.device,
    )
    return AttentionStep(ropes, batch.num_decodes, plain, varied, longest, None, output)


def ends_of_chunks(
    step: AttentionStep, batch: ForwardBatch, kv_cache: KVCache, spec: ModelSpec
) -> AttentionStep:
    """The same step where, of each chunk, the last row alone attends, like a decode. The batch has chunks."""
    table, lens = batch.prefill_page_table, batch.prefill_context_lens
    plain: list[DecodeContext] = []
    if step.plain.prefill:
        plain = prepare_decode_attention(table, lens, spec.num_kv_heads, kv_cache.page_size, kv_cache.dtype)
    decodes = torch.arange(batch.num_decodes, device=table.device)
    # A graph may be recorded with chunks without tokens alone, and no decodes.
    ends = (batch.prefill_query_starts[1:] + (batch.num_decodes - 1)).clamp(min=0)
    rows = torch.cat((decodes, ends))
    return replace(
        step,
        plain=AttentionContexts(step.plain.decode, [], plain),
        varied=AttentionContexts(step.varied.decode, [], [PagedContext(table, lens)]),
        rows=rows,
        output=step.output[: len(rows)],
    )


class Attention:
    """hidden [T, H] (normed as the spec says) and residual [T, H] -> residual + attention [R, H], for the R
    rows of the step that attend.

    rope: index of the layer's table. window: None where nothing lies outside it.
    """

    def __init__(
        self, spec: ModelSpec, weights: LayerWeights, join: ResidualJoin, *, rope: int, window: int | None
    ) -> None:
        self.spec = spec
        self.num_heads = spec.num_heads
        self.scale = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
        self.rope = rope
        self.window = window
        self.softcap = spec.attention_softcap
        self.sinks = None if weights.sinks is None else weights.sinks.float()
        self.plain_limit = math.inf if window is None else window
        """Up to this context, in tokens, attention is plain: the paths for it are faster on a CPU."""
        if self.softcap is not None or self.sinks is not None:
            self.plain_limit = 0
        self.qkv = Linear(weights.qkv, weights.qkv_bias)
        self.head_norms: HeadNorms | None = None
        self.whole_norms: tuple[Tensor, Tensor] | None = None
        """Of all query heads together, and of all key heads."""
        if weights.q_norm is not None and weights.k_norm is not None:
            q_norm, k_norm = (norm.float() + spec.norm_offset for norm in (weights.q_norm, weights.k_norm))
            if spec.qk_norm == "head":
                self.head_norms = HeadNorms(q_norm, k_norm, spec.rms_norm_eps)
            else:
                self.whole_norms = q_norm, k_norm
        self.output = Linear(weights.output, weights.output_bias)
        self.join = join

    def __call__(
        self, hidden: Tensor, residual: Tensor, step: AttentionStep, k_cache: Cache, v_cache: Cache
    ) -> Tensor:
        qkv = self.qkv(hidden)
        if self.whole_norms is not None:
            self._norm_whole(qkv, *self.whole_norms)
        q = rope_and_cache(qkv, step.ropes[self.rope], k_cache, v_cache, self.num_heads, self.head_norms)
        if step.rows is not None:
            q, residual = q.index_select(0, step.rows), residual.index_select(0, step.rows)
        attended = self._attend(q, step, k_cache, v_cache).flatten(1)
        if self.join.is_sum:
            return self.output.add(attended, residual)
        return self.join(self.output(attended), residual)

    def _norm_whole(self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        """All of q and all of k, in place. qkv [T, qkv_size]."""
        spec = self.spec
        q, k, _ = qkv.split([spec.q_size, spec.kv_size, spec.kv_size], -1)
        norm_in_place(q, q_norm, spec.rms_norm_eps)
        norm_in_place(k, k_norm, spec.rms_norm_eps)

    def _attend(self, q: Tensor, step: AttentionStep, k_cache: Cache, v_cache: Cache) -> Tensor:
        is_plain = step.longest <= self.plain_limit
        contexts = step.plain if is_plain else step.varied
        decode, prefill = (
            partial(attend, window=None if is_plain else self.window, softcap=self.softcap, sinks=self.sinks)
            for attend in (paged_decode_attention, prefill_attention)
        )
        output = step.output
        for attend, own_contexts, rows in (
            (decode, contexts.decode, slice(None, step.num_decodes)),
            (prefill, contexts.prefill, slice(step.num_decodes, None)),
            (decode, contexts.ends, slice(step.num_decodes, None)),
        ):
            if own_contexts:
                attend(q[rows], k_cache, v_cache, own_contexts, self.scale, output=output[rows])
        return output
