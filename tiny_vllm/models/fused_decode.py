"""The decoder's decodes and logits by the fused CPU step: from spec, weights and batch to `CPUDecode`."""

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
    """Hidden states of decodes, and logits, from a copy of the weights. Needs numba."""

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

    @torch.inference_mode()
    def __call__(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """As `Decoder.forward`, for the decodes of a batch alone: [num_decodes, hidden].

        They go in groups of MAX_ROWS. A row's result does not depend on its group, so with a fused step a
        decode's result never depends on what else is in the batch.
        """
        groups = []
        for start in range(0, batch.num_decodes, MAX_ROWS):
            rows = slice(start, min(start + MAX_ROWS, batch.num_decodes))
            hidden = self._decode(
                batch.token_ids[rows],
                batch.positions[rows],
                batch.cells[rows],
                batch.decode_context_lens[rows],
                batch.decode_page_table[rows],
                kv_cache.k,
                kv_cache.v,
            )
            # The next group writes to the same buffer.
            groups.append(hidden if batch.num_decodes <= MAX_ROWS else hidden.clone())
        return groups[0] if len(groups) == 1 else torch.cat(groups)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """As `Decoder.logits`, for one row or more."""
        groups = [self._decode.logits(group) for group in hidden.split(MAX_ROWS)]
        return groups[0] if len(groups) == 1 else torch.cat(groups)
