"""Every family: a checkpoint of a tiny random model computes what transformers computes from it, in FP32.

Prompts are longer than every window and than the length that scaled RoPE starts from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.family_gguf import write_family_gguf
from tests.helpers.oracle import all_logits
from tests.helpers.tiny_families import CASES, ORIGINAL_LEN, make_tiny_model
from tests.helpers.tiny_models import VOCAB_SIZE, edit_json, save_tiny_llama
from tests.models.reference import PagedDecoder
from tiny_vllm.weights.checkpoint import open_checkpoint
from tiny_vllm.weights.load import load_weights

PROMPT_LEN = 60
NUM_TOKENS = 32
# Both sides add up to 100 products of size 1 per value in FP32 in their own order, through up to 7 layers:
# 2^-24 * 100 for each, and norms and softmax keep errors at their size. Logits here are below 10.
TOLERANCE = 1e-4

NOT_IN_GGUF = ("qwen2 with windows", "qwen3 moe", "smollm3 with windows")
"""Layers of a kind of their own, which no key of the format tells."""
FIXED_IN_GGUF: dict[str, dict[str, Any]] = {
    "qwen3 moe unnormalised": dict(norm_topk_prob=True, decoder_sparse_step=1),
    "gemma2": dict(query_pre_attn_scalar=24),
    "gemma3": dict(query_pre_attn_scalar=24),
}
"""What a config.json may choose, but not a GGUF file: the architecture stands for one value."""


def prompt() -> list[int]:
    return torch.randint(VOCAB_SIZE, (PROMPT_LEN,), generator=torch.Generator().manual_seed(0)).tolist()


def load(path: Path, **options: Any) -> PagedDecoder:
    checkpoint = open_checkpoint(str(path))
    weights = load_weights(checkpoint, dtype=options.get("dtype", torch.float32), device="cpu")
    return PagedDecoder(checkpoint.spec, weights, page_size=8, **options)


def save(directory: Path, model: Any) -> Path:
    return save_tiny_llama(directory, model, tokenizer=False)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def logits_of_both(case: str, directory: Path) -> tuple[list[int], Tensor, Tensor]:
    """Our greedy tokens after the prompt, and the logits of all positions, ours and transformers'."""
    model = make_tiny_model(case)
    tokens, logits = load(save(directory, model)).generate(prompt(), NUM_TOKENS)
    return tokens, logits, all_logits(model, prompt() + tokens[:-1])


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_equal_transformers(case: str, tmp_path: Path) -> None:
    tokens, logits, expected = logits_of_both(case, tmp_path)
    assert_close(logits, expected)
    # Each of our tokens is the greedy one after what precedes it, so all are those of a greedy run.
    assert tokens == expected[PROMPT_LEN - 1 :].argmax(-1).tolist()
    assert len(set(tokens)) > NUM_TOKENS // 4, "this model repeats itself, which hides mistakes"


@pytest.mark.parametrize("case", CASES)
def test_the_number_of_parameters_is_that_of_transformers(case: str, tmp_path: Path) -> None:
    model = make_tiny_model(case)
    spec = open_checkpoint(str(save(tmp_path, model))).spec
    assert spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_follows_float32_as_closely_as_transformers(case: str, tmp_path: Path) -> None:
    model = make_tiny_model(case).to(torch.bfloat16)
    paged = load(save(tmp_path, model), dtype=torch.bfloat16, poison=float("nan"))
    sequence = paged.add(prompt(), max_len=PROMPT_LEN)
    logits = paged.step([], [(sequence, PROMPT_LEN - 10)])
    logits += [paged.step([sequence], [])[0] for _ in range(10)]
    theirs = all_logits(model, prompt())
    exact = all_logits(model.float(), prompt())
    # The median token, because experts that nearly tie may change places at a few of them. Fewer roundings
    # than transformers', so not worse than it but for chance.
    errors = [(actual - exact).abs().mean(-1).median() for actual in (torch.cat(logits), theirs)]
    assert errors[0] < 1.2 * errors[1]


