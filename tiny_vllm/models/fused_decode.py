"""The decoder's small decode steps as one fused CPU step: from spec, weights and batch to `CPUDecode`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tiny_vllm.kernels.cpu_decode import MAX_ROWS
from tiny_vllm.models.batch import ForwardBatch
from tiny_vllm.models.kv_cache import KVCache
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.models.weights import ModelWeights

if TYPE_CHECKING:
    from tiny_vllm.kernels.cpu_decode.decode import CPUDecode


class FusedDecode:
    """Hidden states of a batch of few decodes, from a copy of the layers' weights. Needs numba."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, cos_sin: Tensor) -> None:
        # numba takes a quarter of a second to import, and may be absent where this class is not used.
        from tiny_vllm.kernels.cpu_decode.decode import CPUDecode

        self._decode: CPUDecode = CPUDecode(
            intermediate_size=spec.intermediate_size,
            num_layers=spec.num_layers,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            eps=spec.rms_norm_eps,
            embedding=weights.embedding,
            cos_sin=cos_sin,
        )
        for layer in weights.layers:
            self._decode.add_layer(
                norms=(layer.input_norm, layer.post_attention_norm),
                qkv=layer.qkv,
                output=layer.output,
                gate_up=layer.gate_up,
                down=layer.down,
                biases=(layer.qkv_bias, layer.output_bias, layer.gate_up_bias, layer.down_bias),
            )
        self._decode.set_head(weights.final_norm, weights.lm_head)
        self._decode.compile()

    @staticmethod
    def accepts(batch: ForwardBatch) -> bool:
        """Whether this is a batch of decodes alone, and few enough."""
        return batch.num_prefills == 0 and 0 < batch.num_decodes <= MAX_ROWS

    @torch.inference_mode()
    def __call__(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """As `Decoder.forward`."""
        return self._decode(
            batch.token_ids,
            batch.positions,
            batch.cells,
            batch.decode_context_lens,
            batch.decode_page_table,
            kv_cache.k,
            kv_cache.v,
        )

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """As `Decoder.logits`, for at most MAX_ROWS rows."""
        return self._decode.logits(hidden)
