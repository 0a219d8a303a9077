"""Loaded weights are those transformers wrote, fused and converted, whatever the container."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.tiny_gguf import write_tiny_gguf
from tests.helpers.tiny_models import make_tiny_llama, save_tiny_llama
from tiny_vllm.models.weights import ModelWeights
from tiny_vllm.weights.bundled import bundled_model_path
from tiny_vllm.weights.checkpoint import open_checkpoint
from tiny_vllm.weights.load import load_weights

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "one head each": {"num_key_value_heads": 4},
    "one key-value head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "attention biases": {"attention_bias": True},
    "wide heads": {"head_dim": 32},
}


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> ModelWeights:
    return load_weights(open_checkpoint(str(path), **options), dtype=dtype, device="cpu")


def assert_weights_of(model: Any, weights: ModelWeights, dtype: torch.dtype = torch.float32) -> None:
    def same(loaded: torch.Tensor | None, *parts: torch.Tensor | None) -> None:
        if loaded is None:
            assert parts == (None,) * len(parts)
            return
        assert loaded.dtype == dtype
        assert loaded.is_contiguous()
        assert torch.equal(loaded, torch.cat([part for part in parts if part is not None]).to(dtype))

    same(weights.embedding, model.model.embed_tokens.weight)
    same(weights.final_norm, model.model.norm.weight)
    same(weights.lm_head, model.lm_head.weight)
    assert len(weights.layers) == len(model.model.layers)
    for loaded, layer in zip(weights.layers, model.model.layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        same(loaded.input_norm, layer.input_layernorm.weight)
        same(loaded.qkv, *(projection.weight for projection in projections))
        same(loaded.qkv_bias, *(projection.bias for projection in projections))
        same(loaded.output, attention.o_proj.weight)
        same(loaded.output_bias, attention.o_proj.bias)
        same(loaded.post_attention_norm, layer.post_attention_layernorm.weight)
        same(loaded.gate_up, mlp.gate_proj.weight, mlp.up_proj.weight)
        same(loaded.gate_up_bias, mlp.gate_proj.bias, mlp.up_proj.bias)
        same(loaded.down, mlp.down_proj.weight)
        same(loaded.down_bias, mlp.down_proj.bias)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("container", ["safetensors", "shards", "gguf"])
def test_every_variant_loads_from_every_container(variant: str, container: str, tmp_path: Path) -> None:
    model = make_tiny_llama(**VARIANTS[variant])
    path = tmp_path
    if container == "gguf":
        path = tmp_path / "model.gguf"
        write_tiny_gguf(path, model)
    else:
        save_tiny_llama(tmp_path, model, max_shard_size="50KB" if container == "shards" else "5GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (container == "shards")
    weights = load(path)
    assert_weights_of(model, weights)
    assert (weights.lm_head is weights.embedding) == bool(model.config.tie_word_embeddings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_converted_once_from_the_stored_type(
    stored: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = make_tiny_llama()
    save_tiny_llama(tmp_path, model, dtype=stored)
    assert_weights_of(model.to(stored), load(tmp_path, dtype), dtype)


def test_loaded_weights_do_not_depend_on_the_file_any_more(tmp_path: Path) -> None:
    model = make_tiny_llama()
    save_tiny_llama(tmp_path, model)
    weights = load(tmp_path)
    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    content[-1000:] = bytes(1000)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(content)
    assert_weights_of(model, weights)


def test_progress_counts_every_value_from_nothing_to_all(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(save_tiny_llama(tmp_path, make_tiny_llama(tie_word_embeddings=True))))
    calls: list[tuple[int, int]] = []
    load_weights(
        checkpoint,
        dtype=torch.float32,
        device="cpu",
        progress=lambda done, total: calls.append((done, total)),
    )
    total = checkpoint.spec.num_parameters
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_the_number_of_threads_is_left_as_it_was(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, make_tiny_llama())
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        load(tmp_path)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_dummy_weights_are_the_same_for_a_seed_and_differ_between_seeds(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, make_tiny_llama())
    checkpoint = open_checkpoint(str(tmp_path), load_format="dummy")
    first, again, other = (
        load_weights(checkpoint, dtype=torch.float32, device="cpu", seed=seed) for seed in (1, 1, 2)
    )
    assert torch.equal(first.embedding, again.embedding)
    assert torch.equal(first.layers[1].qkv, again.layers[1].qkv)
    assert not torch.equal(first.embedding, other.embedding)
    assert not torch.equal(first.layers[0].qkv, first.layers[1].qkv)


def test_the_bundled_model_loads_in_bfloat16() -> None:
    weights = load_weights(open_checkpoint(None), dtype=torch.bfloat16, device="cpu")
    assert weights.embedding.shape == (49152, 576)
    assert weights.lm_head is weights.embedding
    for layer in weights.layers:
        # Trained norms and matrices: finite, and neither empty nor left unset.
        for tensor in (layer.qkv, layer.output, layer.gate_up, layer.down, layer.input_norm):
            assert 0.0 < tensor.float().std() < 2.0


@pytest.mark.slow
def test_the_bundled_model_has_the_weights_transformers_reads_from_it() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = str(bundled_model_path())
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**load_gguf_checkpoint(path)["config"]))
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict({name: torch.as_tensor(tensor) for name, tensor in tensors.items()}, assign=True)
    weights = load_weights(open_checkpoint(None), dtype=torch.bfloat16, device="cpu")
    assert_weights_of(model, weights, torch.bfloat16)
    assert weights.lm_head is weights.embedding
