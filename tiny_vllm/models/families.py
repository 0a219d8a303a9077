"""From a checkpoint's own description to a ModelSpec: what each family means by its configuration.

Supported: the Llama family (Llama 2, 3, 3.1, 3.2, TinyLlama, SmolLM2), described by a Hugging Face
`config.json` of either style or by GGUF metadata. A missing key takes the value its architecture defines for
it; a value that is not understood and would change the output is refused by name, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from tiny_vllm.errors import ModelError
from tiny_vllm.models.spec import ModelSpec, RopeScaling, RopeSpec

DTYPES = ("float32", "bfloat16", "float16")

LLAMA3_LOW_FREQ_FACTOR = 1.0
LLAMA3_HIGH_FREQ_FACTOR = 4.0
LLAMA3_ORIGINAL_CONTEXT = 8192

# GGUF keys of relatives that share the architecture's name, with the value that means "not used".
GGUF_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attention.sliding_window": (0,),
    "attention.clamp_kqv": (0,),
    "attention.causal": (True,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "attention.scale": (0,),
}


def spec_from_hf_config(config: Mapping[str, Any]) -> ModelSpec:
    """Read the contents of a Hugging Face `config.json`.

    Accepts the older style (`rope_theta`, `rope_scaling`, `torch_dtype`) and the newer one
    (`rope_parameters`, `dtype`). `spec.dtype` is what the config declares, float32 if it declares nothing;
    whoever reads the files replaces it by the type they hold. Raises ModelError naming the key.
    """
    fields = _Fields(config, "config.json")
    _check_architecture(config)
    _refuse_unsupported(config)
    hidden_size = fields.integer("hidden_size", 4096)
    num_heads = fields.integer("num_attention_heads", 32)
    head_dim = fields.integer("head_dim", None) or _divide(hidden_size, num_heads, "hidden_size")
    max_positions = fields.integer("max_position_embeddings", 2048)
    parameters = _hf_rope_parameters(config)
    original = config.get("original_max_position_embeddings")
    if original is not None:
        parameters["original_max_position_embeddings"] = original
    rope, context = _rope(parameters, head_dim, max_positions)
    attention_bias = fields.boolean("attention_bias", False)
    return _checked(
        ModelSpec(
            family="llama",
            vocab_size=fields.integer("vocab_size", 32000),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size", 11008),
            num_layers=fields.integer("num_hidden_layers", 32),
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", None) or num_heads,
            head_dim=head_dim,
            max_position_embeddings=context,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=rope,
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=fields.boolean("mlp_bias", False),
            dtype=_declared_dtype(config),
        )
    )


def spec_from_gguf(
    metadata: Mapping[str, Any],
    tensor_shapes: Mapping[str, tuple[int, ...]],
    *,
    dtype: str,
    rope_factors: Sequence[float] | None = None,
) -> ModelSpec:
    """Read the metadata of a GGUF file whose `general.architecture` is "llama".

    tensor_shapes: shape (rows first) of each tensor; they alone tell the vocabulary, a tied head and biases.
    rope_factors: contents of `rope_freqs.weight` [head_dim / 2], the form in which llama3 RoPE scaling is
    stored; they are turned back into the parameters they were computed from, or refused.
    Raises ModelError naming the key.
    """
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelError(f"GGUF architecture {architecture!r} is not supported", hint="supported: llama")
    fields = _Fields(metadata, "GGUF metadata", prefix="llama.")
    for key, neutral in GGUF_NEUTRAL_VALUES.items():
        value = metadata.get(f"llama.{key}")
        if value is not None and value not in neutral:
            raise ModelError(f"GGUF metadata: llama.{key} is {value!r}, which is not supported")
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", None) or _divide(
        hidden_size, num_heads, "llama.embedding_length"
    )
    value_dim = fields.integer("attention.value_length", head_dim)
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    for name, size in (("attention.value_length", value_dim), ("rope.dimension_count", rotary_dim)):
        if size != head_dim:
            raise ModelError(f"GGUF metadata: llama.{name} is {size}, but only {head_dim} (head size) works")
    parameters = _gguf_rope_parameters(fields, rope_factors, head_dim)
    rope, context = _rope(parameters, head_dim, fields.integer("context_length"))
    embedding = tensor_shapes.get("token_embd.weight")
    if embedding is None:
        raise ModelError("missing tensor token_embd.weight", hint="the file is incomplete")
    return _checked(
        ModelSpec(
            family="llama",
            vocab_size=embedding[0],
            hidden_size=hidden_size,
            intermediate_size=fields.integer("feed_forward_length"),
            num_layers=fields.integer("block_count"),
            num_heads=num_heads,
            num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_position_embeddings=context,
            rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            rope=rope,
            tie_word_embeddings="output.weight" not in tensor_shapes,
            qkv_bias="blk.0.attn_q.bias" in tensor_shapes,
            output_bias="blk.0.attn_output.bias" in tensor_shapes,
            mlp_bias="blk.0.ffn_down.bias" in tensor_shapes,
            dtype=dtype,
        )
    )


def _check_architecture(config: Mapping[str, Any]) -> None:
    architectures = config.get("architectures")
    if architectures:
        if list(architectures) != ["LlamaForCausalLM"]:
            raise ModelError(
                f"architecture {', '.join(map(str, architectures))} is not supported",
                hint="supported: LlamaForCausalLM",
            )
    elif config.get("model_type") != "llama":
        raise ModelError(
            f"config.json names no architecture and its model_type is {config.get('model_type')!r}",
            hint="supported: architectures ['LlamaForCausalLM'], model_type 'llama'",
        )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config") or config.get("quantization")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ModelError(
            f"quantization_config ({method}) is not supported",
            hint="use the unquantised model or a GGUF file",
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act is {activation!r}, but only 'silu' is supported")
    pretraining_tp = config.get("pretraining_tp", 1)
    if pretraining_tp not in (None, 0, 1):
        raise ModelError(f"pretraining_tp is {pretraining_tp!r}, but only 1 is supported")


def _declared_dtype(config: Mapping[str, Any]) -> str:
    declared = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = str(declared).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"dtype is {declared!r}, but must be one of {', '.join(DTYPES)}")
    return name


def _hf_rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """One flat dict with `rope_type` and `rope_theta`, whichever style the config has."""
    given: list[dict[str, Any]] = []
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key)
        if not value:
            continue
        if not isinstance(value, Mapping):
            raise ModelError(f"config.json: {key} is {value!r:.80}, but must be an object")
        nested = [name for name, inner in value.items() if isinstance(inner, Mapping)]
        if nested:
            raise ModelError(
                f"config.json: {key} differs by layer type ({', '.join(nested)}), "
                "which this architecture does not have"
            )
        flat = dict(value)
        flat["rope_type"] = flat.get("rope_type", flat.get("type", "default"))
        flat.pop("type", None)
        given.append(flat)
    theta = next((flat["rope_theta"] for flat in given if flat.get("rope_theta") is not None), None)
    if theta is None:
        theta = config.get("rope_theta")
    for flat in given:
        flat["rope_theta"] = 10000.0 if theta is None else theta
        flat.setdefault("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if len(given) == 2 and given[0] != given[1]:
        raise ModelError("config.json: rope_scaling and rope_parameters contradict each other")
    if given:
        return given[0]
    return {
        "rope_type": "default",
        "rope_theta": 10000.0 if theta is None else theta,
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
    }


def _gguf_rope_parameters(
    fields: _Fields, rope_factors: Sequence[float] | None, head_dim: int
) -> dict[str, Any]:
    """GGUF's RoPE metadata in Hugging Face's terms."""
    theta = fields.number("rope.freq_base", 10000.0)
    scaling = fields.values.get("llama.rope.scaling.type", "none")
    parameters: dict[str, Any] = {
        "rope_theta": theta,
        "rope_type": "default" if scaling == "none" else scaling,
    }
    linear = fields.number("rope.scale_linear", 1.0)
    if scaling == "none" and linear != 1.0:
        parameters |= {"rope_type": "linear", "factor": linear}
    if scaling != "none":
        parameters["factor"] = fields.number("rope.scaling.factor")
    original = fields.integer("rope.scaling.original_context_length", None)
    if original:
        parameters["original_max_position_embeddings"] = original
    if scaling == "yarn":
        parameters["beta_fast"] = fields.number("rope.scaling.yarn_beta_fast", 32.0)
        parameters["beta_slow"] = fields.number("rope.scaling.yarn_beta_slow", 1.0)
        correction = fields.number("rope.scaling.attn_factor", 1.0)
        # GGUF stores a correction of YaRN's own attention factor, Hugging Face the factor itself.
        parameters["attention_factor"] = correction * (0.1 * math.log(max(parameters["factor"], 1.0)) + 1.0)
    if rope_factors is not None:
        if parameters["rope_type"] != "default":
            raise ModelError(f"rope_freqs.weight beside rope scaling {scaling!r} is not supported")
        parameters |= _llama3_parameters(rope_factors, theta, head_dim)
    return parameters


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
        raise ModelError("rope_freqs.weight holds RoPE factors that are not those of Llama 3.1, 3.2 or 3.3")
    return parameters


def _llama3_divisor(frequency: float, factor: float) -> float:
    """By what llama3 scaling divides one RoPE frequency (radians per token), with Llama 3's constants."""
    rotations = LLAMA3_ORIGINAL_CONTEXT * frequency / (2 * math.pi)
    share = (rotations - LLAMA3_LOW_FREQ_FACTOR) / (LLAMA3_HIGH_FREQ_FACTOR - LLAMA3_LOW_FREQ_FACTOR)
    share = min(max(share, 0.0), 1.0)
    return 1.0 / (share + (1.0 - share) / factor)


