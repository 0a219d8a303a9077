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

    input_norm, post_attention_norm: [hidden]
    qkv: [qkv_size, hidden], rows q then k then v, heads in order, Hugging Face's half-split RoPE layout
    output: [hidden, q_size]
    gate_up: [2 * intermediate, hidden], rows gate then up;  down: [hidden, intermediate]
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


@dataclass(slots=True)
class ModelWeights:
    """embedding: [vocab, hidden]; lm_head: [vocab, hidden], the same tensor object when tied."""

    embedding: Tensor
    layers: list[LayerWeights]
    final_norm: Tensor
    lm_head: Tensor
