"""The bundled model as a transformers model, converted here on its own: the oracle for real weights."""

from __future__ import annotations

from typing import Any

import torch

from tiny_vllm.weights.bundled import bundled_model_path

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a little",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5,",
    "Water boils at 100 degrees",
    "To be, or not to be",
    "import numpy as np\n\n",
    "The three primary colours are",
    "In 1969, Neil Armstrong",
    "Dear Sir or Madam,\n\n",
    "Q: What is 12 times 12?\nA:",
    "Ingredients:\n- 2 eggs\n-",
    "El perro corre por",
    "Photosynthesis is the process by which",
    "SELECT name FROM users WHERE",
    "The opposite of hot is",
    "<html>\n  <body>\n",
    "Albert Einstein was born in",
    "x =   3\ny =",
    "She opened the door and saw",
)

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_with_transformers(dtype: torch.dtype = torch.float32) -> Any:
    """LlamaForCausalLM with the bundled file's dequantised weights."""
    from gguf import GGUFReader, dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = GGUFReader(bundled_model_path())

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    num_heads, num_kv_heads = value("llama.attention.head_count"), value("llama.attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=value("llama.vocab_size"),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        tie_word_embeddings=True,
    )
    state = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        name = _transformers_name(tensor.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = num_heads if "q_proj" in name else num_kv_heads
            # GGUF interleaves the two halves that rotate together; transformers stores them apart.
            rows = weight.shape[0] // heads
            weight = weight.view(heads, rows // 2, 2, -1).transpose(1, 2).reshape(weight.shape)
        state[name] = weight
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    return model.to(dtype).eval()


def _transformers_name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_NAMES[part]}.weight"
