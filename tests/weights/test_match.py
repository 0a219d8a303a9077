"""Stored tensors are matched to weights in every form a file may hold them in; gaps and doubles are named."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tiny_vllm.errors import ModelError
from tiny_vllm.models.hf_config import spec_from_hf_config
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.weights.match import match_tensors

SIZES = dict(
    vocab_size=50,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)
LAYER = "model.layers.0."
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (50, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (50, 8),
    f"{LAYER}input_layernorm.weight": (8,),
    f"{LAYER}post_attention_layernorm.weight": (8,),
    f"{LAYER}self_attn.o_proj.weight": (8, 8),
}
APART = {
    f"{LAYER}self_attn.q_proj.weight": (8, 8),
    f"{LAYER}self_attn.k_proj.weight": (4, 8),
    f"{LAYER}self_attn.v_proj.weight": (4, 8),
}
MLP = {
    f"{LAYER}mlp.gate_up_proj.weight": (24, 8),
    f"{LAYER}mlp.down_proj.weight": (8, 12),
}
NUM_EXPERTS = 12
ROUTER = {f"{LAYER}block_sparse_moe.gate.weight": (NUM_EXPERTS, 8)}
EXPERTS = {
    f"{LAYER}block_sparse_moe.experts.{expert}.{part}.weight": shape
    for expert in range(NUM_EXPERTS)
    for part, shape in (("w1", (12, 8)), ("w2", (8, 12)), ("w3", (12, 8)))
}
MIXTRAL = {**SHAPES, **APART, **ROUTER, **EXPERTS}
PHI3 = {**SHAPES, **MLP, f"{LAYER}self_attn.qkv_proj.weight": (16, 8)}
GGUF: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (50, 8),
    "output_norm.weight": (8,),
    "output.weight": (50, 8),
    "blk.0.attn_norm.weight": (8,),
    "blk.0.ffn_norm.weight": (8,),
    "blk.0.attn_q.weight": (8, 8),
    "blk.0.attn_k.weight": (4, 8),
    "blk.0.attn_v.weight": (4, 8),
    "blk.0.attn_output.weight": (8, 8),
    "blk.0.ffn_gate_inp.weight": (NUM_EXPERTS, 8),
}


def spec(architecture: str, **changes: Any) -> ModelSpec:
    return spec_from_hf_config({"architectures": [f"{architecture}ForCausalLM"], **SIZES, **changes})


def mixtral() -> ModelSpec:
    return spec("Mixtral", num_local_experts=NUM_EXPERTS)


def refused(model: ModelSpec, stored: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        match_tensors(model, stored, where="here")


def test_joined_and_separate_matrices_are_both_found() -> None:
    joined = match_tensors(spec("Phi3"), PHI3, where="here")
    assert joined["layers.0.qkv"] == f"{LAYER}self_attn.qkv_proj.weight"
    mixed = match_tensors(spec("Phi3"), {**SHAPES, **APART, **MLP}, where="here")
    assert {"layers.0.q", "layers.0.k", "layers.0.v", "layers.0.gate_up"} <= mixed.keys()


def test_experts_are_found_one_by_one() -> None:
    found = match_tensors(mixtral(), MIXTRAL, where="here")
    assert found["layers.0.up.11"] == f"{LAYER}block_sparse_moe.experts.11.w3.weight"
    assert found["layers.0.router"] == f"{LAYER}block_sparse_moe.gate.weight"


def test_experts_of_old_gguf_files_are_found_one_by_one() -> None:
    experts = {
        f"blk.0.ffn_{part}.{expert}.weight": (8, 12) if part == "down" else (12, 8)
        for expert in range(NUM_EXPERTS)
        for part in ("gate", "up", "down")
    }
    found = match_tensors(mixtral(), {**GGUF, **experts}, where="here")
    assert found["layers.0.down.10"] == "blk.0.ffn_down.10.weight"


def test_a_single_expert_is_found_apart() -> None:
    single = spec("Mixtral", num_local_experts=1, num_experts_per_tok=1)
    router = {f"{LAYER}block_sparse_moe.gate.weight": (1, 8)}
    experts = {name: shape for name, shape in EXPERTS.items() if ".experts.0." in name}
    found = match_tensors(single, {**SHAPES, **APART, **router, **experts}, where="here")
    assert found["layers.0.up.0"] == f"{LAYER}block_sparse_moe.experts.0.w3.weight"
    gguf = {**GGUF, "blk.0.ffn_gate_inp.weight": (1, 8)}
    refused(single, gguf, "missing 3 tensors: blk.0.ffn_gate_exps.weight, blk.0.ffn_up_exps.weight, ")


def test_a_weight_in_two_forms_is_refused() -> None:
    refused(
        spec("Phi3"),
        {**PHI3, f"{LAYER}self_attn.k_proj.weight": (4, 8)},
        f"{LAYER}self_attn.qkv_proj.weight and {LAYER}self_attn.k_proj.weight are the same weight",
    )


def test_a_missing_expert_is_a_missing_matrix() -> None:
    incomplete = {name: shape for name, shape in MIXTRAL.items() if ".7.w2." not in name}
    refused(mixtral(), incomplete, f"missing tensor {LAYER}block_sparse_moe.experts.7.w2.weight")
    without = {name: shape for name, shape in MIXTRAL.items() if ".experts." not in name}
    refused(mixtral(), without, f"missing 36 tensors: {LAYER}block_sparse_moe.experts.0.w1.weight, ")
    refused(mixtral(), GGUF, "missing 3 tensors: blk.0.ffn_gate_exps.weight, blk.0.ffn_up_exps.weight, ")


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}block_sparse_moe.experts.12.w1.weight",
        f"{LAYER}block_sparse_moe.experts.w1.weight",
        f"{LAYER}mlp.shared_expert.gate_proj.weight",
        f"{LAYER}self_attn.q_norm.weight",
        "model.layers.1.input_layernorm.weight",
        "vision_tower.patch.weight",
    ],
)
def test_what_the_family_has_no_place_for_is_refused(name: str) -> None:
    refused(mixtral(), {**MIXTRAL, name: (8,)}, f"unexpected tensor {name}")


def test_wrong_shapes_of_joined_matrices_and_experts_are_named() -> None:
    name = f"{LAYER}self_attn.qkv_proj.weight"
    refused(
        spec("Phi3"),
        {**PHI3, name: (24, 8)},
        f"{name} has shape [24, 8], but the configuration needs [16, 8]",
    )
    name = f"{LAYER}block_sparse_moe.experts.3.w2.weight"
    refused(
        mixtral(),
        {**MIXTRAL, name: (12, 8)},
        f"{name} has shape [12, 8], but the configuration needs [8, 12]",
    )


def test_norms_of_one_name_mean_what_their_family_means() -> None:
    """post_attention_layernorm norms what attention adds in OLMo 2, and the MLP's input elsewhere."""
    olmo = {name: shape for name, shape in SHAPES.items() if "input_layernorm" not in name}
    olmo |= {f"{LAYER}post_feedforward_layernorm.weight": (8,)}
    olmo |= {f"{LAYER}self_attn.q_norm.weight": (8,), f"{LAYER}self_attn.k_norm.weight": (4,), **APART, **MLP}
    found = match_tensors(spec("Olmo2"), olmo, where="here")
    assert found["layers.0.input_norm"] == f"{LAYER}post_attention_layernorm.weight"
    assert match_tensors(spec("Phi3"), PHI3, where="here")["layers.0.post_attention_norm"] == (
        f"{LAYER}post_attention_layernorm.weight"
    )
