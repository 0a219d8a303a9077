"""Names of a model's tensors: each file format's own, and the canonical ones.

A canonical name says which field of `ModelWeights` a tensor belongs to, with the parts of fused matrices
still apart: "embedding", "final_norm", "lm_head", "layers.3.q", "layers.3.gate_bias", ... Files may hold
parts joined, "layers.3.qkv", or experts apart, "layers.3.gate.7"; see `shapes.stored_forms`. In the tables, #
is an expert's number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

HF_TOP_NAMES: Mapping[str, str] = {
    "model.embed_tokens.weight": "embedding",
    "model.norm.weight": "final_norm",
    "lm_head.weight": "lm_head",
}
HF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
HF_LAYER_NAMES: Mapping[str, str] = {
    "input_layernorm.weight": "input_norm",
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.v_proj.weight": "v",
    "self_attn.qkv_proj.weight": "qkv",
    "self_attn.o_proj.weight": "output",
    "self_attn.q_proj.bias": "q_bias",
    "self_attn.k_proj.bias": "k_bias",
    "self_attn.v_proj.bias": "v_bias",
    "self_attn.o_proj.bias": "output_bias",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    "self_attn.sinks": "sinks",
    "post_attention_layernorm.weight": "post_attention_norm",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.gate_up_proj.weight": "gate_up",
    "mlp.down_proj.weight": "down",
    "mlp.gate_proj.bias": "gate_bias",
    "mlp.up_proj.bias": "up_bias",
    "mlp.down_proj.bias": "down_bias",
    "mlp.gate.weight": "router",
    "mlp.experts.#.gate_proj.weight": "gate.#",
    "mlp.experts.#.up_proj.weight": "up.#",
    "mlp.experts.#.down_proj.weight": "down.#",
    "mlp.experts.gate_up_proj": "gate_up",
    "mlp.experts.down_proj": "down",
}
HF_FAMILY_NAMES: Mapping[str, Mapping[str, str]] = {
    "mixtral": {
        "block_sparse_moe.gate.weight": "router",
        "block_sparse_moe.experts.#.w1.weight": "gate.#",
        "block_sparse_moe.experts.#.w3.weight": "up.#",
        "block_sparse_moe.experts.#.w2.weight": "down.#",
    },
    "gemma2": {
        "post_attention_layernorm.weight": "attention_output_norm",
        "pre_feedforward_layernorm.weight": "post_attention_norm",
        "post_feedforward_layernorm.weight": "mlp_output_norm",
    },
    "olmo2": {
        "post_attention_layernorm.weight": "input_norm",
        "post_feedforward_layernorm.weight": "post_attention_norm",
    },
    "gpt_oss": {
        "mlp.router.weight": "router",
        "mlp.router.bias": "router_bias",
        "mlp.experts.gate_up_proj": "gate_up_pairs",
        "mlp.experts.gate_up_proj_bias": "gate_up_pairs_bias",
        "mlp.experts.down_proj": "down_columns",
        "mlp.experts.down_proj_bias": "down_bias",
    },
}

GGUF_TOP_NAMES: Mapping[str, str] = {
    "token_embd.weight": "embedding",
    "output_norm.weight": "final_norm",
    "output.weight": "lm_head",
}
GGUF_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
GGUF_LAYER_NAMES: Mapping[str, str] = {
    "attn_norm.weight": "input_norm",
    "attn_q.weight": "q",
    "attn_k.weight": "k",
    "attn_v.weight": "v",
    "attn_qkv.weight": "qkv",
    "attn_output.weight": "output",
    "attn_q.bias": "q_bias",
    "attn_k.bias": "k_bias",
    "attn_v.bias": "v_bias",
    "attn_qkv.bias": "qkv_bias",
    "attn_output.bias": "output_bias",
    "attn_q_norm.weight": "q_norm",
    "attn_k_norm.weight": "k_norm",
    "attn_sinks.weight": "sinks",
    "ffn_norm.weight": "post_attention_norm",
    "ffn_gate.weight": "gate",
    "ffn_up.weight": "up",
    "ffn_down.weight": "down",
    "ffn_gate.bias": "gate_bias",
    "ffn_up.bias": "up_bias",
    "ffn_down.bias": "down_bias",
    "ffn_gate_inp.weight": "router",
    "ffn_gate_inp.bias": "router_bias",
    "ffn_gate_exps.weight": "gate",
    "ffn_up_exps.weight": "up",
    "ffn_down_exps.weight": "down",
    "ffn_gate_exps.bias": "gate_bias",
    "ffn_up_exps.bias": "up_bias",
    "ffn_down_exps.bias": "down_bias",
    "ffn_gate.#.weight": "gate.#",
    "ffn_up.#.weight": "up.#",
    "ffn_down.#.weight": "down.#",
}
GGUF_FAMILY_NAMES: Mapping[str, Mapping[str, str]] = {
    "gemma2": {
        "post_attention_norm.weight": "attention_output_norm",
        "post_ffw_norm.weight": "mlp_output_norm",
    },
    "olmo2": {"post_attention_norm.weight": "input_norm", "post_ffw_norm.weight": "post_attention_norm"},
    "phi3": {"ffn_up.weight": "gate_up"},
    "gpt_oss": {"post_attention_norm.weight": "post_attention_norm"},
}
SAME_NAMES_AS: Mapping[str, str] = {"gemma3": "gemma2"}

# The text part of a multimodal model, and the parts of one that text never meets.
TEXT_PREFIXES: Mapping[str, str] = {"language_model.": "", "model.language_model.": "model."}
OTHER_PARTS = re.compile(r"(model\.)?(vision_tower|vision_model|multi_modal_projector)\..+")

# Tables that can be computed from the configuration; old writers stored them beside the weights.
DERIVED = re.compile(
    r".*rotary_emb\.inv_freq|rope_freqs\.weight|rope_factors_(long|short)\.weight"
    r"|blk\.\d+\.attn_rot_embd(\.weight)?"
)

EXPERT_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class NameTable:
    """The names of one family in one format: tensors outside the layers, those inside and their prefix."""

    top: Mapping[str, str]
    layer: re.Pattern[str]
    layer_prefix: str
    inside: Mapping[str, str]

    def canonical(self, name: str) -> str | None:
        """The canonical name of a stored one; None if it is no weight of the family."""
        if name in self.top:
            return self.top[name]
        match = self.layer.fullmatch(name)
        if match is None:
            return None
        numbers = EXPERT_NUMBER.findall(match[2])
        part = self.inside.get(EXPERT_NUMBER.sub("#", match[2]) if numbers else match[2])
        if part is None or part.count("#") != len(numbers):
            return None
        return f"layers.{int(match[1])}.{part.replace('#', str(int(numbers[0]))) if numbers else part}"

    def stored(self, part: str, *, holds_experts: bool = False) -> str:
        """The name of a canonical tensor in a file. holds_experts: it is a layer's experts together."""
        if not part.startswith("layers."):
            return next(name for name, canonical in self.top.items() if canonical == part)
        _, index, field, *expert = part.split(".")
        wanted = f"{field}.#" if expert else field
        names = [name for name, canonical in self.inside.items() if canonical == wanted]
        name = names[-1 if holds_experts else 0]
        return f"{self.layer_prefix}.{index}.{name.replace('#', ''.join(expert))}"


def text_name(name: str) -> str:
    """The name that a tensor of a multimodal model's text part has in a model of text alone."""
    for prefix, plain in TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def name_table(family: str, *, gguf: bool) -> NameTable:
    """family: of the spec."""
    names, own = (GGUF_LAYER_NAMES, GGUF_FAMILY_NAMES) if gguf else (HF_LAYER_NAMES, HF_FAMILY_NAMES)
    inside = {**own.get(SAME_NAMES_AS.get(family, family), {})}
    inside |= {name: part for name, part in names.items() if name not in inside}
    if gguf:
        return NameTable(GGUF_TOP_NAMES, GGUF_LAYER, "blk", inside)
    return NameTable(HF_TOP_NAMES, HF_LAYER, "model.layers", inside)
