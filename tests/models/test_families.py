"""Configurations of the Llama family become the spec transformers would use, or are refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tiny_vllm.errors import ModelError
from tiny_vllm.models.families import spec_from_gguf, spec_from_hf_config
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

# The head size of these is the default: 4096 / 32.
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 4096,
    "llama.embedding_length": 4096,
    "llama.feed_forward_length": 11008,
    "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 8,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
}
GGUF_SHAPES: dict[str, tuple[int, ...]] = {"token_embd.weight": (1000, 4096), "output.weight": (1000, 4096)}


def gguf_spec(changes: dict[str, Any], factors: list[float] | None = None) -> Any:
    metadata = {key: value for key, value in {**GGUF, **changes}.items() if value is not None}
    return spec_from_gguf(metadata, GGUF_SHAPES, dtype="float16", rope_factors=factors)


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
    "other architecture": ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
    "other head": ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    "no architecture": ({"architectures": None, "model_type": "mamba"}, "mamba"),
    "quantised": ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "pretraining_tp": ({"pretraining_tp": 2}, "pretraining_tp is 2"),
    "rope type": ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'"),
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
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_understood_is_refused_by_name(case: str) -> None:
    changes, named = REFUSALS[case]
    with pytest.raises(ModelError, match=named.replace("(", r"\(")):
        spec_from_hf_config({**LLAMA, **changes})


def test_gguf_metadata_becomes_a_spec() -> None:
    spec = gguf_spec({})
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size) == (1000, 4096, 11008)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 32, 8, 128)
    assert (spec.max_position_embeddings, spec.rms_norm_eps, spec.dtype) == (4096, 1e-5, "float16")
    assert spec.rope == RopeSpec(theta=500000.0, rotary_dim=128)
    assert not spec.tie_word_embeddings
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias) == (False, False, False)


def test_gguf_tensors_tell_a_tied_head_and_biases() -> None:
    shapes = {
        "token_embd.weight": (1000, 4096),
        "blk.0.attn_q.bias": (4096,),
        "blk.0.attn_output.bias": (4096,),
        "blk.0.ffn_down.bias": (4096,),
    }
    spec = spec_from_gguf(GGUF, shapes, dtype="float16")
    assert (spec.tie_word_embeddings, spec.qkv_bias, spec.output_bias, spec.mlp_bias) == (True,) * 4


def test_gguf_defaults() -> None:
    spec = gguf_spec({"llama.attention.head_count_kv": None, "llama.rope.freq_base": None})
    assert spec.num_kv_heads == 32
    assert spec.rope.theta == 10000.0


def test_gguf_head_size_may_be_stated() -> None:
    sizes = {"attention.key_length": 64, "attention.value_length": 64, "rope.dimension_count": 64}
    assert gguf_spec({f"llama.{key}": value for key, value in sizes.items()}).head_dim == 64


def test_gguf_numbers_repeated_for_every_layer_are_one_number() -> None:
    assert gguf_spec({"llama.attention.head_count_kv": [8, 8]}).num_kv_heads == 8


def test_gguf_linear_scaling() -> None:
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    for changes in (scaling, {"llama.rope.scale_linear": 2.0}):
        spec = gguf_spec(changes)
        assert (spec.rope.scaling, spec.rope.factor, spec.max_position_embeddings) == ("linear", 2.0, 8192)


def test_gguf_yarn_has_the_attention_factor_of_hugging_face() -> None:
    scaling = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 1024,
    }
    rope = gguf_spec(scaling).rope
    assert (rope.scaling, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 1024)
    assert (rope.beta_fast, rope.beta_slow) == (32.0, 1.0)
    assert rope.attention_factor == pytest.approx(attention_factor_of_transformers(), rel=1e-12)
    corrected = gguf_spec({**scaling, "llama.rope.scaling.attn_factor": 0.5}).rope
    assert corrected.attention_factor == pytest.approx(0.5 * attention_factor_of_transformers(), rel=1e-12)


def attention_factor_of_transformers() -> float:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    return float(ROPE_INIT_FUNCTIONS["yarn"](LlamaConfig(rope_parameters=parameters), torch.device("cpu"))[1])


def llama3_divisors(factor: float, original: int = 8192) -> list[float]:
    """What rope_freqs.weight holds: default frequencies divided by scaled ones, both from transformers."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {**LLAMA3, "factor": factor, "original_max_position_embeddings": original, "rope_theta": 5e5}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(rope_parameters=parameters), torch.device("cpu"))
    plain = 5e5 ** (-torch.arange(0, 128, 2) / 128)
    return (plain / scaled).tolist()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_gguf_rope_factors_are_turned_back_into_llama3_parameters(factor: float) -> None:
    spec = gguf_spec({}, llama3_divisors(factor))
    assert spec.rope.scaling == "llama3"
    assert spec.rope.factor == pytest.approx(factor, rel=1e-6)
    assert spec.rope.original_max_position_embeddings == 8192
    assert (spec.rope.low_freq_factor, spec.rope.high_freq_factor) == (1.0, 4.0)
    assert spec.max_position_embeddings == 4096


FOREIGN_FACTORS: dict[str, Callable[[], list[float]]] = {
    "another original length": lambda: llama3_divisors(8.0, original=4096),
    "no ramp": lambda: [1.0] * 63 + [8.0],
    "too few": lambda: llama3_divisors(8.0)[:-1],
    "none": list,
    "zeros": lambda: [0.0] * 64,
    "infinite": lambda: [math.inf] * 64,
    "not numbers": lambda: [math.nan] * 64,
}


@pytest.mark.parametrize("case", FOREIGN_FACTORS)
def test_gguf_rope_factors_of_other_models_are_refused(case: str) -> None:
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        gguf_spec({}, FOREIGN_FACTORS[case]())


GGUF_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"general.architecture": "qwen3"}, "'qwen3'"),
    "no architecture": ({"general.architecture": None}, "None"),
    "experts": ({"llama.expert_count": 8}, "llama.expert_count is 8"),
    "window": ({"llama.attention.sliding_window": 128}, "llama.attention.sliding_window is 128"),
    "no layers": ({"llama.block_count": None}, "llama.block_count is missing"),
    "heads by layer": ({"llama.attention.head_count_kv": [8, 4]}, r"head_count_kv is \[8, 4\]"),
    "value size": ({"llama.attention.value_length": 64}, "llama.attention.value_length is 64"),
    "partial rotary": ({"llama.rope.dimension_count": 64}, "llama.rope.dimension_count is 64"),
    "rope type": ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "'longrope'"),
    "no factor": ({"llama.rope.scaling.type": "linear"}, "factor is missing"),
    "text for a number": ({"llama.context_length": "4096"}, "llama.context_length is '4096'"),
}


@pytest.mark.parametrize("case", GGUF_REFUSALS)
def test_gguf_metadata_that_is_not_understood_is_refused_by_name(case: str) -> None:
    changes, named = GGUF_REFUSALS[case]
    with pytest.raises(ModelError, match=named):
        gguf_spec(changes)


def test_gguf_without_an_embedding_is_refused() -> None:
    with pytest.raises(ModelError, match=r"token_embd\.weight"):
        spec_from_gguf(GGUF, {}, dtype="float16")
