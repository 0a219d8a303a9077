"""The transformer: one decoder for every family, driven by its ModelSpec."""

from __future__ import annotations

import torch
from torch import Tensor

from tiny_vllm.kernels.embedding import embedding
from tiny_vllm.kernels.linear import Linear
from tiny_vllm.kernels.rms_norm import rms_norm
from tiny_vllm.models.attention import Attention, AttentionStep, prepare_attention
from tiny_vllm.models.batch import ForwardBatch
from tiny_vllm.models.fused_decode import FusedDecode
from tiny_vllm.models.kv_cache import KVCache
from tiny_vllm.models.mlp import MLP
from tiny_vllm.models.rope import rope_table
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.models.weights import LayerWeights, ModelWeights


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); x [T, H] is rounded to the model's type at each sum."""

    def __init__(self, spec: ModelSpec, weights: LayerWeights) -> None:
        self.eps = spec.rms_norm_eps
        self.input_norm = weights.input_norm.float()
        self.attention = Attention(spec, weights)
        self.post_attention_norm = weights.post_attention_norm.float()
        self.mlp = MLP(weights)

    def __call__(self, x: Tensor, step: AttentionStep, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        x = self.attention(rms_norm(x, self.input_norm, self.eps), x, step, k_cache, v_cache)
        return self.mlp(rms_norm(x, self.post_attention_norm, self.eps), x)


class Decoder:
    """Computes hidden states and logits of a batch; keeps no state between calls.

    Takes the weights over: matrices may be stored in another layout here, so `weights.layers` is emptied
    layer by layer and at most one layer is held twice. max_model_len: most tokens of a sequence.
    fused_cpu_decode: compute decodes and logits by the fused step, which keeps a second copy of the weights
    (see kernels/cpu_decode).
    """

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, *, max_model_len: int, fused_cpu_decode: bool = False
    ) -> None:
        assert len(weights.layers) == spec.num_layers, "these weights were given to a decoder before"
        self.spec = spec
        self.embedding = weights.embedding
        self.cos_sin = rope_table(spec.rope, max_len=max_model_len).to(weights.embedding.device)
        self.fused_decode = FusedDecode(spec, weights, self.cos_sin) if fused_cpu_decode else None
        self.layers = []
        while weights.layers:
            self.layers.append(DecoderLayer(spec, weights.layers.pop(0)))
        self.final_norm = weights.final_norm.float()
        self.lm_head = Linear(weights.lm_head)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """Write the batch's keys and values to the cache; return [T, hidden], before the final norm."""
        if self.fused_decode is None or not batch.num_decodes:
            return self._forward(batch, kv_cache)
        decoded = self.fused_decode(batch, kv_cache)
        if not batch.num_prefills:
            return decoded
        return torch.cat((decoded, self._forward(batch.prefills(), kv_cache)))

    def _forward(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        step = prepare_attention(batch, kv_cache, self.cos_sin, self.spec)
        hidden = embedding(self.embedding, batch.token_ids)
        for layer, (k_cache, v_cache) in zip(self.layers, kv_cache.layers, strict=True):
            hidden = layer(hidden, step, k_cache, v_cache)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] of `forward` -> FP32 [N, vocab], rounded to the model's type before."""
        if self.fused_decode is not None and len(hidden):
            return self.fused_decode.logits(hidden)
        return self.lm_head(rms_norm(hidden, self.final_norm, self.spec.rms_norm_eps)).float()
