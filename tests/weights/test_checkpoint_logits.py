"""From files to logits: a loaded checkpoint computes what transformers computes from the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.tiny_gguf import write_tiny_gguf
from tests.helpers.tiny_models import VOCAB_SIZE, make_tiny_llama, save_tiny_llama
from tests.models.reference import PagedDecoder
from tiny_vllm.weights.checkpoint import open_checkpoint
from tiny_vllm.weights.load import load_weights

ORIGINAL_LEN = 32
PROMPT_LEN = 96
"""Past the original length of every scaling."""

# FP32 on both sides: sums in another order, at most a few hundred roundings of 2^-24 relative to logits of
# size 10.
TOLERANCE = 1e-4

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL_LEN,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL_LEN},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL_LEN,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0],
    },
    "yarn with everything": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL_LEN,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.3,
        "truncate": False,
    },
}


def prompt() -> list[int]:
    return torch.randint(VOCAB_SIZE, (PROMPT_LEN,), generator=torch.Generator().manual_seed(0)).tolist()


def our_logits(path: Path) -> torch.Tensor:
    checkpoint = open_checkpoint(str(path))
    weights = load_weights(checkpoint, dtype=torch.float32, device="cpu")
    # Dynamic scaling stretches to the longest length, which transformers takes from the prompt.
    assert checkpoint.spec.max_position_embeddings >= PROMPT_LEN
    paged = PagedDecoder(checkpoint.spec, weights, page_size=16, max_model_len=PROMPT_LEN)
    (logits,) = paged.step([], [(paged.add(prompt(), max_len=PROMPT_LEN), PROMPT_LEN)])
    return logits


@torch.inference_mode()
def their_logits(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([prompt()])).logits[0]
    return logits


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


def context_of(rope: str) -> int:
    """Linear, dynamic and yarn reach their length by the factor; the others state it."""
    return ORIGINAL_LEN if rope in ("linear", "dynamic") else 4 * ORIGINAL_LEN


@pytest.mark.parametrize("old_style", [False, True], ids=["new style", "old style"])
@pytest.mark.parametrize("rope", ROPES)
def test_every_rope_scaling_in_both_config_styles(rope: str, old_style: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    parameters = {**ROPES[rope], "rope_theta": 5000.0}
    model = make_tiny_llama(rope_parameters=parameters, max_position_embeddings=context_of(rope))
    save_tiny_llama(tmp_path, model, old_style=old_style)
    reread = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert_same(our_logits(tmp_path), their_logits(reread))


@pytest.mark.parametrize(
    "variant",
    [
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 32},
    ],
    ids=lambda variant: next(iter(variant)),
)
@pytest.mark.parametrize("container", ["safetensors", "gguf"])
def test_every_variant_of_the_family(variant: dict[str, Any], container: str, tmp_path: Path) -> None:
    model = make_tiny_llama(**variant)
    path = tmp_path / "model.gguf" if container == "gguf" else tmp_path
    if container == "gguf":
        write_tiny_gguf(path, model)
    else:
        save_tiny_llama(path, model)
    assert_same(our_logits(path), their_logits(model))


def test_gguf_linear_scaling(tmp_path: Path) -> None:
    model = make_tiny_llama(
        rope_parameters={**ROPES["linear"], "rope_theta": 5000.0}, max_position_embeddings=ORIGINAL_LEN
    )
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    write_tiny_gguf(tmp_path / "model.gguf", model, metadata=scaling)
    assert_same(our_logits(tmp_path), their_logits(model))


def test_gguf_yarn_scaling(tmp_path: Path) -> None:
    model = make_tiny_llama(
        rope_parameters={**ROPES["yarn"], "rope_theta": 5000.0}, max_position_embeddings=128
    )
    scaling = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": ORIGINAL_LEN,
    }
    write_tiny_gguf(tmp_path / "model.gguf", model, metadata=scaling)
    assert_same(our_logits(tmp_path), their_logits(model))


def test_gguf_llama3_scaling(tmp_path: Path) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # Heads of 128, as in Llama 3.1: smaller ones have hardly a frequency between kept and slowed.
    parameters = {**ROPES["llama3"], "original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    model = make_tiny_llama(head_dim=128, num_hidden_layers=1, rope_parameters=parameters)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    factors = (500000.0 ** (-torch.arange(0, 128, 2) / 128) / scaled).numpy()
    write_tiny_gguf(tmp_path / "model.gguf", model, extra_tensors={"rope_freqs.weight": factors})
    assert_same(our_logits(tmp_path), their_logits(model))
