"""The families: what each means by its configuration, as rows of a table.

A row is read by `hf_config` and, where GGUF knows the family, by `gguf_metadata`. To add a family, add a row
here, its names in `weights/names.py`, and a case to the tests; what a row cannot say yet becomes a field of
ModelSpec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tiny_vllm.errors import ModelError
from tiny_vllm.models.fields import MOST_PARTS, REPAIR, Fields
from tiny_vllm.models.rope_parameters import FULL, SLIDING
from tiny_vllm.models.spec import ExpertsSpec

LLAMA_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
"""Values of absent keys in a config.json of LlamaForCausalLM."""

ATTENTION_BIAS = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}

Windows = tuple[int | None, tuple[int, ...]]
"""The window and the layers it is for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """name: of the spec. models: what people call its members. architectures: its classes in config.json.
    model_types: what config.json may say instead. wrappers: classes of multimodal models whose `text_config`
    is a config of this family; their text part alone is loaded. gguf: `general.architecture`.

    defaults: values of absent config.json keys, where they differ from a Llama's. theta: of an absent
    rope_theta; sliding_theta: the same for sliding layers, if they have a RoPE of their own.
    traits: fields of ModelSpec that all members share. flags, numbers: fields of ModelSpec that a key holds.
    windows, experts: read what several keys say, for a number of layers. activation_key: of the activation.
    rope_aliases: other names of RoPE kinds. neutral: keys of relatives, with the values that mean "not used".
    has_partial_rope: heads may be rotated in part. has_unrotated_layers: see `rotated_flags`.
    scales_embedding: by the root of the hidden size. query_scalar_key: of a number that stands for the head
    size in the scale of attention.
    """

    name: str
    models: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    gguf: str
    wrappers: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    theta: float = 10000.0
    sliding_theta: float | None = None
    traits: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    windows: Callable[[Fields, int], Windows] | None = None
    experts: Callable[[Fields, int], ExpertsSpec] | None = None
    activation_key: str = "hidden_act"
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    has_partial_rope: bool = False
    has_unrotated_layers: bool = False
    scales_embedding: bool = False
    query_scalar_key: str | None = None


def windows_everywhere(fields: Fields, num_layers: int) -> Windows:
    window = fields.integer("sliding_window") if fields.get("sliding_window") is not None else None
    return (window, tuple(range(num_layers))) if window else (None, ())


def windows_everywhere_if_on(fields: Fields, num_layers: int) -> Windows:
    """The same, if `use_sliding_window`. `layer_types` selects no layers, but may say what they are."""
    window, layers = (
        windows_everywhere(fields, num_layers) if fields.boolean("use_sliding_window") else (None, ())
    )
    types, kind = fields.get("layer_types"), SLIDING if window else FULL
    if types is not None and types != [kind] * num_layers:
        raise fields.error("layer_types", types, f"{num_layers} times {kind}")
    return window, layers


def windows_by_type(
    is_sliding: Callable[[Fields, int], bool], *, switch: str | None = None
) -> Callable[[Fields, int], Windows]:
    """Windows for the layers that `layer_types` names or, without it, those `is_sliding` picks.

    switch: the key that must be true for windows to be used at all.
    """

    def read(fields: Fields, num_layers: int) -> Windows:
        is_on = switch is None or fields.boolean(switch)
        window = fields.integer("sliding_window") if is_on and fields.get("sliding_window") else None
        types = fields.get("layer_types")
        if types is None:
            types = [SLIDING if window and is_sliding(fields, i) else FULL for i in range(num_layers)]
        if (
            not isinstance(types, list)
            or len(types) != num_layers
            or not all(kind in (FULL, SLIDING) for kind in types)
        ):
            raise fields.error("layer_types", types, f"{num_layers} times {FULL} or {SLIDING}")
        layers = tuple(index for index, kind in enumerate(types) if kind == SLIDING)
        if layers and window is None:
            raise ModelError("layer_types has sliding layers, but sliding_window is not set", hint=REPAIR)
        return (window, layers) if layers else (None, ())

    return read


def every_nth_is_full(period: int) -> Callable[[Fields, int], bool]:
    return lambda fields, layer: (layer + 1) % period != 0


