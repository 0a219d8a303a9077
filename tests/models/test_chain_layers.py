"""What the chain of decode kernels gets of a family's layers."""

from __future__ import annotations

import pytest
import torch

from tests.models.test_family_devices import make_weights, spec_of_case
from tiny_vllm.kernels.hopper_decode.launch import QueryParts, obstacle_of_parts
from tiny_vllm.models.chain_layers import chain_layers
from tiny_vllm.models.rope import rope_table


@pytest.mark.parametrize(
    ("case", "has_bias", "has_norms"),
    [("qwen2", True, False), ("qwen3", False, True), ("qwen3 with biases", True, True)],
)
def test_hoppers_attention_can_make_queries_with_biases_and_norms(
    case: str, has_bias: bool, has_norms: bool
) -> None:
    """As a model in BF16 has them."""
    spec = spec_of_case(case)
    weights = make_weights(spec, dtype=torch.bfloat16)
    cache = torch.zeros(2, spec.num_kv_heads, 16, spec.head_dim).bfloat16()
    parts, cells = torch.zeros(2, 16, spec.qkv_size), torch.zeros(16, dtype=torch.int64)
    for layer in chain_layers(spec, weights.layers, rope_table(spec.rope, max_len=64)):
        made = QueryParts(parts, layer.weights.qkv_bias, layer.cos_sin, cells, layer.head_norms)
        assert (made.bias is not None, made.head_norms is not None) == (has_bias, has_norms)
        assert obstacle_of_parts(made, cache) is None
