"""Names and shapes of a model's tensors: each file format's own, and the canonical ones.

A canonical name says which field of `ModelWeights` a tensor belongs to, with the parts of fused matrices
still apart: "embedding", "final_norm", "lm_head", "layers.3.q", "layers.3.gate_bias", ...
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from tiny_vllm.errors import ModelError
from tiny_vllm.models.spec import ModelSpec

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
    "self_attn.o_proj.weight": "output",
    "self_attn.q_proj.bias": "q_bias",
    "self_attn.k_proj.bias": "k_bias",
    "self_attn.v_proj.bias": "v_bias",
    "self_attn.o_proj.bias": "output_bias",
    "post_attention_layernorm.weight": "post_attention_norm",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
    "mlp.gate_proj.bias": "gate_bias",
    "mlp.up_proj.bias": "up_bias",
    "mlp.down_proj.bias": "down_bias",
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
    "attn_output.weight": "output",
    "attn_q.bias": "q_bias",
    "attn_k.bias": "k_bias",
    "attn_v.bias": "v_bias",
    "attn_output.bias": "output_bias",
    "ffn_norm.weight": "post_attention_norm",
    "ffn_gate.weight": "gate",
    "ffn_up.weight": "up",
    "ffn_down.weight": "down",
    "ffn_gate.bias": "gate_bias",
    "ffn_up.bias": "up_bias",
    "ffn_down.bias": "down_bias",
}

# Tables that can be computed from the configuration; old writers stored them beside the weights.
DERIVED = re.compile(r".*rotary_emb\.inv_freq|rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")

NAMES_SHOWN = 6


def canonical_name(name: str) -> str | None:
    """The canonical name of a Hugging Face or GGUF tensor; None if it is no weight of the family."""
    for top, layer, layer_names in (
        (HF_TOP_NAMES, HF_LAYER, HF_LAYER_NAMES),
        (GGUF_TOP_NAMES, GGUF_LAYER, GGUF_LAYER_NAMES),
    ):
        if name in top:
            return top[name]
        match = layer.fullmatch(name)
        if match and match[2] in layer_names:
            return f"layers.{int(match[1])}.{layer_names[match[2]]}"
    return None


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor the spec needs. A tied head is not among them."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    layer: dict[str, tuple[int, ...]] = {
        "input_norm": (hidden,),
        "q": (spec.q_size, hidden),
        "k": (spec.kv_size, hidden),
        "v": (spec.kv_size, hidden),
        "output": (hidden, spec.q_size),
        "post_attention_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    biased = (
        ("q", "k", "v") * spec.qkv_bias
        + ("output",) * spec.output_bias
        + ("gate", "up", "down") * spec.mlp_bias
    )
    layer |= {f"{part}_bias": layer[part][:1] for part in biased}
    shapes: dict[str, tuple[int, ...]] = {"embedding": (spec.vocab_size, hidden)}
    for index in range(spec.num_layers):
        shapes |= {f"layers.{index}.{part}": shape for part, shape in layer.items()}
    shapes["final_norm"] = (hidden,)
    if not spec.tie_word_embeddings:
        shapes["lm_head"] = (spec.vocab_size, hidden)
    return shapes


def match_tensors(spec: ModelSpec, stored: Mapping[str, tuple[int, ...]], *, where: str) -> dict[str, str]:
    """Canonical name -> stored name of every tensor to load.

    stored: name -> shape in the files. where: the file or directory, for messages. A head stored beside a
    tied configuration and tables computable from it are left out; any other tensor the spec has no place for
    would change the output, so it is refused, as are missing ones and wrong shapes. Raises ModelError.
    """
    expected = expected_shapes(spec)
    found: dict[str, str] = {}
    unexpected = []
    for name in stored:
        part = canonical_name(name)
        if part in expected:
            assert part is not None
            if part in found:
                raise ModelError(f"{where}: {found[part]} and {name} are the same weight")
            found[part] = name
        elif not DERIVED.fullmatch(name) and not (part == "lm_head" and spec.tie_word_embeddings):
            unexpected.append(name)
    missing = [part for part in expected if part not in found]
    if missing:
        hint = "the checkpoint is incomplete"
        if missing == ["lm_head"]:
            hint = "tie_word_embeddings is false, so the head must be stored"
        gguf = any(GGUF_LAYER.fullmatch(name) for name in stored)
        names = _listed([_stored_name(part, gguf=gguf) for part in missing])
        raise ModelError(f"{where}: missing {names}", hint=hint)
    if unexpected:
        raise ModelError(
            f"{where}: unexpected {_listed(unexpected)}", hint="the configuration has no place for them"
        )
    for part, shape in expected.items():
        name = found[part]
        if tuple(stored[name]) != shape:
            raise ModelError(
                f"{where}: tensor {name} has shape {list(stored[name])}, "
                f"but the configuration needs {list(shape)}"
            )
    return found


def _stored_name(part: str, *, gguf: bool) -> str:
    """The name a canonical tensor has in a file."""
    top, layer_names = (GGUF_TOP_NAMES, GGUF_LAYER_NAMES) if gguf else (HF_TOP_NAMES, HF_LAYER_NAMES)
    if not part.startswith("layers."):
        return next(name for name, canonical in top.items() if canonical == part)
    _, index, field = part.split(".")
    name = next(name for name, canonical in layer_names.items() if canonical == field)
    return f"blk.{index}.{name}" if gguf else f"model.layers.{index}.{name}"


def _listed(names: Iterable[str]) -> str:
    """ "tensor a", or "8 tensors: a, b, ..." with the first few named."""
    names = list(names)
    if len(names) == 1:
        return f"tensor {names[0]}"
    more = ", ..." if len(names) > NAMES_SHOWN else ""
    return f"{len(names)} tensors: {', '.join(names[:NAMES_SHOWN])}{more}"
