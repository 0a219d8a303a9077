"""GGUF files of the tiny models of every family, as converters of Hugging Face checkpoints write them.

Tensor names come from the `gguf` package's own map; keys of the metadata are those of its writer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.helpers.tiny_gguf import add_metadata, pair_order

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "granite": "granite",
    "smollm3": "smollm3",
    "gpt_oss": "gpt-oss",
}
PAIRED = ("llama", "granite", "smollm3")
OFFSET_NORMS = ("gemma2", "gemma3")


def write_family_gguf(path: Path, model: Any, *, kind: str = "F32") -> None:
    """Write a model of `tiny_families`. kind: storage type of the matrices; vectors are F32."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = GGUFWriter(path, architecture)
    fields = {f"{architecture}.{key}": value for key, value in _metadata(config).items()}
    for key, value in {**fields, **_vocabulary(config)}.items():
        if value is not None:
            add_metadata(writer, key, value)
    for name, array in _tensors(model, architecture).items():
        stored = GGMLQuantizationType[kind if array.ndim > 1 and name.endswith("weight") else "F32"]
        writer.add_tensor(name, quantize(np.ascontiguousarray(array), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _vocabulary(config: Any) -> dict[str, Any]:
    """A byte-level stand-in."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [f"token{index}" for index in range(config.vocab_size)],
        "tokenizer.ggml.merges": ["t o"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def _metadata(config: Any) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    fields: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": int(head_dim * full.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(full["rope_theta"]),
    }
    if full["rope_type"] in ("linear", "yarn"):
        fields["rope.scaling.type"] = full["rope_type"]
        fields["rope.scaling.factor"] = float(full["factor"])
        fields["rope.scaling.original_context_length"] = full.get("original_max_position_embeddings")
    more = _MORE.get(config.model_type)
    return {**fields, **(more(config) if more else {})}


def _window(config: Any) -> dict[str, Any]:
    return {"attention.sliding_window": config.sliding_window}


def _experts(config: Any, **more: Any) -> dict[str, Any]:
    num_experts = getattr(config, "num_local_experts", None) or config.num_experts
    return {"expert_count": num_experts, "expert_used_count": config.num_experts_per_tok, **more}


_MORE: dict[str, Callable[[Any], dict[str, Any]]] = {
    "mistral": _window,
    "mixtral": lambda config: _window(config) | _experts(config),
    "qwen3_moe": lambda config: _experts(config, expert_feed_forward_length=config.moe_intermediate_size),
    "gemma2": lambda config: (
        _window(config)
        | {
            "attn_logit_softcapping": config.attn_logit_softcapping,
            "final_logit_softcapping": config.final_logit_softcapping,
        }
    ),
    "gemma3_text": lambda config: (
        _window(config)
        | {"rope.freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"])}
    ),
    "phi3": lambda config: (
        _window(config) | {"rope.scaling.original_context_length": config.original_max_position_embeddings}
    ),
    "granite": lambda config: {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "logit_scale": float(config.logits_scaling),
    },
    "gpt_oss": lambda config: (
        _window(config) | _experts(config, expert_feed_forward_length=config.intermediate_size)
    ),
}


def _tensors(model: Any, architecture: str) -> dict[str, NDArray[Any]]:
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    config = model.config
    kind = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(kind, config.num_hidden_layers)
    num_heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors: dict[str, NDArray[Any]] = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = parameter.detach().float().numpy()
        stem, suffix = name.rsplit(".", 1) if name.endswith((".weight", ".bias")) else (name, "weight")
        if architecture in OFFSET_NORMS and stem.endswith("norm"):
            array = array + 1.0
        heads = num_heads.get(stem.rpartition(".")[2])
        if architecture in PAIRED and heads is not None:
            array = array[pair_order(len(array), heads)]
        if ".experts." in name:
            tensors |= _expert_tensors(name, array, is_gpt_oss=architecture == "gpt-oss")
        else:
            mapped = names.get_name(stem)
            assert mapped is not None, stem
            tensors[f"{mapped}.{suffix}"] = array
    if config.rope_parameters.get("rope_type") == "longrope":
        for length in ("short", "long"):
            factors = config.rope_parameters[f"{length}_factor"]
            tensors[f"rope_factors_{length}.weight"] = np.array(factors, dtype=np.float32)
    return tensors


def _expert_tensors(name: str, array: NDArray[Any], *, is_gpt_oss: bool) -> dict[str, NDArray[Any]]:
    """gate_up_proj [experts, 2 * inner, hidden], or for gpt-oss [experts, hidden, 2 * inner] in turns."""
    layer, part = name.split(".")[2], name.rpartition(".")[2]
    suffix = "bias" if part.endswith("_bias") else "weight"
    if not part.startswith("gate_up"):
        down = array.swapaxes(1, 2) if is_gpt_oss and suffix == "weight" else array
        return {f"blk.{layer}.ffn_down_exps.{suffix}": down}
    if is_gpt_oss:
        gate, up = array[..., ::2], array[..., 1::2]
        if suffix == "weight":
            gate, up = gate.swapaxes(1, 2), up.swapaxes(1, 2)
    else:
        gate, up = np.split(array, 2, axis=1)
    return {f"blk.{layer}.ffn_gate_exps.{suffix}": gate, f"blk.{layer}.ffn_up_exps.{suffix}": up}
