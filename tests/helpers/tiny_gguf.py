"""GGUF files of tiny models, written with the `gguf` package in the layout of converted Llama checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Storage types the package can write; of K-quants it only reads.
WRITABLE_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")
# Positions of the FP16 scales inside a block, which random bytes must not make infinite.
K_QUANT_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_tiny_gguf(
    path: Path,
    model: Any,
    *,
    kind: str = "F32",
    metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, NDArray[Any]] | None = None,
) -> dict[str, NDArray[np.float32]]:
    """Write a LlamaForCausalLM and return what the file stands for: Hugging Face name -> FP32 values.

    kind: storage type of the matrices; vectors are F32. Matrices of K-quants hold random blocks.
    metadata: keys to add or replace; None leaves one out. The vocabulary is a byte-level stand-in.
    """
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import dequantize

    config = model.config
    writer = GGUFWriter(path, "llama")
    fields: dict[str, Any] = {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [f"token{index}" for index in range(config.vocab_size)],
        "tokenizer.ggml.merges": ["t o"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    for key, value in {**fields, **(metadata or {})}.items():
        if value is not None:
            add_metadata(writer, key, value)
    values = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = parameter.detach().float().numpy()
        num_heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
            name.split(".")[-2]
        )
        rows = pair_order(len(array), num_heads) if num_heads else np.arange(len(array))
        tensor_kind = GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
        stored = _encode(array[rows], tensor_kind)
        writer.add_tensor(gguf_name(name), stored, raw_dtype=tensor_kind)
        values[name] = np.empty_like(array)
        values[name][rows] = dequantize(stored, tensor_kind)
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def gguf_name(name: str) -> str:
    """A Hugging Face tensor name in GGUF's words."""
    stem, _, suffix = name.rpartition(".")
    if stem in GGUF_NAMES:
        return f"{GGUF_NAMES[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.{suffix}"


def pair_order(num_rows: int, num_heads: int) -> NDArray[np.int64]:
    """Row i of the file is row pair_order[i] of the checkpoint: in each head 0, half, 1, half + 1, ..."""
    head_dim = num_rows // num_heads
    head = [first + offset for first in range(head_dim // 2) for offset in (0, head_dim // 2)]
    return np.array([number * head_dim + row for number in range(num_heads) for row in head])


def _encode(array: NDArray[np.float32], kind: Any) -> NDArray[Any]:
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import quantize

    if kind.name in WRITABLE_TYPES:
        return quantize(array, kind)
    num_values, num_bytes = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(array.size)
    blocks = random.integers(0, 256, (array.size // num_values, num_bytes), dtype=np.uint8)
    for position in K_QUANT_SCALES[kind.name]:
        scales = random.uniform(-0.01, 0.01, len(blocks)).astype(np.float16)
        blocks[:, position : position + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(len(array), -1)


def add_metadata(writer: Any, key: str, value: Any) -> None:
    """Write a value with the type of its Python type."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            (writer.add_uint32 if value >= 0 else writer.add_int32)(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
