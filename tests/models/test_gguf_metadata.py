"""GGUF metadata become the spec that the file's writer meant, or are refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tiny_vllm.errors import ModelError
from tiny_vllm.models.gguf_metadata import RopeTensors, spec_from_gguf
from tiny_vllm.models.spec import RopeSpec

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
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
    return spec_from_gguf(metadata, GGUF_SHAPES, dtype="float16", rope_tensors=RopeTensors(freqs=factors))


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
    old = {"llama.rope.scale_linear": 2.0}
    # A factor without a kind is linear.
    factor = {"llama.rope.scaling.factor": 2.0}
    for changes in (scaling, old, factor, {**old, "llama.rope.scaling.type": "linear"}):
        spec = gguf_spec(changes)
        assert (spec.rope.scaling, spec.rope.factor, spec.max_position_embeddings) == ("linear", 2.0, 8192)


@pytest.mark.parametrize("factor", ["scaling.factor", "scale_linear"])
@pytest.mark.parametrize(("kind", "value"), [("none", 2.0), (None, 1.0), (None, 0.0)])
def test_gguf_factors_that_scale_nothing(factor: str, kind: str | None, value: float) -> None:
    spec = gguf_spec({"llama.rope.scaling.type": kind, f"llama.rope.{factor}": value})
    assert (spec.rope.scaling, spec.max_position_embeddings) == ("default", 4096)


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
    "architecture": ({"general.architecture": "mamba"}, "'mamba'"),
    "no architecture": ({"general.architecture": None}, "None"),
    "experts without their number per token": (
        {"llama.expert_count": 8},
        "llama.expert_used_count is missing",
    ),
    "scale of experts": ({"llama.expert_weights_scale": 2.5}, "llama.expert_weights_scale is 2.5"),
    "clamp": ({"llama.attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv is 8"),
    "no layers": ({"llama.block_count": None}, "llama.block_count is missing"),
    "heads by layer": ({"llama.attention.head_count_kv": [8, 4]}, r"head_count_kv is \[8, 4\]"),
    "value size": ({"llama.attention.value_length": 64}, "llama.attention.value_length is 64"),
    "partial rotary": ({"llama.rope.dimension_count": 64}, "llama.rope.dimension_count is 64"),
    "rope type": ({"llama.rope.scaling.type": "mrope", "llama.rope.scaling.factor": 2.0}, "'mrope'"),
    "longrope without factors": ({"llama.rope.scaling.type": "longrope"}, "short_factor is None"),
    "no factor": ({"llama.rope.scaling.type": "linear"}, "factor is missing"),
    "more layers than can be": ({"llama.block_count": 2**32 - 1}, "llama.block_count is 4294967295"),
    "more experts than can be": (
        {"llama.expert_count": 2**31 - 1, "llama.expert_used_count": 2},
        "llama.expert_count is 2147483647",
    ),
    "window beyond integers": (
        {"llama.attention.sliding_window": 2**63},
        "sliding_window is 9223372036854775808",
    ),
    "no MLP size": ({"llama.feed_forward_length": None}, "llama.feed_forward_length is missing"),
    "text for a number": ({"llama.context_length": "4096"}, "llama.context_length is '4096'"),
}


@pytest.mark.parametrize("case", GGUF_REFUSALS)
def test_gguf_metadata_that_is_not_understood_is_refused_by_name(case: str) -> None:
    changes, named = GGUF_REFUSALS[case]
    with pytest.raises(ModelError, match=named):
        gguf_spec(changes)


def gemma3_spec(**changes: Any) -> Any:
    metadata = {key.replace("llama.", "gemma3."): value for key, value in GGUF.items()}
    metadata |= {"general.architecture": "gemma3", "gemma3.block_count": 8}
    metadata |= {f"gemma3.attention.{key}": value for key, value in changes.items()}
    return spec_from_gguf(metadata, GGUF_SHAPES, dtype="bfloat16")


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [(None, (0, 1, 2, 3, 4, 6, 7)), (4, (0, 1, 2, 4, 5, 6)), ([True, False] * 4, (0, 2, 4, 6))],
)
def test_gguf_sliding_layers_are_known_by_the_architecture_unless_stated(
    pattern: Any, layers: tuple[int, ...]
) -> None:
    more = {} if pattern is None else {"sliding_window_pattern": pattern}
    spec = gemma3_spec(sliding_window=512, **more)
    assert (spec.sliding_window, spec.sliding_layers) == (512, layers)
    assert spec.sliding_rope == RopeSpec(theta=10000.0, rotary_dim=128)


def test_gguf_without_a_window_has_one_rope_for_all_layers() -> None:
    for changes in ({}, {"sliding_window": 0}):
        spec = gemma3_spec(**changes)
        assert (spec.sliding_window, spec.sliding_layers, spec.sliding_rope) == (None, (), None)


def test_gguf_of_the_largest_gemma_scales_attention_by_its_width() -> None:
    metadata = {key.replace("llama.", "gemma2."): value for key, value in GGUF.items()}
    metadata |= {"general.architecture": "gemma2", "gemma2.attention.key_length": 64}
    metadata |= {"gemma2.context_length": 8192}
    small = spec_from_gguf(metadata, GGUF_SHAPES, dtype="bfloat16")
    large = spec_from_gguf({**metadata, "gemma2.block_count": 46}, GGUF_SHAPES, dtype="bfloat16")
    assert small.attention_scale is None
    assert large.attention_scale == (4096 / 32) ** -0.5
    assert large.sliding_window == 4096


def test_gguf_files_older_than_soft_caps_and_windows_have_those_of_their_architecture() -> None:
    def read(architecture: str, **more: Any) -> Any:
        metadata = {key.replace("llama.", f"{architecture}."): value for key, value in GGUF.items()}
        metadata |= {f"{architecture}.{key}": value for key, value in more.items()}
        return spec_from_gguf(
            {**metadata, "general.architecture": architecture}, GGUF_SHAPES, dtype="bfloat16"
        )

    assert (read("gemma2").attention_softcap, read("gemma2").logit_softcap) == (50.0, 30.0)
    none = read("gemma2", attn_logit_softcapping=0.0, final_logit_softcapping=0.0)
    assert (none.attention_softcap, none.logit_softcap) == (None, None)
    assert read("gemma3").logit_softcap is None
    oss = read("gpt-oss", expert_count=8, expert_used_count=2)
    assert (oss.sliding_window, oss.sliding_layers) == (128, (0,))


def test_gguf_llama_files_of_relatives_are_told_by_their_keys() -> None:
    assert gguf_spec({"llama.attention.sliding_window": 1024}).family == "mistral"
    experts = {"llama.expert_count": 8, "llama.expert_used_count": 2}
    spec = gguf_spec(experts)
    assert (spec.family, spec.experts.num_experts, spec.experts.intermediate_size) == ("mixtral", 8, 11008)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "olmo2", "granite", "smollm3"])
def test_gguf_windows_are_refused_where_the_family_has_none(architecture: str) -> None:
    metadata = {key.replace("llama.", f"{architecture}."): value for key, value in GGUF.items()}
    metadata |= {"general.architecture": architecture, f"{architecture}.attention.sliding_window": 4096}
    with pytest.raises(ModelError, match=f"{architecture}.attention.sliding_window is 4096"):
        spec_from_gguf(metadata, GGUF_SHAPES, dtype="bfloat16")


def test_gguf_without_an_embedding_is_refused() -> None:
    with pytest.raises(ModelError, match=r"token_embd\.weight"):
        spec_from_gguf(GGUF, {}, dtype="float16")
