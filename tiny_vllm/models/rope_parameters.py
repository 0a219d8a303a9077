"""From the RoPE parameters of a checkpoint, in Hugging Face's terms, to a RopeSpec.

Both styles of config.json are read: `rope_theta` and `rope_scaling`, and `rope_parameters`, flat or by layer
type. Unknown kinds are refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from tiny_vllm.errors import ModelError, printable, shown
from tiny_vllm.models.fields import LARGEST, OTHER_VARIANT, REPAIR, Fields
from tiny_vllm.models.spec import RopeScaling, RopeSpec

FULL, SLIDING = "full_attention", "sliding_attention"


def hf_rope_parameters(config: Mapping[str, Any], default_theta: float) -> dict[str, Any]:
    """One flat dict with `rope_type`, `rope_theta` and `partial_rotary_factor`, whichever style it has.

    Raises ModelError for parameters by layer type.
    """
    given = [_flat(config, key) for key in ("rope_scaling", "rope_parameters") if config.get(key)]
    theta = next((flat["rope_theta"] for flat in given if flat.get("rope_theta") is not None), None)
    theta = config.get("rope_theta") if theta is None else theta
    common = {
        "rope_theta": default_theta if theta is None else theta,
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
    }
    for flat in given:
        flat["rope_theta"] = common["rope_theta"]
        flat.setdefault("partial_rotary_factor", common["partial_rotary_factor"])
    if len(given) == 2 and given[0] != given[1]:
        raise ModelError(
            f"rope_scaling {shown(config['rope_scaling'])} and rope_parameters "
            f"{shown(config['rope_parameters'])} contradict each other",
            hint="remove one of them",
        )
    parameters = given[0] if given else {"rope_type": "default", **common}
    original = config.get("original_max_position_embeddings")
    if original is not None:
        parameters["original_max_position_embeddings"] = original
    return parameters


def hf_rope_parameters_by_type(
    config: Mapping[str, Any], default_theta: float, sliding_theta: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same for layers of full attention, and for sliding ones.

    The older style keeps the base of sliding layers, which are never scaled, in `rope_local_base_freq`. There
    and in `rope_theta` the newer one looks, too, for a base that its parameters lack. An original length is
    read among the parameters alone.
    """
    nested = config.get("rope_parameters") or {}
    if not isinstance(nested, Mapping) or not set(nested) <= {FULL, SLIDING}:
        raise ModelError(
            f"rope_parameters is {shown(nested)}, but must hold {FULL} and {SLIDING} alone", hint=REPAIR
        )
    full = {**config, "rope_parameters": nested.get(FULL), "original_max_position_embeddings": None}
    sliding = {"rope_parameters": nested.get(SLIDING), "rope_theta": config.get("rope_local_base_freq")}
    return hf_rope_parameters(full, default_theta), hf_rope_parameters(sliding, sliding_theta)


