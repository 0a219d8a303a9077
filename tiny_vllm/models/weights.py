"""The tensors a decoder computes with: canonical names and shapes, whatever file they came from.

Projections that read the same input are stored as one matrix, so that they are one product.
All matrices are [rows = output features, columns = input features].
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer.

    input_norm, post_attention_norm: [hidden], the norm of attention and that of the MLP, on their inputs or,
        by the spec's norm_placement, on their outputs;  attention_output_norm, mlp_output_norm: [hidden], the
        second pair where both are normed
    qkv: [qkv_size, hidden], rows q then k then v, heads in order, Hugging Face's half-split RoPE layout
    q_norm, k_norm: see the spec's qk_norm;  sinks: [num_heads]
    output: [hidden, q_size]
    gate_up: [2 * intermediate, hidden], rows gate then up;  down: [hidden, intermediate];  a layer of experts
        has one more dimension before these, and router: [experts, hidden]
    biases: one value per row of their matrix, None where the family has none
    """

    input_norm: Tensor
    qkv: Tensor
    output: Tensor
    post_attention_norm: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    sinks: Tensor | None = None
    attention_output_norm: Tensor | None = None
    mlp_output_norm: Tensor | None = None
    router: Tensor | None = None
    router_bias: Tensor | None = None


@dataclass(slots=True)
class ModelWeights:
    """embedding: [vocab, hidden]; lm_head: [vocab, hidden], the same tensor object when tied."""

    embedding: Tensor
    layers: list[LayerWeights]
    final_norm: Tensor
    lm_head: Tensor
