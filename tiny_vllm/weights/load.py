"""Tensors of a checkpoint -> the ModelWeights a decoder computes with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields

import torch
from torch import Tensor

from tiny_vllm.errors import ModelError, printable
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.models.weights import LayerWeights, ModelWeights
from tiny_vllm.weights.checkpoint import Checkpoint
from tiny_vllm.weights.dummy import dummy_tensors
from tiny_vllm.weights.shapes import expected_shapes, num_values, stored_forms

Progress = Callable[[int, int], None]

ROWS_COMPARED = 4096
"""At a time: no second copy of a large matrix on the device."""


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
    with 0. Raises ModelError if a head that the configuration says is the embedding is another.
    """
    spec = checkpoint.spec
    weights = _allocate(spec, dtype, torch.device(device))
    parts = _parts(spec, weights)
    total = num_values(spec)
    done = 0
    if progress:
        progress(done, total)
    with _one_thread():
        for name, tensor in _tensors(checkpoint, seed, torch.device(device)):
            parts[name].copy_(tensor.reshape(parts[name].shape))
            done += tensor.numel()
            if progress:
                progress(done, total)
        _check_tied_head(checkpoint, weights.embedding)
    assert done == total, "an opened checkpoint holds every tensor"
    return weights


def _check_tied_head(checkpoint: Checkpoint, embedding: Tensor) -> None:
    """With another head than the embedding the files contradict themselves, and readers differ in which of
    the two they take."""
    if checkpoint.tied_head is None or checkpoint.source is None:
        return
    ((_, head),) = checkpoint.source.read({"lm_head": checkpoint.tied_head})
    rows = zip(head.split(ROWS_COMPARED), embedding.split(ROWS_COMPARED), strict=False)
    if head.shape != embedding.shape or not all(torch.equal(a.to(b), b) for a, b in rows):
        raise ModelError(
            f"{printable(checkpoint.tied_head)} is not the embedding, but tie_word_embeddings is true",
            hint="set tie_word_embeddings to false in config.json to use this head, or remove it from the "
            "files",
        )


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
        spec = checkpoint.spec
        shapes = expected_shapes(spec)
        return dummy_tensors(shapes, seed=seed, device=device, norm_offset=spec.norm_offset)
    return checkpoint.source.read(checkpoint.tensor_names)


def _allocate(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Uninitialised tensors of the right shapes; a tied head is the embedding itself."""
    forms = stored_forms(spec)

    def empty(name: str) -> Tensor:
        return torch.empty(forms[name].shape, dtype=dtype, device=device)

    def layer(index: int) -> LayerWeights:
        names = {field.name: f"layers.{index}.{field.name}" for field in fields(LayerWeights)}
        return LayerWeights(**{field: empty(name) for field, name in names.items() if name in forms})

    embedding = empty("embedding")
    return ModelWeights(
        embedding=embedding,
        layers=[layer(index) for index in range(spec.num_layers)],
        final_norm=empty("final_norm"),
        lm_head=embedding if spec.tie_word_embeddings else empty("lm_head"),
    )


def _parts(spec: ModelSpec, weights: ModelWeights) -> dict[str, Tensor]:
    """Canonical name -> the tensor, or the view of a fused one, that it fills; see `stored_forms`."""
    parts = {"embedding": weights.embedding, "final_norm": weights.final_norm}
    if not spec.tie_word_embeddings:
        parts["lm_head"] = weights.lm_head
    for index, layer in enumerate(weights.layers):
        views: dict[str, Tensor] = {}
        for field in fields(layer):
            tensor = getattr(layer, field.name)
            if tensor is not None:
                views[field.name] = tensor
        for suffix, axis in (("", -2), ("_bias", -1)):
            qkv, gate_up = views.get(f"qkv{suffix}"), views.get(f"gate_up{suffix}")
            if qkv is not None:
                sizes = [spec.q_size, spec.kv_size, spec.kv_size]
                views |= dict(zip((f"{part}{suffix}" for part in "qkv"), qkv.split(sizes, axis), strict=True))
            if gate_up is not None:
                views[f"gate{suffix}"], views[f"up{suffix}"] = gate_up.chunk(2, axis)
        if spec.has_experts(index):
            views |= _expert_views(views)
        parts |= {f"layers.{index}.{name}": tensor for name, tensor in views.items()}
    return parts


def _expert_views(views: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each expert's matrices, and the views for matrices whose inputs come before their outputs."""
    more = {
        f"{part}.{expert}": matrix
        for part in ("gate", "up", "down")
        for expert, matrix in enumerate(views[part])
    }
    more["down_columns"] = views["down"].mT
    # [experts, columns, rows / 2, 2]: what a file holds as gate and up in turns.
    more["gate_up_pairs"] = views["gate_up"].unflatten(1, (2, -1)).permute(0, 3, 2, 1)
    if "gate_up_bias" in views:
        more["gate_up_pairs_bias"] = views["gate_up_bias"].unflatten(1, (2, -1)).mT
    return more