def _flat(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config[key]
    if not isinstance(value, Mapping):
        raise ModelError(f"{key} is {shown(value)}, but must be an object", hint=REPAIR)
    nested = [name for name, inner in value.items() if isinstance(inner, Mapping)]
    if nested:
        raise ModelError(
            f"{key} differs by layer type ({printable(', '.join(nested))}), "
            "which this architecture does not have",
            hint=REPAIR,
        )
    flat = dict(value)
    flat["rope_type"] = flat.get("rope_type", flat.get("type", "default"))
    flat.pop("type", None)
    return flat


def read_rope(
    parameters: Mapping[str, Any], head_dim: int, max_positions: int, *, may_be_partial: bool = False
) -> tuple[RopeSpec, int]:
    """The RopeSpec, and the context it reaches (tokens).

    linear and dynamic configs state the length before scaling, yarn states it separately, so the context is
    that length x factor; the others state the context itself. may_be_partial: whether the family has
    heads that are rotated in part.
    """
    fields = Fields(parameters, "RoPE parameters")
    rope_type: Any = parameters.get("rope_type")
    if rope_type not in get_args(RopeScaling):
        raise ModelError(
            f"rope type {shown(rope_type)} is not supported",
            hint=f"supported: {', '.join(get_args(RopeScaling))}",
        )
    common: dict[str, Any] = {
        "theta": fields.number("rope_theta"),
        "rotary_dim": _rotary_dim(fields, head_dim, may_be_partial),
        "scaling": rope_type,
    }
    if rope_type == "default":
        return RopeSpec(**common), max_positions
    original = fields.integer("original_max_position_embeddings", max_positions)
    if rope_type in ("yarn", "longrope") and parameters.get("factor") is None:
        factor = max_positions / original
    else:
        factor = fields.number("factor")
    if factor < 1.0:
        raise ModelError(f"RoPE parameters: factor is {factor}, but must be at least 1", hint=REPAIR)
    if original * factor > LARGEST:
        raise ModelError(
            f"RoPE parameters: factor is {factor}, which takes {original} tokens beyond {LARGEST}",
            hint=REPAIR,
        )
    # Dynamic scaling is defined against the configured length, whatever else the parameters say.
    original = max_positions if rope_type == "dynamic" else original
    common |= {"factor": factor, "original_max_position_embeddings": original}
    if rope_type == "llama3":
        return RopeSpec(**common, **_llama3(fields)), max_positions
    if rope_type == "longrope":
        if original < 2:
            raise ModelError(
                f"RoPE parameters: original_max_position_embeddings is {original}, but longrope needs 2",
                hint=REPAIR,
            )
        return RopeSpec(**common, **_longrope(fields, common["rotary_dim"])), max_positions
    if rope_type == "yarn":
        return RopeSpec(**common, **_yarn(fields)), int(original * factor)
    return RopeSpec(**common), int(original * factor)


def _rotary_dim(fields: Fields, head_dim: int, may_be_partial: bool) -> int:
    share = fields.number("partial_rotary_factor", 1.0)
    if share != 1.0 and not may_be_partial:
        raise ModelError(f"partial_rotary_factor is {share}, but only 1 is supported", hint=OTHER_VARIANT)
    if head_dim % 2:
        raise ModelError(f"head size is {head_dim}, but rotary embedding needs an even one", hint=REPAIR)
    if share > 1.0:
        raise ModelError(f"partial_rotary_factor is {share}, but must be at most 1", hint=REPAIR)
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ModelError(
            f"partial_rotary_factor is {share}: that rotates {rotary_dim} of {head_dim} dimensions, "
            "but it must be an even number of them",
            hint=REPAIR,
        )
    return rotary_dim


def _llama3(fields: Fields) -> dict[str, Any]:
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if low >= high:
        raise ModelError(
            f"RoPE parameters: low_freq_factor {low} is not below high_freq_factor {high}", hint=REPAIR
        )
    return {"low_freq_factor": low, "high_freq_factor": high}


def _yarn(fields: Fields) -> dict[str, Any]:
    fast = fields.number("beta_fast", None) or 32.0
    slow = fields.number("beta_slow", None) or 1.0
    if fast <= slow:
        raise ModelError(f"RoPE parameters: beta_fast {fast} is not above beta_slow {slow}", hint=REPAIR)
    return {
        "beta_fast": fast,
        "beta_slow": slow,
        "attention_factor": fields.number("attention_factor", None),
        "mscale": fields.number("mscale", None),
        "mscale_all_dim": fields.number("mscale_all_dim", None),
        "truncate": fields.boolean("truncate", True),
    }


def _longrope(fields: Fields, rotary_dim: int) -> dict[str, Any]:
    factors = {}
    for name in ("short_factor", "long_factor"):
        values = fields.get(name)
        if not isinstance(values, list | tuple):
            raise fields.error(name, values, "a list of numbers")
        numbers = Fields(dict(zip(map(str, range(len(values))), values, strict=True)), f"RoPE {name}")
        if len(values) != rotary_dim // 2:
            raise ModelError(
                f"RoPE parameters: {name} has {len(values)} numbers, but must have {rotary_dim // 2}",
                hint=REPAIR,
            )
        factors[f"{name}s"] = tuple(numbers.positive(index) for index in numbers.values)
    return {**factors, "attention_factor": fields.number("attention_factor", None)}
