"""Self-attention of one layer: projections, rotation, pages, decode and prefill side by side."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_vllm.kernels.linear import Linear
from tiny_vllm.kernels.paged_decode_attention import (
    DecodeContext,
    paged_decode_attention,
    prepare_decode_attention,
)
from tiny_vllm.kernels.prefill_attention import (
    PrefillContext,
    prefill_attention,
    prepare_prefill_attention,
)
from tiny_vllm.kernels.rope import RopeStep, prepare_rope, rope_and_cache
from tiny_vllm.models.batch import ForwardBatch
from tiny_vllm.models.kv_cache import KVCache
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.models.weights import LayerWeights


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What the attention of every layer shares in one step."""

    rope: RopeStep
    num_decodes: int
    decode: list[DecodeContext]
    prefill: list[PrefillContext]


def prepare_attention(
    batch: ForwardBatch, kv_cache: KVCache, cos_sin: Tensor, spec: ModelSpec
) -> AttentionStep:
    """cos_sin: see `rope_table`."""
    num_kv_heads, page_size = spec.num_kv_heads, kv_cache.page_size
    decode = prepare_decode_attention(
        batch.decode_page_table, batch.decode_context_lens, num_kv_heads, page_size, kv_cache.k.dtype
    )
    prefill = prepare_prefill_attention(
        batch.prefill_page_table,
        batch.prefill_query_starts,
        batch.prefill_context_lens,
        num_kv_heads,
        page_size,
    )
    rope = prepare_rope(cos_sin, batch.positions, batch.cells, num_kv_heads, page_size)
    return AttentionStep(rope, batch.num_decodes, decode, prefill)


class Attention:
    """hidden [T, H] (normed) and residual [T, H] -> residual + attention [T, H]."""

    def __init__(self, spec: ModelSpec, weights: LayerWeights) -> None:
        self.num_heads = spec.num_heads
        self.scale = spec.head_dim**-0.5
        self.qkv = Linear(weights.qkv, weights.qkv_bias)
        self.output = Linear(weights.output, weights.output_bias)

    def __call__(
        self, hidden: Tensor, residual: Tensor, step: AttentionStep, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        q = rope_and_cache(self.qkv(hidden), step.rope, k_cache, v_cache, self.num_heads)
        attended = self._attend(q, step, k_cache, v_cache)
        return self.output.add(attended.flatten(1), residual)

    def _attend(self, q: Tensor, step: AttentionStep, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        if not step.decode:
            return prefill_attention(q, k_cache, v_cache, step.prefill, self.scale)
        decoded = paged_decode_attention(q[: step.num_decodes], k_cache, v_cache, step.decode, self.scale)
        if not step.prefill:
            return decoded
        prefilled = prefill_attention(q[step.num_decodes :], k_cache, v_cache, step.prefill, self.scale)
        return torch.cat((decoded, prefilled))
