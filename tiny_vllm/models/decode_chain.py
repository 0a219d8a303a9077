"""A decode step on a GPU as one chain of kernels: from the slots' last tokens to their next ones.

Nothing in it depends on the host, and all shapes are fixed by the number of rows, so a step can be captured
as a CUDA graph and replayed: a gather from the slot tables, the layers, the LM head and the draw. Kernels
overlap by programmatic dependent launch where the GPU has it.

A layer of up to MAX_SMALL_ROWS rows: QKV with norm, rotation and cache write; attention in two kernels;
output product with residual; gate and up with norm and activation; down with residual. Where heads have norms
of their own, or keys are stored in FP8, attention does the rotation. With experts, of whom few are picked,
what follows the output product is: router with norm; choice of experts, and the norm for them; gate and up;
down; the sum over picked experts with residual.
With more rows the products are tiled, and where K is split the next kernel adds the parts: QKV; rotation,
cache write and attention; output product; residual and norm; gate and up with activation; down; residual and
the next layer's norm. This is also the way, with any number of rows, of families that do more than add to the
residual stream, and of more picks. Of experts it is router; choice of experts; their tiles; gate and up;
down, whose parts are those of the picked experts. Where queries and keys have a norm over all heads, a kernel
more sums their parts and norms them. On Hopper `hopper_linear` has the products of 9 to 256 rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tiny_vllm.kernels.draw_from_linear import draw_from_linear
from tiny_vllm.kernels.draw_tokens import SlotAdvance, draw_tokens
from tiny_vllm.kernels.expert_products import ExpertMatrices, expert_parts
from tiny_vllm.kernels.finish_rows import finish_rows
from tiny_vllm.kernels.fp8_cache import Cache
from tiny_vllm.kernels.hopper_decode.launch import workspace_of
from tiny_vllm.kernels.hopper_linear import decode_launch as hopper
from tiny_vllm.kernels.norm_and_pick import norm_and_pick
from tiny_vllm.kernels.norm_linear import MAX_SMALL_ROWS, norm_linear
from tiny_vllm.kernels.norm_queries_and_keys import norm_queries_and_keys
from tiny_vllm.kernels.paged_decode_attention import attend_pages
from tiny_vllm.kernels.pick_experts import pick_experts
from tiny_vllm.kernels.picked_experts import takes_picks
from tiny_vllm.kernels.qkv_rope_and_cache import qkv_rope_and_cache
from tiny_vllm.kernels.rms_norm import rms_norm
from tiny_vllm.kernels.rope_and_attend import rope_and_attend
from tiny_vllm.kernels.slot_inputs import SlotInputs, SlotState, read_slots
from tiny_vllm.kernels.tiled_linear import split_linear, tiled_linear
from tiny_vllm.kernels.triton_support import has_pdl
from tiny_vllm.models.chain_layers import ChainLayer, chain_layers, offset_norm
from tiny_vllm.models.kv_cache import KVCache
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.models.weights import ModelWeights

# A program's share of a mixture's sum, where the sum is not normed: 8 parts of 256 values, 8 KB, in place of
# a multiprocessor's 64 KB with a whole row of 2,048.
SUM_COLUMNS = 256


class DecodeChain:
    """Shares the tensors of `weights`, which must be the plain matrices, and keeps no state between steps:
    what attention's blocks leave for each other is used up within a kernel. Steps run one after another.

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
        self._layers = chain_layers(spec, weights.layers, cos_sin)
        self._final_norm = offset_norm(weights.final_norm, spec)
        self._lm_head = weights.lm_head
        self._scale = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
        # Only sums: the products before them take them over.
        self._adds_only = (
            spec.norm_placement == "input" and spec.qk_norm != "whole" and spec.residual_multiplier == 1.0
        )
        # Rounded to the model's type, as the embedding is.
        self._embedding_multiplier = torch.tensor(
            spec.embedding_multiplier, dtype=weights.embedding.dtype, device=weights.embedding.device
        )
        self._kv_cache = kv_cache
        self._workspace = workspace_of(kv_cache.layers[0][0])
        self._pdl = has_pdl(cos_sin.device) if use_pdl is None else use_pdl

    @torch.inference_mode()
    def step(
        self, state: SlotState, slots: Tensor, temperature: Tensor, *, max_context_len: int | None = None
    ) -> Tensor:
        """Draw the next token of each slot in `slots` [B] int64, write it to `state`, and return tokens [B]
        int64, -1 where the logits are not finite.

        temperature: [S] FP32, one per slot. max_context_len: no context of this step, or of any replay of it,
        is longer; it only spares programs. Pages for the new tokens must be in the page table.
        """
        inputs = self._read(state, slots)
        x = self._layers_of(inputs, state.page_table, max_context_len)
        advance = SlotAdvance(slots, state.last_token, state.computed_len, state.sample_position)
        spec = self._spec
        if len(slots) > MAX_SMALL_ROWS and spec.logit_divisor == 1.0 and spec.logit_softcap is None:
            return draw_from_linear(x, self._lm_head, temperature, inputs.keys, advance, self._pdl)
        return draw_tokens(self._logits(x), temperature, inputs.keys, advance, self._pdl)

    @torch.inference_mode()
    def logits(self, state: SlotState, slots: Tensor, *, max_context_len: int | None = None) -> Tensor:
        """The step without the draw: FP32 [B, vocab], for samplers that filter. `state` stays as it is."""
        return self._logits(self._layers_of(self._read(state, slots), state.page_table, max_context_len))

    def _read(self, state: SlotState, slots: Tensor) -> SlotInputs:
        inputs = read_slots(self._embedding, state, slots, self._kv_cache.page_size)
        if self._spec.embedding_multiplier != 1.0:
            inputs = replace(inputs, hidden=inputs.hidden * self._embedding_multiplier)
        return inputs

    def _is_short(self, rows: Tensor) -> bool:
        # With picks to sort the other way is faster: 8 rows of Qwen3-30B-A3B 7.64 ms, this one 7.94.
        experts = self._spec.experts
        has_few_picks = experts is None or takes_picks(len(rows), experts.num_active, experts.num_experts)
        return len(rows) <= MAX_SMALL_ROWS and self._adds_only and has_few_picks

    def _layers_of(self, inputs: SlotInputs, page_table: Tensor, max_context_len: int | None) -> Tensor:
        """The last hidden state; normed, unless the LM head's kernel does that."""
        run = self._few_rows if self._is_short(inputs.hidden) else self._many_rows
        return run(inputs, page_table, max_context_len)

    def _logits(self, x: Tensor) -> Tensor:
        """Of what `_layers_of` returns."""
        if len(x) <= MAX_SMALL_ROWS:
            norm = self._final_norm if self._is_short(x) else None
            logits = norm_linear(
                x, self._lm_head, norm_weight=norm, eps=self._spec.rms_norm_eps, out_dtype=torch.float32,
                pdl=self._pdl,
            )  # fmt: skip
        else:
            logits = tiled_linear(x, self._lm_head, out_dtype=torch.float32, pdl=self._pdl)
        if self._spec.logit_divisor != 1.0:
            logits.div_(self._spec.logit_divisor)
        if self._spec.logit_softcap is not None:
            logits.div_(self._spec.logit_softcap).tanh_().mul_(self._spec.logit_softcap)
        return logits

    def _few_rows(self, inputs: SlotInputs, page_table: Tensor, max_context_len: int | None) -> Tensor:
        hidden, eps, pdl = inputs.hidden, self._spec.rms_norm_eps, self._pdl
        for index, (layer, (k_cache, v_cache)) in enumerate(self._layers_with_caches()):
            weights = layer.weights
            # The chain's second kernel waits for the first one whole, see `slot_inputs`.
            first_pdl = pdl and index > 0
            # The scale of a key in FP8 is that of a whole head, of which a program of QKV has some rows.
            if layer.head_norms is None and isinstance(k_cache, Tensor) and isinstance(v_cache, Tensor):
                assert layer.input_norm is not None
                q = qkv_rope_and_cache(
                    hidden,
                    weights.qkv,
                    weights.qkv_bias,
                    layer.input_norm,
                    eps,
                    layer.cos_sin,
                    inputs.positions,
                    inputs.cells,
                    k_cache,
                    v_cache,
                    self._spec.num_heads,
                    first_pdl,
                )
                attended = attend_pages(
                    q,
                    k_cache,
                    v_cache,
                    page_table,
                    inputs.context_lens,
                    self._scale,
                    table_rows=inputs.table_rows,
                    max_context_len=max_context_len,
                    pdl=pdl,
                    **layer.variants,
                )
            else:
                qkv = norm_linear(
                    hidden,
                    weights.qkv,
                    norm_weight=layer.input_norm,
                    eps=eps,
                    out_dtype=torch.float32,
                    pdl=first_pdl,
                )
                attended = self._rope_and_attend(
                    qkv.unsqueeze(0), layer, k_cache, v_cache, inputs, page_table, max_context_len
                )
            hidden = norm_linear(
                attended.flatten(1), weights.output, bias=weights.output_bias, residual=hidden, pdl=pdl
            )
            if layer.experts is not None:
                hidden = self._add_mixture(hidden, layer, layer.experts)
                continue
            activated = norm_linear(
                hidden,
                weights.gate_up,
                norm_weight=layer.post_attention_norm,
                eps=eps,
                bias=weights.gate_up_bias,
                gated=True,
                activation=self._spec.activation,
                pdl=pdl,
            )
            hidden = norm_linear(activated, weights.down, bias=weights.down_bias, residual=hidden, pdl=pdl)
        return hidden

    def _add_mixture(self, hidden: Tensor, layer: ChainLayer, matrices: ExpertMatrices) -> Tensor:
        """Of few rows. Whoever reads the sum norms it, so its columns may be summed by several programs."""
        spec, router, norm = self._spec.experts, layer.weights.router, layer.post_attention_norm
        assert spec is not None and router is not None and norm is not None
        eps, pdl = self._spec.rms_norm_eps, self._pdl
        logits = norm_linear(
            hidden, router, norm_weight=norm, eps=eps, out_dtype=torch.float32, pdl=pdl
        ).unsqueeze(0)
        normed, experts, weights = norm_and_pick(
            hidden, norm, eps, logits, layer.weights.router_bias, spec.num_active, spec.normalize, pdl
        )
        parts = expert_parts(normed, experts, weights, matrices, self._spec.activation, pdl)
        width = math.gcd(hidden.shape[1], SUM_COLUMNS)
        sums, _ = finish_rows(parts.view(len(parts), -1, width), hidden.view(-1, width), None, eps, pdl=pdl)
        return sums.view(hidden.shape)

    def _many_rows(self, inputs: SlotInputs, page_table: Tensor, max_context_len: int | None) -> Tensor:
        hidden, eps, pdl = inputs.hidden, self._spec.rms_norm_eps, self._pdl
        multiplier = self._spec.residual_multiplier
        next_norms = [*(layer.input_norm for layer in self._layers[1:]), self._final_norm]
        first_norm = self._layers[0].input_norm
        # The chain's second kernel waits for the first one whole, see `slot_inputs`.
        normed = hidden if first_norm is None else rms_norm(hidden, first_norm, eps)
        qkv_pdl = pdl and first_norm is not None
        for (layer, (k_cache, v_cache)), next_norm in zip(
            self._layers_with_caches(), next_norms, strict=True
        ):
            weights = layer.weights
            parts = self._product(normed, weights.qkv, qkv_pdl)
            qkv_pdl = pdl
            attended = self._rope_and_attend(
                parts,
                layer,
                k_cache,
                v_cache,
                inputs,
                page_table,
                max_context_len,
            )
            parts = self._product(attended.flatten(1), weights.output, pdl)
            hidden, normed = finish_rows(
                parts, hidden, layer.post_attention_norm, eps, weights.output_bias, pdl,
                layer.attention_output_norm, multiplier,
            )  # fmt: skip
            if layer.experts is None:
                activated = self._activated(normed, weights.gate_up, weights.gate_up_bias)
                parts, bias = self._product(activated, weights.down, pdl), weights.down_bias
            else:
                parts, bias = self._expert_parts(normed, layer, layer.experts), None
            hidden, normed = finish_rows(
                parts, hidden, next_norm, eps, bias, pdl, layer.mlp_output_norm, multiplier
            )
        return normed

    def _product(self, x: Tensor, weight: Tensor, pdl: bool) -> Tensor:
        """[S, B, N], to be summed over S."""
        if len(x) <= MAX_SMALL_ROWS:
            return norm_linear(x, weight, out_dtype=torch.float32, pdl=pdl).unsqueeze(0)
        parts = hopper.split_product(x, weight, pdl)
        return split_linear(x, weight, pdl) if parts is None else parts

    def _activated(self, x: Tensor, gate_up: Tensor, bias: Tensor | None) -> Tensor:
        """[B, H] -> [B, I]."""
        activation, pdl = self._spec.activation, self._pdl
        if activation == "silu" and bias is None:
            activated = hopper.gated_product(x, gate_up, pdl)
            if activated is not None:
                return activated
        linear = norm_linear if len(x) <= MAX_SMALL_ROWS else tiled_linear
        return linear(x, gate_up, bias=bias, gated=True, activation=activation, pdl=pdl)

    def _rope_and_attend(
        self,
        parts: Tensor,
        layer: ChainLayer,
        k_cache: Cache,
        v_cache: Cache,
        inputs: SlotInputs,
        page_table: Tensor,
        max_context_len: int | None,
    ) -> Tensor:
        bias = layer.weights.qkv_bias
        if layer.whole_norms is not None:
            q_norm, k_norm = layer.whole_norms
            parts = norm_queries_and_keys(parts, bias, q_norm, k_norm, self._spec.rms_norm_eps, self._pdl)
            bias = None
        return rope_and_attend(
            parts,
            bias,
            layer.cos_sin,
            inputs.cells,
            k_cache,
            v_cache,
            page_table,
            inputs.context_lens,
            self._spec.num_heads,
            self._scale,
            table_rows=inputs.table_rows,
            max_context_len=max_context_len,
            head_norms=layer.head_norms,
            workspace=self._workspace,
            pdl=self._pdl,
            **layer.variants,
        )

    def _expert_parts(self, normed: Tensor, layer: ChainLayer, matrices: ExpertMatrices) -> Tensor:
        spec, router = self._spec.experts, layer.weights.router
        assert spec is not None and router is not None
        experts, weights = pick_experts(
            self._product(normed, router, self._pdl),
            layer.weights.router_bias,
            spec.num_active,
            spec.normalize,
            self._pdl,
        )
        return expert_parts(normed, experts, weights, matrices, self._spec.activation, self._pdl)

    def _layers_with_caches(self) -> Iterator[tuple[ChainLayer, tuple[Cache, Cache]]]:
        return zip(self._layers, self._kv_cache.layers, strict=True)
