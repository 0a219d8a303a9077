"""From the metadata of a GGUF file to a ModelSpec, by the row of its `general.architecture`.

Files say less than a config.json: which layers slide or have no RoPE, and how experts are weighted, is known
by the architecture alone. A value that is not understood and would change the output is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiny_vllm.errors import ModelError, shown
from tiny_vllm.models.families import FAMILIES, Windows
from tiny_vllm.models.fields import MOST_PARTS, OTHER_VARIANT, Fields
from tiny_vllm.models.rope_parameters import read_rope
from tiny_vllm.models.spec import ExpertsSpec, ModelSpec, RopeSpec
from tiny_vllm.models.spec_check import checked, divide

LLAMA3_LOW_FREQ_FACTOR = 1.0
LLAMA3_HIGH_FREQ_FACTOR = 4.0
LLAMA3_ORIGINAL_CONTEXT = 8192

SMOLLM3_UNROTATED_STEP = 4
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""The models whose scale of attention is that of hidden size / heads, not of the head size."""

# Keys of relatives, with the values that mean "not used"; an architecture's own keys are left out of these.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0, 1),
    # Softmax before or after the choice: the same where weights are brought to a sum of 1, as they are here.
    "expert_gating_func": (0, 1, 3),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.causal": (True,),
    "attention.scale": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.scaling.yarn_attn_factor": (1,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
}


