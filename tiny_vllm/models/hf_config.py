"""From a Hugging Face `config.json` to a ModelSpec, by the family's row.

A missing key takes the value its architecture defines for it; a value that is not understood and would change
the output is refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiny_vllm.errors import ModelError, printable, shown
from tiny_vllm.models.families import FAMILIES, LLAMA_DEFAULTS, Family, rotated_flags
from tiny_vllm.models.fields import MOST_PARTS, OTHER_VARIANT, REPAIR, Fields
from tiny_vllm.models.rope_parameters import (
    hf_rope_parameters,
    hf_rope_parameters_by_type,
    read_rope,
)
from tiny_vllm.models.spec import ModelSpec, RopeSpec
from tiny_vllm.models.spec_check import checked, divide

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS: Mapping[str, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh",),
    # Its config says "silu", which is not what it computes.
    "clamped_swiglu": ("silu",),
}


def spec_from_hf_config(config: Mapping[str, Any]) -> ModelSpec:
    """Read the contents of a Hugging Face `config.json`.

    Accepts the older style (`rope_theta`, `rope_scaling`, `torch_dtype`) and the newer one
    (`rope_parameters`, `dtype`). `spec.dtype` is what the config declares, float32 if it declares nothing;
    whoever reads the files replaces it by the type they hold. Raises ModelError naming the key.
    """
    family, config = family_of(config)
    fields = Fields(config, defaults={**LLAMA_DEFAULTS, **family.defaults})
    _refuse_unsupported(config, fields, family)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers", limit=MOST_PARTS)
    head_dim = _stated(fields, "head_dim") or divide(hidden_size, num_heads, "hidden_size")
    rope, sliding_rope, context = _ropes(config, fields, family, head_dim)
    values: dict[str, Any] = {
        "family": family.name,
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": _stated(fields, "num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "rope": rope,
        "tie_word_embeddings": fields.boolean("tie_word_embeddings"),
        "dtype": _declared_dtype(config),
        **family.traits,
        **{name: fields.boolean(key) for name, key in family.flags.items()},
    }
    for name, key in family.numbers.items():
        if fields.get(key) is not None:
            values[name] = fields.positive(key)
    if family.windows is not None:
        values["sliding_window"], values["sliding_layers"] = family.windows(fields, num_layers)
        if values["sliding_layers"] and sliding_rope != rope:
            values["sliding_rope"] = sliding_rope
    if family.has_unrotated_layers:
        flags = rotated_flags(fields, num_layers)
        values["unrotated_layers"] = tuple(index for index, flag in enumerate(flags) if not flag)
    if family.experts is not None:
        values["experts"] = family.experts(fields, num_layers)
    if family.scales_embedding:
        values["embedding_multiplier"] = hidden_size**0.5
    if family.query_scalar_key is not None:
        values["attention_scale"] = fields.positive(family.query_scalar_key) ** -0.5
    return checked(ModelSpec(**values))


def _stated(fields: Fields, key: str) -> int | None:
    """An integer, or None where the config says null: that is not the default which an absent key takes."""
    return None if fields.get(key) is None else int(fields.integer(key))


def family_of(config: Mapping[str, Any]) -> tuple[Family, Mapping[str, Any]]:
    """The row that describes this model, and the config of its text part: the whole config unless the model
    is multimodal. Raises ModelError naming the architecture if there is none.
    """
    architectures = config.get("architectures")
    if not architectures:
        model_type = config.get("model_type")
        for family in FAMILIES:
            if model_type in family.model_types:
                return family, config
        raise ModelError(
            f"no architecture is named, and model_type is {shown(model_type)}",
            hint=f"supported: {', '.join(name for family in FAMILIES for name in family.model_types)}",
        )
    for family in FAMILIES:
        if isinstance(architectures, list) and architectures in ([name] for name in family.architectures):
            return family, config
        if isinstance(architectures, list) and architectures in ([name] for name in family.wrappers):
            return family, _text_config(config, family)
    names = architectures if isinstance(architectures, list) else [architectures]
    raise ModelError(
        f"architecture {printable(', '.join(map(str, names)))} is not supported",
        hint=f"supported: {', '.join(supported_architectures())}",
    )


def supported_architectures() -> list[str]:
    return [name for family in FAMILIES for name in (*family.architectures, *family.wrappers)]


def _text_config(config: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    text = config.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type") not in family.model_types:
        kind = text.get("model_type") if isinstance(text, Mapping) else text
        raise ModelError(
            f"the text_config of this {family.name} is of type {shown(kind)}",
            hint=f"supported: {', '.join(family.model_types)}",
        )
    # What the wrapper alone may say.
    shared = ("dtype", "torch_dtype", "quantization_config")
    return {**{key: config[key] for key in shared if key in config}, **text}


def _ropes(
    config: Mapping[str, Any], fields: Fields, family: Family, head_dim: int
) -> tuple[RopeSpec, RopeSpec | None, int]:
    """The rotation, that of sliding layers if the family has one, and the context in tokens."""
    max_positions = fields.integer("max_position_embeddings")
    if family.sliding_theta is not None:
        full, sliding = hf_rope_parameters_by_type(config, family.theta, family.sliding_theta)
        return (
            read_rope(full, head_dim, max_positions)[0],
            read_rope(sliding, head_dim, max_positions)[0],
            max_positions,
        )
    if not config.get("rope_parameters"):
        config = {**config, "rope_scaling": fields.get("rope_scaling")}
    config = {**config, "original_max_position_embeddings": fields.get("original_max_position_embeddings")}
    parameters = hf_rope_parameters(config, family.theta)
    rope_type = parameters["rope_type"]
    if isinstance(rope_type, str):
        parameters["rope_type"] = family.rope_aliases.get(rope_type, rope_type)
    rope, context = read_rope(parameters, head_dim, max_positions, may_be_partial=family.has_partial_rope)
    return rope, None, context


def _refuse_unsupported(config: Mapping[str, Any], fields: Fields, family: Family) -> None:
    quantization = config.get("quantization_config") or config.get("quantization")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ModelError(
            f"quantization_config ({shown(method)}) is not supported",
            hint="use the unquantised model or a GGUF file",
        )
    key, activation = family.activation_key, fields.get(family.activation_key)
    supported = ACTIVATIONS[family.traits.get("activation", "silu")]
    if activation is not None and activation not in supported:
        raise ModelError(
            f"{key} is {shown(activation)}, but only '{supported[0]}' is supported", hint=OTHER_VARIANT
        )
    for key, values in family.neutral.items():
        if config.get(key) not in values:
            used = [value for value in values if value is not None]
            expected = f"only {used[-1]} is supported" if used else "it is not supported"
            raise ModelError(f"{key} is {shown(config[key])}, but {expected}", hint=OTHER_VARIANT)


def _declared_dtype(config: Mapping[str, Any]) -> str:
    declared = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = str(declared).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"dtype is {shown(declared)}, but must be one of {', '.join(DTYPES)}", hint=REPAIR)
    return name
