"""Tensors of a checkpoint -> the ModelWeights a decoder computes with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.models.weights import LayerWeights, ModelWeights
from tiny_vllm.weights.checkpoint import Checkpoint
from tiny_vllm.weights.dummy import dummy_tensors
from tiny_vllm.weights.names import expected_shapes

Progress = Callable[[int, int], None]


def load_weights(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    progress: Progress | None = None,
) -> ModelWeights:
    """Allocate the weights on `device` in `dtype` and fill them.

    Fused matrices are allocated once and their parts copied into them, so that the peak is the model plus one
    tensor of the file. seed: of dummy weights. progress: called with (values loaded, values in all), first
    with 0.
    """
    spec = checkpoint.spec
    weights = _allocate(spec, dtype, torch.device(device))
    parts = _parts(spec, weights)
    total = sum(part.numel() for part in parts.values())
    done = 0
    if progress:
        progress(done, total)
    with _one_thread():
        for name, tensor in _tensors(checkpoint, seed, torch.device(device)):
            parts[name].copy_(tensor)
            done += tensor.numel()
            if progress:
                progress(done, total)
    assert done == total, "an opened checkpoint holds every tensor"
    return weights


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch from waking its threads for every copy.

    Copies are short and numpy's work lies between them, so the threads cost more than they bring: the bundled
    model loads in 0.4 s with one, and on a busy machine several times slower with two.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _tensors(checkpoint: Checkpoint, seed: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    if checkpoint.source is None:
        return dummy_tensors(expected_shapes(checkpoint.spec), seed=seed, device=device)
    return checkpoint.source.read(checkpoint.tensor_names)


def _allocate(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Uninitialised tensors of the right shapes; a tied head is the embedding itself."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    hidden, inner = spec.hidden_size, spec.intermediate_size
    embedding = empty(spec.vocab_size, hidden)
    layers = [
        LayerWeights(
            input_norm=empty(hidden),
            qkv=empty(spec.qkv_size, hidden),
            output=empty(hidden, spec.q_size),
            post_attention_norm=empty(hidden),
            gate_up=empty(2 * inner, hidden),
            down=empty(hidden, inner),
            qkv_bias=empty(spec.qkv_size) if spec.qkv_bias else None,
            output_bias=empty(hidden) if spec.output_bias else None,
            gate_up_bias=empty(2 * inner) if spec.mlp_bias else None,
            down_bias=empty(hidden) if spec.mlp_bias else None,
        )
        for _ in range(spec.num_layers)
    ]
    head = embedding if spec.tie_word_embeddings else empty(spec.vocab_size, hidden)
    return ModelWeights(embedding=embedding, layers=layers, final_norm=empty(hidden), lm_head=head)


def _parts(spec: ModelSpec, weights: ModelWeights) -> dict[str, Tensor]:
    """Canonical name -> the tensor, or the rows of a fused one, that it fills."""
    parts = {"embedding": weights.embedding, "final_norm": weights.final_norm}
    if not spec.tie_word_embeddings:
        parts["lm_head"] = weights.lm_head
    for index, layer in enumerate(weights.layers):
        fields: dict[str, Tensor | None] = {
            "input_norm": layer.input_norm,
            "output": layer.output,
            "post_attention_norm": layer.post_attention_norm,
            "down": layer.down,
            "output_bias": layer.output_bias,
            "down_bias": layer.down_bias,
        }
        for suffix, qkv, gate_up in (
            ("", layer.qkv, layer.gate_up),
            ("_bias", layer.qkv_bias, layer.gate_up_bias),
        ):
            if qkv is not None:
                q, k, v = qkv.split([spec.q_size, spec.kv_size, spec.kv_size])
                fields |= {f"q{suffix}": q, f"k{suffix}": k, f"v{suffix}": v}
            if gate_up is not None:
                gate, up = gate_up.split(spec.intermediate_size)
                fields |= {f"gate{suffix}": gate, f"up{suffix}": up}
        parts |= {f"layers.{index}.{name}": tensor for name, tensor in fields.items() if tensor is not None}
    return parts