def num_experts(fields: Fields) -> int:
    """Both names are in use for every family."""
    number = fields.integer("num_experts", None, limit=MOST_PARTS)
    return int(number or fields.integer("num_local_experts", limit=MOST_PARTS))


def mixtral_experts(fields: Fields, num_layers: int) -> ExpertsSpec:
    return ExpertsSpec(
        num_experts=num_experts(fields),
        num_active=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
    )


def gpt_oss_experts(fields: Fields, num_layers: int) -> ExpertsSpec:
    """Softmax over the picked logits, which is the softmax over all of them brought to a sum of 1."""
    return ExpertsSpec(
        num_experts=num_experts(fields),
        num_active=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        bias=True,
    )


def qwen3_experts(fields: Fields, num_layers: int) -> ExpertsSpec:
    step = fields.integer("decoder_sparse_step")
    dense = set(fields.indices("mlp_only_layers", num_layers))
    dense |= {layer for layer in range(num_layers) if (layer + 1) % step}
    return ExpertsSpec(
        num_experts=num_experts(fields),
        num_active=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        normalize=fields.boolean("norm_topk_prob"),
        dense_layers=tuple(sorted(dense)),
    )


QWEN_WINDOWS = windows_by_type(
    lambda fields, layer: layer >= fields.integer("max_window_layers"), switch="use_sliding_window"
)
QWEN_DEFAULTS = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
MISTRAL_DEFAULTS = {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
GEMMA_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GEMMA_TRAITS = {"norm_placement": "both", "norm_offset": 1.0, "activation": "gelu_tanh"}
CAUSAL_ONLY = {"use_bidirectional_attention": (None, False)}

FAMILIES: tuple[Family, ...] = (
    Family(
        name="llama",
        models="Llama 2, 3, 3.1, 3.2, 3.3; TinyLlama; SmolLM2",
        architectures=("LlamaForCausalLM",),
        model_types=("llama",),
        gguf="llama",
        flags={**ATTENTION_BIAS, "mlp_bias": "mlp_bias"},
        neutral={"pretraining_tp": (None, 0, 1)},
    ),
    Family(
        name="mistral",
        models="Mistral 7B; Mistral Nemo; Mistral Small",
        architectures=("MistralForCausalLM",),
        model_types=("mistral",),
        gguf="llama",
        defaults=MISTRAL_DEFAULTS,
        windows=windows_everywhere,
        neutral={"layer_types": (None,)},
    ),
    Family(
        name="mixtral",
        models="Mixtral 8x7B, 8x22B",
        architectures=("MixtralForCausalLM",),
        model_types=("mixtral",),
        gguf="llama",
        defaults={
            **MISTRAL_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
        theta=1e6,
        windows=windows_everywhere,
        experts=mixtral_experts,
    ),
    Family(
        name="qwen2",
        models="Qwen2; Qwen2.5",
        architectures=("Qwen2ForCausalLM",),
        model_types=("qwen2",),
        gguf="qwen2",
        defaults={**QWEN_DEFAULTS, "num_key_value_heads": 32},
        traits={"qkv_bias": True},
        windows=QWEN_WINDOWS,
    ),
    Family(
        name="qwen3",
        models="Qwen3",
        architectures=("Qwen3ForCausalLM",),
        model_types=("qwen3",),
        gguf="qwen3",
        defaults={**QWEN_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128},
        traits={"qk_norm": "head"},
        flags=ATTENTION_BIAS,
        windows=QWEN_WINDOWS,
    ),
    Family(
        name="qwen3_moe",
        models="Qwen3-MoE",
        architectures=("Qwen3MoeForCausalLM",),
        model_types=("qwen3_moe",),
        gguf="qwen3moe",
        defaults={
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_local_experts": 128,
            "norm_topk_prob": False,
        },
        traits={"qk_norm": "head"},
        flags=ATTENTION_BIAS,
        windows=windows_everywhere_if_on,
        experts=qwen3_experts,
    ),
    Family(
        name="gemma2",
        models="Gemma 2",
        architectures=("Gemma2ForCausalLM",),
        model_types=("gemma2",),
        gguf="gemma2",
        defaults={
            **GEMMA_DEFAULTS,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        traits=GEMMA_TRAITS,
        flags=ATTENTION_BIAS,
        numbers={"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"},
        windows=windows_by_type(every_nth_is_full(2)),
        activation_key="hidden_activation",
        neutral=CAUSAL_ONLY,
        scales_embedding=True,
        query_scalar_key="query_pre_attn_scalar",
    ),
    Family(
        name="gemma3",
        models="Gemma 3",
        architectures=("Gemma3ForCausalLM",),
        model_types=("gemma3_text",),
        wrappers=("Gemma3ForConditionalGeneration",),
        gguf="gemma3",
        defaults={**GEMMA_DEFAULTS, "vocab_size": 262208, "max_position_embeddings": 131072},
        theta=1e6,
        sliding_theta=1e4,
        traits={**GEMMA_TRAITS, "qk_norm": "head"},
        flags=ATTENTION_BIAS,
        numbers={"logit_softcap": "final_logit_softcapping"},
        windows=windows_by_type(
            lambda fields, layer: (layer + 1) % (fields.integer("sliding_window_pattern", 6)) != 0
        ),
        activation_key="hidden_activation",
        neutral={**CAUSAL_ONLY, "attn_logit_softcapping": (None,)},
        scales_embedding=True,
        query_scalar_key="query_pre_attn_scalar",
    ),
    Family(
        name="phi3",
        models="Phi-3 mini, medium; Phi-3.5 mini; Phi-4; Phi-4-mini",
        architectures=("Phi3ForCausalLM",),
        model_types=("phi3",),
        gguf="phi3",
        defaults={
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
        windows=windows_everywhere,
        rope_aliases={"su": "longrope", "yarn": "longrope"},
        has_partial_rope=True,
    ),
    Family(
        name="olmo2",
        models="OLMo 2",
        architectures=("Olmo2ForCausalLM",),
        model_types=("olmo2",),
        gguf="olmo2",
        defaults={"vocab_size": 50304, "rms_norm_eps": 1e-5},
        traits={"norm_placement": "output", "qk_norm": "whole"},
        flags=ATTENTION_BIAS,
    ),
    Family(
        name="granite",
        models="Granite 3.x (dense)",
        architectures=("GraniteForCausalLM",),
        model_types=("granite",),
        gguf="granite",
        defaults={
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        },
        flags={**ATTENTION_BIAS, "mlp_bias": "mlp_bias"},
        numbers={
            "embedding_multiplier": "embedding_multiplier",
            "logit_divisor": "logits_scaling",
            "residual_multiplier": "residual_multiplier",
            "attention_scale": "attention_multiplier",
        },
    ),
    Family(
        name="smollm3",
        models="SmolLM3",
        architectures=("SmolLM3ForCausalLM",),
        model_types=("smollm3",),
        gguf="smollm3",
        defaults={
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layer_interval": 4,
        },
        theta=2e6,
        flags={**ATTENTION_BIAS, "mlp_bias": "mlp_bias"},
        windows=windows_by_type(
            lambda fields, layer: not rotated_flags(fields, layer + 1)[layer], switch="use_sliding_window"
        ),
        has_unrotated_layers=True,
    ),
    Family(
        name="gpt_oss",
        models="gpt-oss (MXFP4 from GGUF alone)",
        architectures=("GptOssForCausalLM",),
        model_types=("gpt_oss",),
        gguf="gpt-oss",
        defaults={
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "num_experts_per_tok": 4,
            "num_local_experts": 128,
            "attention_bias": True,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        theta=150000.0,
        traits={"attention_sinks": True, "activation": "clamped_swiglu"},
        flags=ATTENTION_BIAS,
        windows=windows_by_type(every_nth_is_full(2)),
        experts=gpt_oss_experts,
        neutral={"swiglu_alpha": (None, 1.702), "swiglu_limit": (None, 7, 7.0)},
    ),
)


def rotated_flags(fields: Fields, num_layers: int) -> list[bool]:
    """Whether each layer has RoPE: `no_rope_layers` holds 1 for those that do, in spite of its name."""
    flags = fields.get("no_rope_layers")
    if flags is None:
        interval = fields.integer("no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(flags, list) or len(flags) < num_layers or not all(flag in (0, 1) for flag in flags):
        raise fields.error("no_rope_layers", flags, f"{num_layers} times 0 or 1")
    return [bool(flag) for flag in flags]
