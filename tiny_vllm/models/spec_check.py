"""Sizes that contradict each other, refused before anything is allocated for them."""

from __future__ import annotations

from dataclasses import replace

from tiny_vllm.errors import ModelError
from tiny_vllm.models.fields import REPAIR
from tiny_vllm.models.spec import ModelSpec


def divide(hidden_size: int, num_heads: int, name: str) -> int:
    """The head size where none is stated."""
    if hidden_size % num_heads:
        raise ModelError(f"{name} {hidden_size} is not divisible by {num_heads} attention heads", hint=REPAIR)
    return hidden_size // num_heads


def checked(spec: ModelSpec) -> ModelSpec:
    """The spec, without traits that change nothing: the usual scale of attention, and a window that no
    sequence outgrows. Raises ModelError.
    """
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(
            f"{spec.num_heads} attention heads cannot be shared evenly by {spec.num_kv_heads} key-value "
            "heads",
            hint=REPAIR,
        )
    if spec.max_position_embeddings < 2:
        raise ModelError(
            "the context of the model is 1 token, but must be at least 2: one of a prompt, one of its output",
            hint=REPAIR,
        )
    for rope in (spec.rope, spec.sliding_rope):
        if rope is not None and rope.theta <= 1.0:
            raise ModelError(f"rope_theta is {rope.theta}, but must be above 1", hint=REPAIR)
        if rope is not None and rope.scaling == "dynamic" and rope.rotary_dim == 2:
            raise ModelError(
                f"head size is {rope.rotary_dim}, but dynamic RoPE scaling needs one above 2", hint=REPAIR
            )
    experts = spec.experts
    if experts is not None and experts.num_active > experts.num_experts:
        raise ModelError(
            f"{experts.num_active} experts per token are more than the {experts.num_experts}", hint=REPAIR
        )
    if spec.attention_scale == spec.head_dim**-0.5:
        spec = replace(spec, attention_scale=None)
    window = spec.sliding_window
    if window is not None and window >= spec.max_position_embeddings and spec.sliding_rope is None:
        spec = replace(spec, sliding_window=None, sliding_layers=())
    return spec
