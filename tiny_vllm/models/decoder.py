"""The transformer: one decoder for every family, driven by its ModelSpec."""

from __future__ import annotations

import torch
from torch import Tensor

from tiny_vllm.kernels.embedding import embedding
from tiny_vllm.kernels.fp8_cache import Cache
from tiny_vllm.kernels.linear import Linear
from tiny_vllm.kernels.rms_norm import rms_norm
from tiny_vllm.models.attention import Attention, AttentionStep, ends_of_chunks, prepare_attention
from tiny_vllm.models.batch import ForwardBatch
from tiny_vllm.models.experts import Experts
from tiny_vllm.models.fused_decode import FusedDecode
from tiny_vllm.models.kv_cache import KVCache
from tiny_vllm.models.mlp import MLP
from tiny_vllm.models.residual import ResidualJoin
from tiny_vllm.models.rope import rope_table, table_of
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.models.weights import LayerWeights, ModelWeights


class DecoderLayer:
    """x + attention(x), then x + mlp(x), with norms where the spec places them.

    x [T, H] is rounded to the model's type at each sum; [R, H] comes out, for the R rows of the step that
    attend. rope, window: see `Attention`.
    """

    def __init__(
        self, spec: ModelSpec, weights: LayerWeights, *, index: int, rope: int, window: int | None
    ) -> None:
        self.eps = spec.rms_norm_eps
        first, second = weights.input_norm, weights.post_attention_norm
        has_input_norms = spec.norm_placement != "output"
        self.input_norm = first.float() + spec.norm_offset if has_input_norms else None
        self.post_attention_norm = second.float() + spec.norm_offset if has_input_norms else None
        outputs = weights.attention_output_norm, weights.mlp_output_norm
        if not has_input_norms:
            outputs = first, second
        attention_join, mlp_join = (ResidualJoin(spec, norm) for norm in outputs)
        self.attention = Attention(spec, weights, attention_join, rope=rope, window=window)
        self.mlp = (Experts if spec.has_experts(index) else MLP)(spec, weights, mlp_join)

    def __call__(self, x: Tensor, step: AttentionStep, k_cache: Cache, v_cache: Cache) -> Tensor:
        hidden = x if self.input_norm is None else rms_norm(x, self.input_norm, self.eps)
        x = self.attention(hidden, x, step, k_cache, v_cache)
        hidden = x if self.post_attention_norm is None else rms_norm(x, self.post_attention_norm, self.eps)
        return self.mlp(hidden, x)


class Decoder:
    """Computes hidden states and logits of a batch; keeps no state between calls.

    Takes the weights over: matrices may be stored in another layout here, so `weights.layers` is emptied
    layer by layer and at most one layer is held twice. max_model_len: most tokens of a sequence.
    fused_cpu_decode: compute decodes and logits by the fused step, which keeps a second copy of the weights
    (see kernels/cpu_decode); the spec must fit it.
    """

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, *, max_model_len: int, fused_cpu_decode: bool = False
    ) -> None:
        assert len(weights.layers) == spec.num_layers, "these weights were given to a decoder before"
        assert spec.fits_fused_cpu_decode or not fused_cpu_decode, "the fused step lacks this family's traits"
        self.spec = spec
        self.embedding = weights.embedding
        device = weights.embedding.device
        self.cos_sin = rope_table(spec.rope, max_len=max_model_len).to(device)
        self.fused_decode = FusedDecode(spec, weights, self.cos_sin) if fused_cpu_decode else None
        ropes = list(dict.fromkeys(spec.layer_rope(index) for index in range(spec.num_layers)))
        self._tables = [table_of(rope, spec, self.cos_sin) for rope in ropes]
        self.layers = []
        for index in range(spec.num_layers):
            window = spec.layer_window(index)
            self.layers.append(
                DecoderLayer(
                    spec,
                    weights.layers.pop(0),
                    index=index,
                    rope=ropes.index(spec.layer_rope(index)),
                    # A window that no sequence outgrows hides nothing.
                    window=window if window is not None and window < max_model_len else None,
                )
            )
        self._plain_limit = max(layer.attention.plain_limit for layer in self.layers)
        self.final_norm = weights.final_norm.float() + spec.norm_offset
        self.lm_head = Linear(weights.lm_head)
        # Rounded to the model's type, as the embedding is.
        self._embedding_multiplier = torch.tensor(
            spec.embedding_multiplier, dtype=weights.embedding.dtype, device=device
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """Write the batch's keys and values to the cache; return [T, hidden], before the final norm.

        Of a batch that wants ends only, [B + S, hidden]: the last layer computes no others.
        """
        if self.fused_decode is None or not batch.num_decodes:
            return self._forward(batch, kv_cache)
        decoded = self.fused_decode(batch, kv_cache)
        if not batch.num_prefills:
            return decoded
        return torch.cat((decoded, self._forward(batch.prefills(), kv_cache)))

    def _forward(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        step = prepare_attention(batch, kv_cache, self._tables, self.spec, plain_limit=self._plain_limit)
        hidden = embedding(self.embedding, batch.token_ids)
        if self.spec.embedding_multiplier != 1.0:
            hidden = hidden * self._embedding_multiplier
        for layer, (k_cache, v_cache) in zip(self.layers, kv_cache.layers, strict=True):
            if batch.ends_only and batch.num_prefills and layer is self.layers[-1]:
                step = ends_of_chunks(step, batch, kv_cache, self.spec)
            hidden = layer(hidden, step, k_cache, v_cache)
        return hidden

    @torch.inference_mode()
    def final_hidden(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] of `forward` -> [N, H] after the final norm."""
        return rms_norm(hidden, self.final_norm, self.spec.rms_norm_eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] of `forward` -> FP32 [N, vocab], rounded to the model's type before."""
        if self.fused_decode is not None and len(hidden):
            return self.fused_decode.logits(hidden)
        logits = self.lm_head(self.final_hidden(hidden)).float()
        if self.spec.logit_divisor != 1.0:
            logits = logits / self.spec.logit_divisor
        if self.spec.logit_softcap is not None:
            logits = (logits / self.spec.logit_softcap).tanh() * self.spec.logit_softcap
        return logits
