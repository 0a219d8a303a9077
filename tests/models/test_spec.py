"""What a spec says of itself: which fast paths compute it, and what each layer is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tiny_vllm.engine.memory_needs import step_bytes
from tiny_vllm.models.spec import ExpertsSpec, ModelSpec, RopeSpec

ROPE = RopeSpec(theta=1e4, rotary_dim=16)
LLAMA = ModelSpec(
    family="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=96,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    rope=ROPE,
)

BEYOND_LLAMA: dict[str, dict[str, Any]] = {
    "activation": dict(activation="gelu_tanh"),
    "experts": dict(experts=ExpertsSpec(num_experts=4, num_active=2, intermediate_size=32)),
    "norms on outputs": dict(norm_placement="output"),
    "norms on both": dict(norm_placement="both"),
    "norm offset": dict(norm_offset=1.0),
    "norm of heads": dict(qk_norm="head"),
    "norm over all heads": dict(qk_norm="whole"),
    "scale": dict(attention_scale=0.1),
    "soft cap of scores": dict(attention_softcap=50.0),
    "sinks": dict(attention_sinks=True),
    "soft cap of logits": dict(logit_softcap=30.0),
    "windows": dict(sliding_window=16, sliding_layers=(0,)),
    "no rotation": dict(unrotated_layers=(3,)),
    "embedding": dict(embedding_multiplier=2.0),
    "residual": dict(residual_multiplier=0.5),
    "logits": dict(logit_divisor=8.0),
}


@pytest.mark.parametrize("trait", BEYOND_LLAMA)
def test_the_fast_paths_take_no_family_whose_traits_they_lack(trait: str) -> None:
    spec = replace(LLAMA, **BEYOND_LLAMA[trait])
    assert not spec.fits_fused_cpu_decode
    assert spec.fits_weight_tape == (trait == "norm of heads")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(qkv_bias=True, output_bias=True, mlp_bias=True),
        dict(tie_word_embeddings=True),
        dict(rope=replace(ROPE, rotary_dim=8)),
        dict(rope=replace(ROPE, scaling="yarn", factor=4.0, original_max_position_embeddings=64)),
    ],
    ids=str,
)
def test_the_fast_paths_take_every_llama(changes: dict[str, Any]) -> None:
    spec = replace(LLAMA, **changes)
    assert spec.fits_fused_cpu_decode


def test_layers_have_the_rope_and_the_window_of_their_kind() -> None:
    local = RopeSpec(theta=100.0, rotary_dim=16)
    spec = replace(
        LLAMA, sliding_window=8, sliding_layers=(0, 1, 3), sliding_rope=local, unrotated_layers=(1, 2)
    )
    assert [spec.layer_rope(layer) for layer in range(6)] == [local, None, None, local, ROPE, ROPE]
    assert [spec.layer_window(layer) for layer in range(6)] == [8, 8, None, 8, None, None]


def test_a_model_whose_layers_all_have_windows_sees_no_further() -> None:
    assert LLAMA.longest_window is None
    assert replace(LLAMA, sliding_window=8, sliding_layers=(0, 1, 2, 3, 4)).longest_window is None
    assert replace(LLAMA, sliding_window=8, sliding_layers=tuple(range(6))).longest_window == 8


def test_dense_layers_have_no_experts() -> None:
    experts = ExpertsSpec(num_experts=4, num_active=2, intermediate_size=32, dense_layers=(0, 5))
    spec = replace(LLAMA, experts=experts)
    assert [spec.has_experts(layer) for layer in range(6)] == [False, True, True, True, True, False]
    assert not LLAMA.has_experts(1)


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_scalings_that_change_all_positions_keep_to_the_original_length_unasked(scaling: Any) -> None:
    rope = replace(ROPE, scaling=scaling, original_max_position_embeddings=64)
    assert replace(LLAMA, rope=rope).default_model_len == 64


def test_a_mixture_is_as_wide_as_the_experts_a_token_picks() -> None:
    experts = ExpertsSpec(num_experts=8, num_active=3, intermediate_size=10)
    assert LLAMA.widest_intermediate_size == 96
    assert replace(LLAMA, experts=experts).widest_intermediate_size == 30
    dense = replace(experts, dense_layers=(0,))
    assert replace(LLAMA, experts=dense).widest_intermediate_size == 96


def test_memory_for_a_step_follows_the_experts() -> None:
    """More by the picked experts' values and FP32 outputs."""
    experts = ExpertsSpec(num_experts=8, num_active=4, intermediate_size=50)
    dense, mixed = (
        step_bytes(spec, 2, num_tokens=1000, num_slots=4) for spec in (LLAMA, replace(LLAMA, experts=experts))
    )
    assert mixed - dense == 1000 * (3 * (4 * 50 - 96) * 2 + 4 * 64 * 4)
