"""Tiny random models of every family, made by transformers."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.tiny_models import BOS_ID, EOS_ID, VOCAB_SIZE

WINDOW = 16
ORIGINAL_LEN = 32
"""The length that scaled RoPE starts from."""

COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.2,
    bos_token_id=BOS_ID,
    eos_token_id=EOS_ID,
    pad_token_id=None,
    attn_implementation="eager",
)
YARN = dict(rope_type="yarn", rope_theta=5000.0, factor=8.0, original_max_position_embeddings=ORIGINAL_LEN)
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=5000.0,
    short_factor=[1.0, 1.1, 1.2, 1.5, 1.9, 2.0],
    long_factor=[1.3, 1.7, 2.5, 4.0, 6.5, 9.0],
)
GEMMA = dict(sliding_window=WINDOW, head_dim=24, query_pre_attn_scalar=20)
EXPERTS = dict(num_local_experts=6, num_experts_per_tok=2, router_jitter_noise=0.0)

# Name of the case: the classes' prefix in transformers, and what differs from COMMON.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", dict(sliding_window=WINDOW, head_dim=24)),
    "mistral without window": ("Mistral", dict(sliding_window=None)),
    "mixtral": ("Mixtral", {**EXPERTS, "sliding_window": None}),
    "mixtral with window": ("Mixtral", {**EXPERTS, "sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {}),
    "qwen2 yarn": ("Qwen2", dict(rope_parameters=YARN)),
    "qwen2 with windows": (
        "Qwen2",
        dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, num_hidden_layers=3),
    ),
    "qwen3": ("Qwen3", dict(head_dim=24, tie_word_embeddings=True)),
    "qwen3 with biases": ("Qwen3", dict(head_dim=16, attention_bias=True)),
    "qwen3 moe": (
        "Qwen3Moe",
        dict(
            head_dim=24,
            moe_intermediate_size=40,
            num_experts=8,
            num_experts_per_tok=3,
            norm_topk_prob=True,
            mlp_only_layers=[1],
            num_hidden_layers=3,
        ),
    ),
    "qwen3 moe unnormalised": (
        "Qwen3Moe",
        dict(
            head_dim=16,
            moe_intermediate_size=32,
            num_experts=6,
            num_experts_per_tok=2,
            norm_topk_prob=False,
            decoder_sparse_step=2,
        ),
    ),
    "gemma2": (
        "Gemma2",
        dict(**GEMMA, num_hidden_layers=4, attn_logit_softcapping=4.0, final_logit_softcapping=1.0),
    ),
    "gemma3": (
        "Gemma3Text",
        dict(
            **GEMMA,
            num_hidden_layers=7,
            rope_parameters={
                "full_attention": dict(rope_type="linear", factor=8.0, rope_theta=20000.0),
                "sliding_attention": dict(rope_type="default", rope_theta=3000.0),
            },
        ),
    ),
    "phi3": ("Phi3", dict(rope_parameters=dict(rope_type="default", rope_theta=5000.0))),
    "phi3 with window": (
        "Phi3",
        dict(
            sliding_window=WINDOW,
            rope_parameters=dict(rope_type="default", rope_theta=5000.0, partial_rotary_factor=0.5),
        ),
    ),
    "phi3 longrope": (
        "Phi3",
        dict(
            rope_parameters={**LONGROPE, "partial_rotary_factor": 0.75},
            original_max_position_embeddings=ORIGINAL_LEN,
        ),
    ),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        dict(
            embedding_multiplier=3.0,
            logits_scaling=2.0,
            residual_multiplier=0.4,
            attention_multiplier=0.2,
            tie_word_embeddings=True,
        ),
    ),
    "granite with biases": ("Granite", dict(attention_bias=True, mlp_bias=True, attention_multiplier=0.25)),
    "smollm3": ("SmolLM3", dict(num_hidden_layers=4)),
    "smollm3 with windows": (
        "SmolLM3",
        dict(
            use_sliding_window=True,
            sliding_window=WINDOW,
            no_rope_layers=[1, 0, 1],
            num_hidden_layers=3,
            tie_word_embeddings=False,
        ),
    ),
    "gpt-oss": (
        "GptOss",
        dict(
            **EXPERTS,
            head_dim=16,
            sliding_window=WINDOW,
            rope_parameters={**YARN, "truncate": False},
        ),
    ),
}


def make_tiny_model(case: str, seed: int = 0, **overrides: Any) -> Any:
    """The random model of a case in FP32, ready to evaluate. overrides: fields of its config.

    Weights are spread widely enough that greedy choices are no near-ties; norms, biases and sinks are random
    too, because ones and zeros would hide mistakes.
    """
    import transformers

    prefix, options = CASES[case]
    config = getattr(transformers, f"{prefix}Config")(**{**COMMON, **options, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    centre = 0.0 if prefix.startswith("Gemma") else 1.0
                    parameter.uniform_(centre - 0.5, centre + 0.5)
                elif name.endswith(("bias", "sinks")):
                    parameter.normal_(std=0.3)
                elif "embed" in name and prefix.startswith("Gemma"):
                    # Multiplied by 8 on its way in: wider, it would drown everything that layers add.
                    parameter.normal_(std=0.05)
                elif "embed" not in name and "lm_head" not in name:
                    parameter.normal_(std=0.2)
    return model
