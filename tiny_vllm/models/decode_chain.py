"""A decode step on a GPU as one chain of kernels: from the slots' last tokens to their next ones.

Nothing in it depends on the host, and all shapes are fixed by the number of rows, so a step can be captured
as a CUDA graph and replayed: per layer QKV with rotation and cache write, attention in two kernels, output
product, gate and up, down; before them a gather from the slot tables, after them the LM head and the draw.
With up to MAX_SMALL_ROWS rows the kernels overlap by programmatic dependent launch where the GPU has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_vllm.kernels.draw_tokens import SlotAdvance, draw_tokens
from tiny_vllm.kernels.norm_linear import MAX_SMALL_ROWS, norm_linear
from tiny_vllm.kernels.paged_decode_attention import attend_pages
from tiny_vllm.kernels.qkv_rope_and_cache import qkv_rope_and_cache
from tiny_vllm.kernels.slot_inputs import SlotInputs, SlotState, read_slots
from tiny_vllm.kernels.triton_support import has_pdl
from tiny_vllm.models.kv_cache import KVCache
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.models.weights import LayerWeights, ModelWeights


@dataclass(frozen=True, slots=True)
class ChainResult:
    """logits [B, vocab] FP32; tokens [B] int64; is_valid [B] bool, see `draw_tokens`."""

    logits: Tensor
    tokens: Tensor
    is_valid: Tensor


class DecodeChain:
    """Shares the tensors of `weights`, which must be the plain matrices, and keeps no state between steps.

    cos_sin: see `rope_table`. use_pdl: None takes it where the GPU has it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        cos_sin: Tensor,
        kv_cache: KVCache,
        *,
        use_pdl: bool | None = None,
    ) -> None:
        self._spec = spec
        self._embedding = weights.embedding
        self._layers = list(weights.layers)
        self._final_norm = weights.final_norm
        self._lm_head = weights.lm_head
        self._cos_sin = cos_sin
        self._kv_cache = kv_cache
        self._has_pdl = has_pdl(cos_sin.device) if use_pdl is None else use_pdl

    @torch.inference_mode()
    def step(
        self, state: SlotState, slots: Tensor, temperature: Tensor, *, max_context_len: int | None = None
    ) -> ChainResult:
        """Compute the next token of each slot in `slots` [B] int64 and write it to `state`.

        temperature: [S] FP32, one per slot. max_context_len: no context of this step, or of any replay of it,
        is longer; it only spares programs. Pages for the new tokens must be in the page table.
        """
        inputs, logits = self._forward(state, slots, max_context_len)
        advance = SlotAdvance(slots, state.last_token, state.computed_len, state.sample_position)
        tokens, is_valid = draw_tokens(
            logits, temperature, inputs.keys, advance, pdl=self._pdl(slots.shape[0])
        )
        return ChainResult(logits, tokens, is_valid)

    @torch.inference_mode()
    def logits(self, state: SlotState, slots: Tensor, *, max_context_len: int | None = None) -> Tensor:
        """The step without the draw: FP32 [B, vocab], for samplers that filter. `state` stays as it is."""
        return self._forward(state, slots, max_context_len)[1]

    def _pdl(self, num_rows: int) -> bool:
        return self._has_pdl and num_rows <= MAX_SMALL_ROWS

    def _forward(
        self, state: SlotState, slots: Tensor, max_context_len: int | None
    ) -> tuple[SlotInputs, Tensor]:
        inputs = read_slots(self._embedding, state, slots, self._kv_cache.page_size)
        pdl = self._pdl(slots.shape[0])
        hidden = inputs.hidden
        for index, (layer, (k_cache, v_cache)) in enumerate(
            zip(self._layers, self._kv_cache.layers, strict=True)
        ):
            # The chain's second kernel waits for the first one whole, see `slot_inputs`.
            q = self._qkv(layer, hidden, inputs, k_cache, v_cache, pdl and index > 0)
            attended = attend_pages(
                q,
                k_cache,
                v_cache,
                state.page_table,
                inputs.context_lens,
                self._spec.head_dim**-0.5,
                table_rows=inputs.table_rows,
                max_context_len=max_context_len,
                pdl=pdl,
            )
            hidden = self._finish(layer, hidden, attended.flatten(1), pdl)
        logits = norm_linear(
            hidden,
            self._lm_head,
            norm_weight=self._final_norm,
            eps=self._spec.rms_norm_eps,
            out_dtype=torch.float32,
            pdl=pdl,
        )
        return inputs, logits

    def _qkv(
        self,
        layer: LayerWeights,
        hidden: Tensor,
        inputs: SlotInputs,
        k_cache: Tensor,
        v_cache: Tensor,
        pdl: bool,
    ) -> Tensor:
        return qkv_rope_and_cache(
            hidden,
            layer.qkv,
            layer.qkv_bias,
            layer.input_norm,
            self._spec.rms_norm_eps,
            self._cos_sin,
            inputs.positions,
            inputs.cells,
            k_cache,
            v_cache,
            self._spec.num_heads,
            pdl,
        )

    def _finish(self, layer: LayerWeights, residual: Tensor, attended: Tensor, pdl: bool) -> Tensor:
        hidden = norm_linear(attended, layer.output, bias=layer.output_bias, residual=residual, pdl=pdl)
        activated = norm_linear(
            hidden,
            layer.gate_up,
            norm_weight=layer.post_attention_norm,
            eps=self._spec.rms_norm_eps,
            bias=layer.gate_up_bias,
            gated=True,
            pdl=pdl,
        )
        return norm_linear(activated, layer.down, bias=layer.down_bias, residual=hidden, pdl=pdl)