@dataclass(frozen=True, slots=True)
class RopeTensors:
    """What tensors of a file say about RoPE; each [rotated dimensions / 2] or absent.

    freqs: `rope_freqs.weight`. short, long: `rope_factors_short.weight`, `rope_factors_long.weight`.
    """

    freqs: Sequence[float] | None = None
    short: Sequence[float] | None = None
    long: Sequence[float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """family: the row of `families` whose traits hold, and whose defaults, where the keys of `numbers` are in
    a config.json, too. numbers: fields of ModelSpec that a key holds.

    windows: read from the metadata and the number of layers. has_pair_order: the rows of Q
    and K are ordered for rotating neighbouring pairs. experts_normalize: whether experts' weights sum to 1;
    None without experts. experts_bias: experts and router have biases. truncates_yarn: see RopeSpec.
    """

    family: str
    numbers: Mapping[str, str] = field(default_factory=dict)
    windows: Callable[[Fields, int], Windows] | None = None
    has_pair_order: bool = False
    experts_normalize: bool | None = None
    experts_bias: bool = False
    truncates_yarn: bool = True


def _window(fields: Fields, default: int | None = None) -> int | None:
    """0 and an absent key mean no window."""
    key = "attention.sliding_window"
    return fields.integer(key, default) if fields.number(key, default) else None


def _everywhere(fields: Fields, num_layers: int) -> Windows:
    window = _window(fields)
    return (window, tuple(range(num_layers))) if window else (None, ())


def _by_pattern(period: int, default: int | None = None) -> Callable[[Fields, int], Windows]:
    """The last of every so many layers is full. A file may state another period, or each layer's kind."""

    def windows(fields: Fields, num_layers: int) -> Windows:
        window = _window(fields, default)
        key = "attention.sliding_window_pattern"
        pattern = fields.get(key) or period
        if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
            pattern = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
        if not isinstance(pattern, list) or len(pattern) < num_layers or not set(pattern) <= {0, 1}:
            raise fields.error(key, pattern, f"a period or {num_layers} times true or false")
        layers = tuple(layer for layer in range(num_layers) if pattern[layer])
        return (window, layers) if window and layers else (None, ())

    return windows


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        family="llama",
        windows=_everywhere,
        has_pair_order=True,
        experts_normalize=True,
    ),
    "qwen2": Architecture(family="qwen2"),
    "qwen3": Architecture(family="qwen3"),
    "qwen3moe": Architecture(family="qwen3_moe", experts_normalize=True),
    "gemma2": Architecture(
        family="gemma2",
        numbers={"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"},
        windows=_by_pattern(2, default=4096),
    ),
    "gemma3": Architecture(
        family="gemma3", numbers={"logit_softcap": "final_logit_softcapping"}, windows=_by_pattern(6)
    ),
    "phi3": Architecture(family="phi3", windows=_everywhere),
    "olmo2": Architecture(family="olmo2"),
    "granite": Architecture(
        family="granite",
        numbers={
            "attention_scale": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logit_divisor": "logit_scale",
        },
        has_pair_order=True,
    ),
    "smollm3": Architecture(family="smollm3", has_pair_order=True),
    "gpt-oss": Architecture(
        family="gpt_oss",
        windows=_by_pattern(2, default=128),
        experts_normalize=True,
        experts_bias=True,
        truncates_yarn=False,
    ),
}


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    """Raises ModelError naming the architecture if it is not supported."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelError(
            f"GGUF architecture {shown(name)} is not supported",
            hint=f"supported: {', '.join(ARCHITECTURES)}",
        )
    return ARCHITECTURES[name]


def spec_from_gguf(
    metadata: Mapping[str, Any],
    tensor_shapes: Mapping[str, tuple[int, ...]],
    *,
    dtype: str,
    rope_tensors: RopeTensors | None = None,
) -> ModelSpec:
    """Read the metadata of a GGUF file.

    tensor_shapes: shape (rows first) of each tensor; they alone tell the vocabulary, a tied head and biases.
    rope_tensors: llama3 RoPE scaling is stored as divisors of the frequencies, which are turned back into the
    parameters they were computed from, or refused. Raises ModelError naming the key.
    """
    row = architecture_of(metadata)
    name = metadata["general.architecture"]
    fields = Fields(metadata, "GGUF metadata", prefix=f"{name}.")
    _refuse_unsupported(fields, row)
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    num_layers = fields.integer("block_count", limit=MOST_PARTS)
    head_dim = fields.integer("attention.key_length", None) or divide(
        hidden_size, num_heads, f"{name}.embedding_length"
    )
    value_dim = fields.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise ModelError(
            f"GGUF metadata: {name}.attention.value_length is {value_dim}, "
            f"but only {head_dim} (head size) works",
            hint=OTHER_VARIANT,
        )
    rope, context = _rope(fields, row, head_dim, rope_tensors or RopeTensors())
    embedding = tensor_shapes.get("token_embd.weight")
    if embedding is None:
        raise ModelError("missing tensor token_embd.weight", hint="the file is incomplete")
    family = next(family for family in FAMILIES if family.name == row.family)
    values: dict[str, Any] = {
        "family": row.family,
        "vocab_size": embedding[0],
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope": rope,
        "tie_word_embeddings": "output.weight" not in tensor_shapes,
        "output_bias": "blk.0.attn_output.bias" in tensor_shapes,
        "mlp_bias": "blk.0.ffn_down.bias" in tensor_shapes,
        "dtype": dtype,
        **family.traits,
        "qkv_bias": any(f"blk.0.attn_{part}.bias" in tensor_shapes for part in ("q", "qkv")),
    }
    for field_name, key in row.numbers.items():
        value = fields.number(key, family.defaults.get(key))
        if value:
            values[field_name] = value
    if row.windows is not None:
        values["sliding_window"], values["sliding_layers"] = row.windows(fields, num_layers)
    values["experts"] = _experts(fields, row)
    values["intermediate_size"] = _intermediate_size(fields, values["experts"])
    values |= _irregular(name, fields, values)
    return checked(ModelSpec(**values))


def _refuse_unsupported(fields: Fields, row: Architecture) -> None:
    used = {*row.numbers.values()}
    if row.windows is not None:
        used.add("attention.sliding_window")
    if row.experts_normalize is not None:
        used.add("expert_count")
    for key, neutral in NEUTRAL_VALUES.items():
        value = fields.get(key)
        if key not in used and value is not None and value not in neutral:
            raise ModelError(
                f"GGUF metadata: {fields.key(key)} is {shown(value)}, which is not supported",
                hint=OTHER_VARIANT,
            )


def _experts(fields: Fields, row: Architecture) -> ExpertsSpec | None:
    if row.experts_normalize is None or not fields.get("expert_count"):
        return None
    normalize = fields.boolean("expert_weights_norm", row.experts_normalize)
    return ExpertsSpec(
        num_experts=fields.integer("expert_count", limit=MOST_PARTS),
        num_active=fields.integer("expert_used_count"),
        intermediate_size=fields.integer("expert_feed_forward_length", None)
        or fields.integer("feed_forward_length"),
        normalize=normalize,
        bias=row.experts_bias,
    )


def _intermediate_size(fields: Fields, experts: ExpertsSpec | None) -> int:
    """Where every layer has experts the size of a plain MLP may be left out."""
    if experts is None:
        return int(fields.integer("feed_forward_length"))
    return int(fields.integer("feed_forward_length", experts.intermediate_size))


def _irregular(name: str, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    """What only the architecture's name tells."""
    num_layers, experts = values["num_layers"], values["experts"]
    if name == "llama" and experts is not None:
        return {"family": "mixtral"}
    if name == "llama" and values["sliding_layers"]:
        return {"family": "mistral"}
    if name == "smollm3":
        step = SMOLLM3_UNROTATED_STEP
        return {"unrotated_layers": tuple(range(step - 1, num_layers, step))}
    if name not in ("gemma2", "gemma3"):
        return {}
    more: dict[str, Any] = {"embedding_multiplier": values["hidden_size"] ** 0.5}
    if num_layers == GEMMA_27B_LAYERS[name]:
        more["attention_scale"] = (values["hidden_size"] / values["num_heads"]) ** -0.5
    if name == "gemma3" and values["sliding_layers"]:
        theta = fields.number("rope.freq_base_swa", 10000.0)
        more["sliding_rope"] = RopeSpec(theta=theta, rotary_dim=values["head_dim"])
    return more