@pytest.mark.parametrize("case", CASES)
def test_dummy_weights_fill_every_family_and_compute(case: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(save(tmp_path, make_tiny_model(case))), load_format="dummy")
    weights = load_weights(checkpoint, dtype=torch.bfloat16, device="cpu")
    paged = PagedDecoder(checkpoint.spec, weights, page_size=8, dtype=torch.bfloat16)
    _, logits = paged.generate(prompt(), 4)
    assert logits.isfinite().all() and logits.std() > 0.01


@pytest.mark.parametrize("case", [case for case in CASES if case not in NOT_IN_GGUF])
def test_a_gguf_file_computes_the_same(case: str, tmp_path: Path) -> None:
    model = make_tiny_model(case, **FIXED_IN_GGUF.get(case, {}))
    write_family_gguf(tmp_path / "model.gguf", model)
    paged = load(tmp_path / "model.gguf")
    (logits,) = paged.step([], [(paged.add(prompt(), max_len=PROMPT_LEN), PROMPT_LEN)])
    assert_close(logits, all_logits(model, prompt()))


@pytest.mark.parametrize("case", ["mixtral", "granite", "gemma3", "phi3"])
def test_quantised_matrices_of_every_shape_and_row_order(case: str, tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    # Rows of 64 and 96 values are whole blocks of 32; heads of 32 make those of the output product so too.
    model = make_tiny_model(case, head_dim=32, **(dict(query_pre_attn_scalar=32) if case == "gemma3" else {}))
    stored = GGMLQuantizationType.Q8_0
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # The format keeps what it has itself made of a block.
            values = dequantize(quantize(parameter.detach().numpy(), stored), stored)
            parameter.data.copy_(torch.from_numpy(values.reshape(parameter.shape)))
    write_family_gguf(tmp_path / "model.gguf", model, kind="Q8_0")
    _, logits = load(tmp_path / "model.gguf").generate(prompt(), 1)
    assert_close(logits, all_logits(model, prompt()))


def test_longrope_uses_the_short_factors_where_nothing_longer_is_allowed(tmp_path: Path) -> None:
    model = make_tiny_model("phi3 longrope")
    paged = load(save(tmp_path, model), max_model_len=ORIGINAL_LEN)
    assert paged.decoder.spec.default_model_len == ORIGINAL_LEN
    _, logits = paged.generate(prompt()[:ORIGINAL_LEN], 1)
    assert_close(logits, all_logits(model, prompt()[:ORIGINAL_LEN]))


def test_experts_may_be_stored_joined(tmp_path: Path) -> None:
    """As the modules of transformers hold them, and as it writes them when told to keep that form."""
    model = make_tiny_model("mixtral")
    model.save_pretrained(tmp_path, save_original_format=False)
    _, logits = load(tmp_path).generate(prompt(), 1)
    assert_close(logits, all_logits(model, prompt()))


def test_gemma_3_in_the_older_style_of_its_config(tmp_path: Path) -> None:
    model = make_tiny_model("gemma3")
    edit_json(
        save(tmp_path, model) / "config.json",
        rope_parameters=None,
        layer_types=None,
        rope_theta=20000.0,
        rope_local_base_freq=3000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=6,
    )
    _, logits = load(tmp_path).generate(prompt(), 1)
    assert_close(logits, all_logits(model, prompt()))


@pytest.mark.parametrize("layout", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_multimodal_model(layout: str, tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, SiglipVisionConfig

    text = make_tiny_model("gemma3")
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, image_size=28
    )
    config = Gemma3Config(text_config=text.config, vision_config=vision, mm_tokens_per_image=1)
    whole = Gemma3ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.save_pretrained(tmp_path, save_original_format=layout.startswith("language_model"))
    stored = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith(layout) for name in stored)
    assert any("vision_tower" in name for name in stored)
    _, logits = load(tmp_path).generate(prompt(), 1)
    assert_close(logits, all_logits(text, prompt()))


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_phi_3_in_the_older_style_of_its_config(name: str, tmp_path: Path) -> None:
    model = make_tiny_model("phi3 longrope")
    rope = model.config.rope_parameters
    edit_json(
        save(tmp_path, model) / "config.json",
        rope_parameters=None,
        rope_theta=rope["rope_theta"],
        partial_rotary_factor=rope["partial_rotary_factor"],
        rope_scaling={"type": name, "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]},
    )
    _, logits = load(tmp_path).generate(prompt(), 1)
    assert_close(logits, all_logits(model, prompt()))