def _rope(parameters: Mapping[str, Any], head_dim: int, max_positions: int) -> tuple[RopeSpec, int]:
    """The RopeSpec, and the context it reaches (tokens).

    linear and dynamic configs state the length before scaling, yarn states it separately, so the context is
    that length x factor; default and llama3 configs state the context itself.
    """
    fields = _Fields(parameters, "RoPE parameters")
    rope_type: Any = parameters.get("rope_type")
    if rope_type not in get_args(RopeScaling):
        raise ModelError(
            f"rope type {rope_type!r} is not supported", hint=f"supported: {', '.join(get_args(RopeScaling))}"
        )
    share = fields.number("partial_rotary_factor", 1.0)
    if share != 1.0:
        raise ModelError(f"partial_rotary_factor is {share}, but only 1 is supported")
    theta = fields.number("rope_theta")
    if rope_type == "default":
        return RopeSpec(theta=theta, rotary_dim=head_dim), max_positions
    original = fields.integer("original_max_position_embeddings", max_positions)
    if rope_type == "yarn" and parameters.get("factor") is None:
        factor = max_positions / original
    else:
        factor = fields.number("factor")
    if factor < 1.0:
        raise ModelError(f"RoPE parameters: factor is {factor}, but must be at least 1")
    if rope_type == "llama3":
        low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
        if low >= high:
            raise ModelError(f"RoPE parameters: low_freq_factor {low} is not below high_freq_factor {high}")
        rope = RopeSpec(
            theta=theta,
            rotary_dim=head_dim,
            scaling="llama3",
            factor=factor,
            original_max_position_embeddings=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
        return rope, max_positions
    if rope_type == "yarn":
        rope = RopeSpec(
            theta=theta,
            rotary_dim=head_dim,
            scaling="yarn",
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=fields.number("beta_fast", None) or 32.0,
            beta_slow=fields.number("beta_slow", None) or 1.0,
            attention_factor=fields.number("attention_factor", None),
            mscale=fields.number("mscale", None),
            mscale_all_dim=fields.number("mscale_all_dim", None),
            truncate=fields.boolean("truncate", True),
        )
        if rope.beta_fast <= rope.beta_slow:
            raise ModelError(
                f"RoPE parameters: beta_fast {rope.beta_fast} is not above beta_slow {rope.beta_slow}"
            )
        return rope, int(original * factor)
    # Dynamic scaling is defined against the configured length, whatever else the parameters say.
    base = max_positions if rope_type == "dynamic" else original
    rope = RopeSpec(
        theta=theta,
        rotary_dim=head_dim,
        scaling=rope_type,
        factor=factor,
        original_max_position_embeddings=base,
    )
    return rope, int(base * factor)


def _divide(hidden_size: int, num_heads: int, name: str) -> int:
    if hidden_size % num_heads:
        raise ModelError(f"{name} {hidden_size} is not divisible by {num_heads} attention heads")
    return hidden_size // num_heads


def _checked(spec: ModelSpec) -> ModelSpec:
    """Refuse sizes that contradict each other."""
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(
            f"{spec.num_heads} attention heads cannot be shared evenly by {spec.num_kv_heads} key-value heads"
        )
    if spec.head_dim % 2:
        raise ModelError(f"head size is {spec.head_dim}, but rotary embedding needs an even one")
    if spec.rope.theta <= 1.0:
        raise ModelError(f"rope_theta is {spec.rope.theta}, but must be above 1")
    if spec.rope.scaling == "dynamic" and spec.head_dim == 2:
        raise ModelError("dynamic RoPE scaling needs a head size above 2")
    return spec


_REQUIRED: Any = object()


class _Fields:
    """Typed access to an untrusted mapping. A missing or null value takes `default`, if there is one."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.values = values
        self._source = source
        self._prefix = prefix

    def integer(self, name: str, default: Any = _REQUIRED) -> Any:
        """A positive integer; None only if that is the default."""
        value = self._get(name, default)
        if value is default:
            return value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._error(name, value, "a positive integer")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """A finite number that is not negative; None only if that is the default."""
        value = self._get(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise self._error(name, value, "a finite number of at least 0")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._error(name, value, "true or false")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(self._prefix + name)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # GGUF may repeat a number for every layer
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ModelError(f"{self._source}: {self._prefix}{name} is missing")
        return default

    def _error(self, name: str, value: object, expected: str) -> ModelError:
        return ModelError(f"{self._source}: {self._prefix}{name} is {value!r:.80}, but must be {expected}")
