"""The table of families: absent keys mean what transformers takes them for, strange ones are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tiny_vllm.errors import ModelError
from tiny_vllm.models.families import FAMILIES, Family
from tiny_vllm.models.gguf_metadata import ARCHITECTURES
from tiny_vllm.models.hf_config import spec_from_hf_config
from tiny_vllm.models.spec import ModelSpec


def config_class(family: Family) -> Any:
    import transformers

    if family.name == "gemma3":
        return transformers.Gemma3TextConfig
    return getattr(transformers, f"{family.architectures[0].removesuffix('ForCausalLM')}Config")


def read(name: str, **changes: Any) -> ModelSpec:
    (family,) = (family for family in FAMILIES if family.name == name)
    return spec_from_hf_config({"architectures": list(family.architectures), **changes})


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_absent_keys_have_the_defaults_of_transformers(family: Family) -> None:
    written = json.loads(config_class(family)().to_json_string(use_diff=False))
    written["architectures"] = list(family.architectures)
    assert read(family.name) == spec_from_hf_config(written)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_model_type_stands_for_an_absent_architecture(family: Family) -> None:
    assert config_class(family).model_type in family.model_types
    assert spec_from_hf_config({"model_type": config_class(family).model_type}).family == family.name


def test_every_gguf_architecture_belongs_to_a_family_that_names_it() -> None:
    names = {family.name: family for family in FAMILIES}
    for architecture, row in ARCHITECTURES.items():
        assert names[row.family].gguf == architecture
    assert {family.gguf for family in FAMILIES} == set(ARCHITECTURES)


def test_an_unsupported_architecture_is_told_all_supported_ones() -> None:
    with pytest.raises(ModelError) as error:
        spec_from_hf_config({"architectures": ["MambaForCausalLM"]})
    assert "MambaForCausalLM" in error.value.message
    assert error.value.hint is not None
    for family in FAMILIES:
        assert family.architectures[0] in error.value.hint


def test_a_windowed_family_without_a_window_has_no_windows() -> None:
    assert read("mistral", sliding_window=None).sliding_layers == ()
    assert read("mistral").sliding_layers == tuple(range(32))
    assert read("qwen2").sliding_layers == ()
    spec = read("qwen2", use_sliding_window=True, num_hidden_layers=30)
    assert (spec.sliding_window, spec.sliding_layers) == (4096, (28, 29))


def test_gemma_alternates_and_may_say_so_itself() -> None:
    assert read("gemma2", num_hidden_layers=5).sliding_layers == (0, 2, 4)
    assert read("gemma3", num_hidden_layers=8).sliding_layers == (0, 1, 2, 3, 4, 6, 7)
    assert read("gemma3", num_hidden_layers=4, sliding_window_pattern=2).sliding_layers == (0, 2)
    types = ["full_attention", "sliding_attention"]
    assert read("gemma2", num_hidden_layers=2, layer_types=types).sliding_layers == (1,)


def test_gemma_3_keeps_its_local_rope_apart() -> None:
    spec = read("gemma3", rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert spec.sliding_rope is not None
    assert (spec.rope.scaling, spec.rope.factor, spec.rope.theta) == ("linear", 8.0, 1e6)
    assert (spec.sliding_rope.scaling, spec.sliding_rope.theta) == ("default", 1e4)
    assert spec.layer_rope(0) == spec.sliding_rope and spec.layer_rope(5) == spec.rope


def test_gemma_3_takes_bases_from_beside_parameters_that_have_none() -> None:
    nested = {kind: {"rope_type": "default"} for kind in ("full_attention", "sliding_attention")}
    beside = {"rope_theta": 500.0, "rope_local_base_freq": 77.0}
    for parameters in (nested, {"full_attention": nested["full_attention"]}, {"sliding_attention": None}):
        spec = read("gemma3", rope_parameters=parameters, **beside)
        assert spec.sliding_rope is not None
        assert (spec.rope.theta, spec.sliding_rope.theta) == (500.0, 77.0)


@pytest.mark.parametrize("is_nested", [False, True])
def test_gemma_3_reads_the_original_length_among_the_parameters_alone(is_nested: bool) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    style = {"rope_parameters": {"full_attention": yarn}} if is_nested else {"rope_scaling": yarn}
    spec = read("gemma3", original_max_position_embeddings=16, max_position_embeddings=100, **style)
    assert spec.rope.original_max_position_embeddings == 100


def test_the_usual_scale_of_attention_is_not_a_trait() -> None:
    assert read("gemma2", query_pre_attn_scalar=256).attention_scale is None
    assert read("gemma2", query_pre_attn_scalar=144).attention_scale == 144**-0.5


def test_a_null_soft_cap_is_none() -> None:
    assert read("gemma2").attention_softcap == 50.0
    assert read("gemma2", attn_logit_softcapping=None).attention_softcap is None


def test_smollm3_says_which_layers_have_no_rotation() -> None:
    assert read("smollm3", num_hidden_layers=9).unrotated_layers == (3, 7)
    assert read("smollm3", num_hidden_layers=3, no_rope_layers=[1, 0, 1]).unrotated_layers == (1,)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "smollm3", "gpt_oss"])
def test_null_for_key_value_heads_or_the_head_size_means_that_queries_tell(name: str) -> None:
    sizes = {"hidden_size": 96, "num_attention_heads": 6}
    spec = read(name, **sizes, num_key_value_heads=None, head_dim=None)
    assert (spec.num_kv_heads, spec.head_dim) == (6, 16)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_the_number_of_experts_has_two_names(name: str, key: str) -> None:
    experts = read(name, **{key: 12}).experts
    assert experts is not None and experts.num_experts == 12


def test_layer_types_may_repeat_what_families_of_equal_layers_compute() -> None:
    full, sliding = ["full_attention"] * 24, ["sliding_attention"] * 24
    assert read("qwen3_moe", layer_types=full).sliding_layers == ()
    windows = {"use_sliding_window": True, "sliding_window": 5}
    assert read("qwen3_moe", layer_types=sliding, **windows).sliding_layers == tuple(range(24))


def test_sparse_layers_of_qwen3_moe() -> None:
    experts = read("qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[5]).experts
    assert experts is not None
    assert experts.dense_layers == (0, 2, 4, 5)
    assert (experts.num_experts, experts.num_active, experts.normalize) == (128, 8, False)


def test_the_text_part_of_a_multimodal_model_is_a_model_of_its_family() -> None:
    text = {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560}
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "torch_dtype": "bfloat16",
        "text_config": text,
    }
    assert spec_from_hf_config(whole) == read("gemma3", torch_dtype="bfloat16", **text)


@pytest.mark.parametrize("name", ["LlavaForConditionalGeneration", "Mistral3ForConditionalGeneration"])
def test_other_multimodal_models_are_refused_by_name(name: str) -> None:
    with pytest.raises(ModelError, match=name):
        spec_from_hf_config({"architectures": [name], "text_config": {"model_type": "mistral"}})


@pytest.mark.parametrize("text", [None, {"model_type": "qwen2"}, "gemma3_text"])
def test_a_multimodal_model_with_another_text_part_is_refused(text: Any) -> None:
    with pytest.raises(ModelError, match="text_config"):
        spec_from_hf_config({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})


REFUSALS: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown layer type": ("gemma2", {"layer_types": ["chunked_attention"] * 26}, "layer_types is"),
    "too few layer types": ("gemma2", {"layer_types": ["full_attention"]}, "26 times"),
    "sliding layers without a window": (
        "gemma3",
        {"layer_types": ["sliding_attention"] * 26, "sliding_window": None},
        "sliding_window is not set",
    ),
    "layer types of a mistral": ("mistral", {"layer_types": ["full_attention"] * 32}, "layer_types"),
    "layer types that Qwen3-MoE does not have": (
        "qwen3_moe",
        {"layer_types": ["full_attention"] * 24, "use_sliding_window": True, "sliding_window": 5},
        "layer_types is .* must be 24 times sliding_attention",
    ),
    "sliding layers of Qwen3-MoE with windows off": (
        "qwen3_moe",
        {"layer_types": ["sliding_attention"] * 24},
        "layer_types is .* must be 24 times full_attention",
    ),
    "two scalings of a gemma": (
        "gemma3",
        {
            "rope_parameters": {"full_attention": {"rope_type": "default"}},
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        "contradict each other",
    ),
    "bidirectional": ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    "soft cap of another gemma": ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "activation": ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
    "soft cap of zero": ("gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping is 0.0"),
    "window as text": ("mistral", {"sliding_window": "4096"}, "sliding_window is '4096'"),
    "too many active experts": ("mixtral", {"num_experts_per_tok": 9}, "9 experts per token"),
    "dense layers out of range": ("qwen3_moe", {"mlp_only_layers": [24]}, r"mlp_only_layers is \[24\]"),
    "rotation flags": ("smollm3", {"no_rope_layers": [2] * 36}, r"no_rope_layers is \[2"),
    "too few long factors": (
        "phi3",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 47}},
        "long_factor has 47 numbers, but must have 48",
    ),
    "a factor of zero": (
        "phi3",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 47 + [0.0]}},
        "long_factor: 47 is 0.0",
    ),
    "nothing rotated": ("phi3", {"partial_rotary_factor": 0.01}, "rotates 0 of 96"),
    "an odd number rotated": ("phi3", {"partial_rotary_factor": 0.12}, "rotates 11 of 96"),
    "partial rotation elsewhere": ("qwen3", {"partial_rotary_factor": 0.5}, "only 1 is supported"),
    "rope by layer type elsewhere": (
        "qwen3",
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "differs by layer type",
    ),
    "rope of unknown layers": (
        "gemma3",
        {"rope_parameters": {"chunked_attention": {"rope_type": "default"}}},
        "full_attention and sliding_attention alone",
    ),
    "unknown rope of sliding layers": (
        "gemma3",
        {"rope_parameters": {"sliding_attention": {"rope_type": "mrope"}}},
        "'mrope'",
    ),
    "layer types no text": ("qwen3", {"layer_types": [{}] * 32}, r"layer_types is \[\{\}"),
    "rotation flags no numbers": ("smollm3", {"no_rope_layers": [[]] * 36}, r"no_rope_layers is \[\[\]"),
    "more experts than can be": (
        "mixtral",
        {"num_local_experts": 2**31 - 1},
        "num_local_experts is 2147483647",
    ),
    "the same of Qwen3": ("qwen3_moe", {"num_experts": 10**6}, "num_experts is 1000000"),
    "the same of gpt-oss": ("gpt_oss", {"num_local_experts": 10**6}, "num_local_experts is 1000000"),
    "longrope of one position": (
        "phi3",
        {
            "original_max_position_embeddings": 1,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48},
        },
        "original_max_position_embeddings is 1",
    ),
    "rotated more than whole": ("phi3", {"partial_rotary_factor": 1e308}, "partial_rotary_factor is 1e"),
    "another swiglu": ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_understood_is_refused_by_name(case: str) -> None:
    name, changes, message = REFUSALS[case]
    with pytest.raises(ModelError, match=message):
        read(name, **changes)
