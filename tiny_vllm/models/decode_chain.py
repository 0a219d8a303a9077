"""A decode step on a GPU as one chain of kernels: from the slots' last tokens to their next ones.

Nothing in it depends on the host, and all shapes are fixed by the number of rows, so a step can be captured
as a CUDA graph and replayed: a gather from the slot tables, the layers, the LM head and the draw. Kernels
overlap by programmatic dependent launch where the GPU has it.

A layer of up to MAX_SMALL_ROWS rows: QKV with norm, rotation and cache write; attention in two kernels;
output product with residual; gate and up with norm and SiLU; down with residual. With more rows the products
are tiled, and where K is split the next kernel adds the parts: QKV; rotation, cache write and attention;
output product; residual and norm; gate and up with SiLU; down; residual and the next layer's norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_vllm.kernels.draw_tokens import SlotAdvance, draw_tokens
from tiny_vllm.kernels.finish_rows import finish_rows
from tiny_vllm.kernels.norm_linear import MAX_SMALL_ROWS, norm_linear
from tiny_vllm.kernels.paged_decode_attention import attend_pages
from tiny_vllm.kernels.qkv_rope_and_cache import qkv_rope_and_cache
from tiny_vllm.kernels.rms_norm import rms_norm
from tiny_vllm.kernels.rope_and_attend import rope_and_attend
from tiny_vllm.kernels.slot_inputs import SlotInputs, SlotState, read_slots
from tiny_vllm.kernels.tiled_linear import split_linear, tiled_linear
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
        self._pdl = has_pdl(cos_sin.device) if use_pdl is None else use_pdl

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
        tokens, is_valid = draw_tokens(logits, temperature, inputs.keys, advance, pdl=self._pdl)
        return ChainResult(logits, tokens, is_valid)

    @torch.inference_mode()
    def logits(self, state: SlotState, slots: Tensor, *, max_context_len: int | None = None) -> Tensor:
        """The step without the draw: FP32 [B, vocab], for samplers that filter. `state` stays as it is."""
        return self._forward(state, slots, max_context_len)[1]

    def _forward(
        self, state: SlotState, slots: Tensor, max_context_len: int | None
    ) -> tuple[SlotInputs, Tensor]:
        inputs = read_slots(self._embedding, state, slots, self._kv_cache.page_size)
        run = self._few_rows if slots.shape[0] <= MAX_SMALL_ROWS else self._many_rows
        return inputs, run(inputs, state.page_table, max_context_len)

    def _few_rows(self, inputs: SlotInputs, page_table: Tensor, max_context_len: int | None) -> Tensor:
        """Logits."""
        hidden, eps, pdl = inputs.hidden, self._spec.rms_norm_eps, self._pdl
        for index, (layer, (k_cache, v_cache)) in enumerate(self._layers_with_caches()):
            q = qkv_rope_and_cache(
                hidden,
                layer.qkv,
                layer.qkv_bias,
                layer.input_norm,
                eps,
                self._cos_sin,
                inputs.positions,
                inputs.cells,
                k_cache,
                v_cache,
                self._spec.num_heads,
                # The chain's second kernel waits for the first one whole, see `slot_inputs`.
                pdl and index > 0,
            )
            attended = attend_pages(
                q,
                k_cache,
                v_cache,
                page_table,
                inputs.context_lens,
                self._spec.head_dim**-0.5,
                table_rows=inputs.table_rows,
                max_context_len=max_context_len,
                pdl=pdl,
            )
            hidden = norm_linear(
                attended.flatten(1), layer.output, bias=layer.output_bias, residual=hidden, pdl=pdl
            )
            activated = norm_linear(
                hidden,
                layer.gate_up,
                norm_weight=layer.post_attention_norm,
                eps=eps,
                bias=layer.gate_up_bias,
                gated=True,
                pdl=pdl,
            )
            hidden = norm_linear(activated, layer.down, bias=layer.down_bias, residual=hidden, pdl=pdl)
        return norm_linear(
            hidden, self._lm_head, norm_weight=self._final_norm, eps=eps, out_dtype=torch.float32, pdl=pdl
        )

    def _many_rows(self, inputs: SlotInputs, page_table: Tensor, max_context_len: int | None) -> Tensor:
        """Logits."""
        hidden, eps, pdl = inputs.hidden, self._spec.rms_norm_eps, self._pdl
        next_norms = [*(layer.input_norm for layer in self._layers[1:]), self._final_norm]
        # The chain's second kernel waits for the first one whole, see `slot_inputs`.
        normed = rms_norm(hidden, self._layers[0].input_norm, eps)
        for (layer, (k_cache, v_cache)), next_norm in zip(
            self._layers_with_caches(), next_norms, strict=True
        ):
            attended = rope_and_attend(
                split_linear(normed, layer.qkv, pdl),
                layer.qkv_bias,
                self._cos_sin,
                inputs.cells,
                k_cache,
                v_cache,
                page_table,
                inputs.context_lens,
                self._spec.num_heads,
                self._spec.head_dim**-0.5,
                table_rows=inputs.table_rows,
                max_context_len=max_context_len,
                pdl=pdl,
            )
            parts = split_linear(attended.flatten(1), layer.output, pdl)
            hidden, normed = finish_rows(
                parts, hidden, layer.post_attention_norm, eps, layer.output_bias, pdl
            )
            activated = tiled_linear(normed, layer.gate_up, bias=layer.gate_up_bias, gated=True, pdl=pdl)
            parts = split_linear(activated, layer.down, pdl)
            hidden, normed = finish_rows(parts, hidden, next_norm, eps, layer.down_bias, pdl)
        return tiled_linear(normed, self._lm_head, out_dtype=torch.float32, pdl=pdl)

    def _layers_with_caches(self) -> Iterator[tuple[LayerWeights, tuple[Tensor, Tensor]]]:
        return zip(self._layers, self._kv_cache.layers, strict=True)
