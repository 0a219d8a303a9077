"""Configurations of the Llama family become the spec transformers would use, or are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tiny_vllm.errors import ModelError
from tiny_vllm.models.hf_config import spec_from_hf_config
from tiny_vllm.models.spec import RopeSpec

LLAMA = {"architectures": ["LlamaForCausalLM"]}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "attention_factor": 1.25,
    "mscale": 0.5,
    "mscale_all_dim": 0.75,
    "truncate": False,
}

ROPE_CASES: dict[str, tuple[dict[str, Any], RopeSpec, int]] = {
    "default": ({"rope_type": "default"}, RopeSpec(theta=5e5, rotary_dim=128), 2048),
    "linear": (
        {"rope_type": "linear", "factor": 4.0},
        RopeSpec(
            theta=5e5, rotary_dim=128, scaling="linear", factor=4.0, original_max_position_embeddings=2048
        ),
        8192,
    ),
    "dynamic": (
        {"rope_type": "dynamic", "factor": 2.0},
        RopeSpec(
            theta=5e5, rotary_dim=128, scaling="dynamic", factor=2.0, original_max_position_embeddings=2048
        ),
        4096,
    ),
    "llama3": (
        LLAMA3,
        RopeSpec(
            theta=5e5, rotary_dim=128, scaling="llama3", factor=8.0, original_max_position_embeddings=8192
        ),
        2048,
    ),
    "yarn": (
        YARN,
        RopeSpec(
            theta=5e5,
            rotary_dim=128,
            scaling="yarn",
            factor=4.0,
            original_max_position_embeddings=1024,
            beta_fast=16.0,
            beta_slow=2.0,
            attention_factor=1.25,
            mscale=0.5,
            mscale_all_dim=0.75,
            truncate=False,
        ),
        4096,
    ),
    "yarn with defaults": (
        {"rope_type": "yarn", "factor": 2.0},
        RopeSpec(
            theta=5e5, rotary_dim=128, scaling="yarn", factor=2.0, original_max_position_embeddings=2048
        ),
        4096,
    ),
    "yarn with a factor from the lengths": (
        {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512},
        RopeSpec(theta=5e5, rotary_dim=128, scaling="yarn", factor=4.0, original_max_position_embeddings=512),
        2048,
    ),
}


def test_missing_keys_take_the_defaults_of_transformers() -> None:
    from transformers import LlamaConfig

    spec, config = spec_from_hf_config(LLAMA), LlamaConfig()
    assert spec.vocab_size == config.vocab_size
    assert spec.hidden_size == config.hidden_size
    assert spec.intermediate_size == config.intermediate_size
    assert spec.num_layers == config.num_hidden_layers
    assert spec.num_heads == config.num_attention_heads
    assert spec.num_kv_heads == config.num_key_value_heads
    assert spec.head_dim == config.head_dim
    assert spec.max_position_embeddings == config.max_position_embeddings
    assert spec.rms_norm_eps == config.rms_norm_eps
    assert spec.tie_word_embeddings == config.tie_word_embeddings
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias) == (False, False, False)
    assert spec.rope == RopeSpec(theta=config.rope_parameters["rope_theta"], rotary_dim=config.head_dim)


def test_a_config_written_by_transformers_is_read_back() -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=777,
        hidden_size=96,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=333,
        rms_norm_eps=1e-4,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        dtype="bfloat16",
    )
    spec = spec_from_hf_config(json.loads(config.to_json_string()))
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size) == (777, 96, 40)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (3, 6, 2, 32)
    assert (spec.max_position_embeddings, spec.rms_norm_eps) == (333, 1e-4)
    assert (spec.tie_word_embeddings, spec.qkv_bias, spec.output_bias, spec.mlp_bias) == (True,) * 4
    assert spec.dtype == "bfloat16"


@pytest.mark.parametrize("case", ROPE_CASES)
@pytest.mark.parametrize("style", ["rope_parameters", "rope_type", "type"])
def test_rope_scaling_is_the_same_in_every_style(case: str, style: str) -> None:
    parameters, rope, context = ROPE_CASES[case]
    if style == "rope_parameters":
        config = {**LLAMA, "rope_parameters": {**parameters, "rope_theta": 5e5}}
    else:
        old = {**parameters, style: parameters["rope_type"]}
        if style == "type":
            del old["rope_type"]
        config = {**LLAMA, "rope_theta": 5e5, "rope_scaling": old}
    spec = spec_from_hf_config(config)
    assert spec.rope == rope
    assert spec.max_position_embeddings == context


@pytest.mark.parametrize("scaling", [None, {}, {"type": "default"}, {"rope_type": "default"}])
def test_theta_is_found_wherever_it_is_and_defaults_to_10000(scaling: Any) -> None:
    assert spec_from_hf_config({**LLAMA, "rope_scaling": scaling}).rope.theta == 10000.0
    assert spec_from_hf_config({**LLAMA, "rope_scaling": scaling, "rope_theta": 7}).rope.theta == 7.0
    inside = {"rope_parameters": {"rope_type": "default", "rope_theta": 8.0}, "rope_theta": 7.0}
    assert spec_from_hf_config({**LLAMA, **inside}).rope.theta == 8.0


def test_an_original_length_beside_the_parameters_takes_precedence() -> None:
    config = {**LLAMA, "rope_scaling": LLAMA3, "original_max_position_embeddings": 99}
    assert spec_from_hf_config(config).rope.original_max_position_embeddings == 99


def test_both_styles_in_one_config_must_agree() -> None:
    same = {
        **LLAMA,
        "rope_theta": 9.0,
        "rope_scaling": LLAMA3,
        "rope_parameters": {**LLAMA3, "rope_theta": 9.0},
    }
    assert spec_from_hf_config(same).rope.scaling == "llama3"
    with pytest.raises(ModelError, match="contradict"):
        spec_from_hf_config({**same, "rope_scaling": {"type": "linear", "factor": 2.0}})


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ({}, "float32"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"torch_dtype": None, "dtype": "float16"}, "float16"),
    ],
)
def test_dtype_is_read_in_both_styles(declared: dict[str, Any], expected: str) -> None:
    assert spec_from_hf_config({**LLAMA, **declared}).dtype == expected


def test_a_config_without_architectures_is_known_by_its_model_type() -> None:
    assert spec_from_hf_config({"model_type": "llama"}).family == "llama"


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "other architecture": ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
    "other head": ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    "no architecture": ({"architectures": None, "model_type": "mamba"}, "mamba"),
    "quantised": ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "context of one token": ({"max_position_embeddings": 1}, "context of the model is 1 token"),
    "pretraining_tp": ({"pretraining_tp": 2}, "pretraining_tp is 2"),
    "rope type": ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "'ntk'"),
    "longrope without factors": ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "short_factor"),
    "old rope type": ({"rope_scaling": {"type": "su", "factor": 2.0}}, "'su'"),
    "new rope type": ({"rope_parameters": {"rope_type": "mrope"}}, "'mrope'"),
    "rope per layer type": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "full_attention",
    ),
    "rope not an object": ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
    "no factor": ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
    "factor below 1": ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5"),
    "factor a string": ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2'"),
    "llama3 incomplete": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    "llama3 order": ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor 4.0"),
    "yarn order": ({"rope_scaling": {**YARN, "beta_fast": 1.0}}, "beta_fast 1.0"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "theta": ({"rope_theta": 0.0}, "rope_theta is 0.0"),
    "theta a string": ({"rope_theta": "1e4"}, "rope_theta is '1e4'"),
    "hidden by heads": ({"hidden_size": 100, "num_attention_heads": 3}, "hidden_size 100"),
    "heads by kv heads": ({"num_attention_heads": 32, "num_key_value_heads": 5}, "5 key-value heads"),
    "odd head": ({"head_dim": 65}, "head size is 65"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "negative": ({"vocab_size": -1}, "vocab_size is -1"),
    "boolean number": ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    "number as boolean": ({"attention_bias": 1}, "attention_bias is 1"),
    "epsilon": ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    "dtype": ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    "size no tensor has": ({"vocab_size": 2**31}, "vocab_size is 2147483648, but must be at most 2147483647"),
    "more layers than can be": ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, but must be at"),
    "head size beyond floats": ({"head_dim": 10**400}, "head_dim is an integer of 1329 bits"),
    "number beyond floats": ({"rms_norm_eps": 10**400}, "rms_norm_eps is an integer of 1329 bits"),
    "number beyond FP32": ({"rope_scaling": {**YARN, "beta_fast": 1e308}}, "beta_fast is 1e\\+308"),
    "number below FP32": ({"rope_scaling": {**YARN, "beta_slow": 5e-324}}, "beta_slow is 5e-324"),
    "context beyond integers": (
        {"rope_scaling": {"type": "linear", "factor": 1e30}},
        "factor is 1e\\+30, which",
    ),
    "yarn beyond integers": ({"rope_scaling": {**YARN, "factor": 1e30}}, "factor is 1e\\+30, which"),
    "long dtype": ({"dtype": [10**300]}, "dtype is"),
    "long rope type": ({"rope_scaling": {"type": "x" * 1000}}, "rope type"),
    "long quantisation": ({"quantization": "x" * 1000}, "quantization_config"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_understood_is_refused_by_name(case: str) -> None:
    changes, named = REFUSALS[case]
    with pytest.raises(ModelError, match=named.replace("(", r"\(")) as refusal:
        spec_from_hf_config({**LLAMA, **changes})
    # Whoever has read the file puts its path before the message.
    assert "config.json" not in refusal.value.message
    assert len(refusal.value.message) < 200
