"""Layers as the chain of decode kernels reads them: what the spec says of each, resolved once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tiny_vllm.kernels.expert_products import ExpertMatrices
from tiny_vllm.kernels.rope_and_attend import HeadNorms
from tiny_vllm.models.rope import table_of
from tiny_vllm.models.spec import ModelSpec, RopeSpec
from tiny_vllm.models.weights import LayerWeights


@dataclass(frozen=True, slots=True)
class ChainLayer:
    """weights: the matrices and biases; the norms here are those of `weights` with the family's offset.

    input_norm, post_attention_norm: on the inputs of attention and MLP. attention_output_norm,
    mlp_output_norm: on their outputs. head_norms: of each query and key head. whole_norms: of all query heads
    together, and of all key heads. Each None where the family has none there. cos_sin: see `rope_table`.
    variants: window, softcap and sinks of attention, where the layer has them. experts: None with an MLP.
    """

    weights: LayerWeights
    input_norm: Tensor | None
    post_attention_norm: Tensor | None
    attention_output_norm: Tensor | None
    mlp_output_norm: Tensor | None
    head_norms: HeadNorms | None
    whole_norms: tuple[Tensor, Tensor] | None
    cos_sin: Tensor
    variants: dict[str, Any]
    experts: ExpertMatrices | None


def chain_layers(spec: ModelSpec, layers: Sequence[LayerWeights], cos_sin: Tensor) -> list[ChainLayer]:
    """cos_sin [max_len, R]: of the spec's own rotation; no sequence is longer than max_len."""
    tables: dict[RopeSpec | None, Tensor] = {}
    found = []
    for index, layer in enumerate(layers):
        rope = spec.layer_rope(index)
        if rope not in tables:
            tables[rope] = table_of(rope, spec, cos_sin)
        found.append(_chain_layer(spec, index, layer, tables[rope]))
    return found


def offset_norm(norm: Tensor, spec: ModelSpec) -> Tensor:
    """The factors of a stored norm weight."""
    return norm if spec.norm_offset == 0.0 else norm.float() + spec.norm_offset


def _chain_layer(spec: ModelSpec, index: int, weights: LayerWeights, cos_sin: Tensor) -> ChainLayer:
    inputs: list[Tensor | None] = [
        offset_norm(norm, spec) for norm in (weights.input_norm, weights.post_attention_norm)
    ]
    outputs = [
        None if norm is None else offset_norm(norm, spec)
        for norm in (weights.attention_output_norm, weights.mlp_output_norm)
    ]
    if spec.norm_placement == "output":
        inputs, outputs = [None, None], inputs
    head_norms = whole_norms = None
    if weights.q_norm is not None and weights.k_norm is not None:
        norms = offset_norm(weights.q_norm, spec), offset_norm(weights.k_norm, spec)
        if spec.qk_norm == "head":
            # Attention for Hopper takes them in FP32, the others in any type.
            head_norms = HeadNorms(norms[0].float(), norms[1].float(), spec.rms_norm_eps)
        else:
            whole_norms = norms
    variants: dict[str, Any] = {}
    window = spec.layer_window(index)
    # A window that no sequence outgrows hides nothing.
    if window is not None and window < len(cos_sin):
        variants["window"] = window
    if spec.attention_softcap is not None:
        variants["softcap"] = spec.attention_softcap
    if weights.sinks is not None:
        variants["sinks"] = weights.sinks
    experts = None
    if spec.has_experts(index):
        experts = ExpertMatrices(weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias)
    return ChainLayer(
        weights=weights,
        input_norm=inputs[0],
        post_attention_norm=inputs[1],
        attention_output_norm=outputs[0],
        mlp_output_norm=outputs[1],
        head_norms=head_norms,
        whole_norms=whole_norms,
        cos_sin=cos_sin,
        variants=variants,
        experts=experts,
    )
