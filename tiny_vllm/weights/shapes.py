"""Shapes of a model's tensors, as the decoder needs them and as files may hold them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tiny_vllm.models.spec import ModelSpec


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor the spec needs. A tied head is not among them."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (spec.vocab_size, spec.hidden_size)}
    for index in range(spec.num_layers):
        layer = _attention_shapes(spec) | _mlp_shapes(spec, index)
        shapes |= {f"layers.{index}.{part}": shape for part, shape in layer.items()}
    shapes["final_norm"] = (spec.hidden_size,)
    if not spec.tie_word_embeddings:
        shapes["lm_head"] = (spec.vocab_size, spec.hidden_size)
    return shapes


def _attention_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "input_norm": (hidden,),
        "q": (spec.q_size, hidden),
        "k": (spec.kv_size, hidden),
        "v": (spec.kv_size, hidden),
        "output": (hidden, spec.q_size),
        "post_attention_norm": (hidden,),
    }
    if spec.norm_placement == "both":
        shapes |= {"attention_output_norm": (hidden,), "mlp_output_norm": (hidden,)}
    if spec.qk_norm is not None:
        q_size, k_size = spec.qk_norm_sizes
        shapes |= {"q_norm": (q_size,), "k_norm": (k_size,)}
    if spec.attention_sinks:
        shapes["sinks"] = (spec.num_heads,)
    biased = ("q", "k", "v") * spec.qkv_bias + ("output",) * spec.output_bias
    return shapes | {f"{part}_bias": shapes[part][:1] for part in biased}


def _mlp_shapes(spec: ModelSpec, index: int) -> dict[str, tuple[int, ...]]:
    hidden, inner, has_bias = spec.hidden_size, spec.intermediate_size, spec.mlp_bias
    leading: tuple[int, ...] = ()
    shapes: dict[str, tuple[int, ...]] = {}
    if spec.experts is not None and spec.has_experts(index):
        inner, has_bias = spec.experts.intermediate_size, spec.experts.bias
        leading = (spec.experts.num_experts,)
        shapes["router"] = (*leading, hidden)
    shapes |= {
        "gate": (*leading, inner, hidden),
        "up": (*leading, inner, hidden),
        "down": (*leading, hidden, inner),
    }
    return shapes | {f"{part}_bias": shape[:-1] for part, shape in shapes.items() if has_bias}


@dataclass(frozen=True, slots=True)
class StoredForm:
    """A tensor as a file may hold it: its shape, and the weights it brings, as parts or experts of a part."""

    shape: tuple[int, ...]
    atoms: tuple[str, ...]


def stored_forms(spec: ModelSpec) -> dict[str, StoredForm]:
    """Canonical name -> form, of everything that a file may hold of this model.

    Besides the expected parts: "qkv" and "gate_up", their rows joined; "gate.7", one expert; "gate_up_pairs"
    and "down_columns", experts' matrices with inputs before outputs, and of the former gate and up in turns.
    """
    expected = expected_shapes(spec)
    atoms = {part: _atoms(part, shape, spec) for part, shape in expected.items()}
    forms = {part: StoredForm(shape, atoms[part]) for part, shape in expected.items()}
    for part in expected:
        if atoms[part] != (part,):
            forms |= {atom: StoredForm(expected[part][1:], (atom,)) for atom in atoms[part]}
    for index in range(spec.num_layers):
        for name, parts in (("qkv", "q k v"), ("gate_up", "gate up")):
            for suffix in ("", "_bias"):
                members = [f"layers.{index}.{part}{suffix}" for part in parts.split()]
                if all(member in expected for member in members):
                    shape = _joined([expected[member] for member in members], -1 if suffix else -2)
                    joined = tuple(atom for member in members for atom in atoms[member])
                    forms[f"layers.{index}.{name}{suffix}"] = StoredForm(shape, joined)
        if spec.has_experts(index):
            gate_up, down = forms[f"layers.{index}.gate_up"], forms[f"layers.{index}.down"]
            count, rows, columns = gate_up.shape
            forms[f"layers.{index}.gate_up_pairs"] = StoredForm((count, columns, rows), gate_up.atoms)
            count, rows, columns = down.shape
            forms[f"layers.{index}.down_columns"] = StoredForm((count, columns, rows), down.atoms)
            bias = forms.get(f"layers.{index}.gate_up_bias")
            if bias is not None:
                forms[f"layers.{index}.gate_up_pairs_bias"] = bias
    return forms


def _atoms(part: str, shape: tuple[int, ...], spec: ModelSpec) -> tuple[str, ...]:
    """A part itself, or its experts."""
    if len(shape) < 3:
        return (part,)
    return tuple(f"{part}.{expert}" for expert in range(shape[0]))


def _joined(shapes: list[tuple[int, ...]], axis: int) -> tuple[int, ...]:
    joined = list(shapes[0])
    joined[axis] = sum(shape[axis] for shape in shapes)
    return tuple(joined)


def num_values(spec: ModelSpec) -> int:
    """Of all expected tensors together."""
    return sum(math.prod(shape) for shape in expected_shapes(spec).values())