def _rope(fields: Fields, row: Architecture, head_dim: int, tensors: RopeTensors) -> tuple[RopeSpec, int]:
    """GGUF's RoPE metadata in Hugging Face's terms, and what they mean."""
    family = next(family for family in FAMILIES if family.name == row.family)
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    if rotary_dim != head_dim and not family.has_partial_rope:
        raise ModelError(
            f"GGUF metadata: {fields.key('rope.dimension_count')} is {rotary_dim}, "
            f"but only {head_dim} (head size) works",
            hint=OTHER_VARIANT,
        )
    theta = fields.number("rope.freq_base", 10000.0)
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", None))
    # A factor without a kind is linear.
    scaling = fields.get("rope.scaling.type") or ("none" if factor in (None, 0.0, 1.0) else "linear")
    parameters: dict[str, Any] = {
        "rope_theta": theta,
        "rope_type": "default" if scaling == "none" else scaling,
        "partial_rotary_factor": rotary_dim / head_dim,
    }
    if scaling not in ("none", "longrope"):
        parameters["factor"] = fields.number("rope.scaling.factor") if factor is None else factor
    original = fields.integer("rope.scaling.original_context_length", None)
    if original:
        parameters["original_max_position_embeddings"] = original
    correction = fields.number("rope.scaling.attn_factor", None)
    if scaling == "yarn":
        parameters["beta_fast"] = fields.number("rope.scaling.yarn_beta_fast", 32.0)
        parameters["beta_slow"] = fields.number("rope.scaling.yarn_beta_slow", 1.0)
        # GGUF stores a correction of YaRN's own attention factor, Hugging Face the factor itself.
        growth = 0.1 * math.log(max(parameters["factor"], 1.0)) + 1.0
        parameters["attention_factor"] = growth if correction is None else correction * growth
        parameters["truncate"] = row.truncates_yarn
    if tensors.short is not None or tensors.long is not None:
        parameters |= {"rope_type": "longrope", "short_factor": tensors.short, "long_factor": tensors.long}
        parameters["attention_factor"] = correction
    if tensors.freqs is not None:
        if parameters["rope_type"] != "default":
            raise ModelError(
                f"rope_freqs.weight beside rope scaling {shown(scaling)} is not supported", hint=OTHER_VARIANT
            )
        parameters |= _llama3_parameters(tensors.freqs, theta, head_dim)
    context = fields.integer("context_length")
    rope, reached = read_rope(parameters, head_dim, context, may_be_partial=family.has_partial_rope)
    # Where sliding layers have a RoPE of their own, only the others are scaled, and the context is stated.
    return rope, reached if family.sliding_theta is None else context


def _llama3_parameters(factors: Sequence[float], theta: float, head_dim: int) -> dict[str, Any]:
    """The llama3 parameters that give these divisors of the RoPE frequencies.

    Every Llama 3.1, 3.2 and 3.3 uses the same ramp and original context; only the factor differs, and it is
    the divisor of the lowest frequency. Anything these parameters do not reproduce is refused.
    """
    factor = max(factors, default=1.0)
    parameters = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW_FREQ_FACTOR,
        "high_freq_factor": LLAMA3_HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": LLAMA3_ORIGINAL_CONTEXT,
    }
    # float32 storage and arithmetic of the writer leave a few units in the last place; 1e-4 is far above
    # those and far below any real difference of parameters.
    plausible = 1.0 <= factor < math.inf and theta > 1.0 and len(factors) == head_dim // 2
    if not plausible or not all(
        math.isclose(given, _llama3_divisor(theta ** (-2 * index / head_dim), factor), rel_tol=1e-4)
        for index, given in enumerate(factors)
    ):
        raise ModelError(
            "rope_freqs.weight holds RoPE factors that are not those of Llama 3.1, 3.2 or 3.3",
            hint=OTHER_VARIANT,
        )
    return parameters


def _llama3_divisor(frequency: float, factor: float) -> float:
    """By what llama3 scaling divides one RoPE frequency (radians per token), with Llama 3's constants."""
    rotations = LLAMA3_ORIGINAL_CONTEXT * frequency / (2 * math.pi)
    share = (rotations - LLAMA3_LOW_FREQ_FACTOR) / (LLAMA3_HIGH_FREQ_FACTOR - LLAMA3_LOW_FREQ_FACTOR)
    share = min(max(share, 0.0), 1.0)
    return 1.0 / (share + (1.0 - share) / factor)
