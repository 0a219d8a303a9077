"""Decode steps of every family through the chain's kernels, against the decoder on the reference path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from tests.helpers.tiny_families import CASES, WINDOW
from tests.models.reference import PagedDecoder
from tests.models.test_family_devices import spec_of_case
from tiny_vllm.kernels import triton_support
from tiny_vllm.kernels.slot_inputs import SlotState
from tiny_vllm.models.decode_chain import DecodeChain
from tiny_vllm.models.kv_cache import KVCache
from tiny_vllm.models.rope import rope_table
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.models.weights import LayerWeights, ModelWeights
from tiny_vllm.weights.checkpoint import Checkpoint
from tiny_vllm.weights.load import load_weights

pytestmark = pytest.mark.gpu

# Shorter and longer than the window, with the window's edge in the next step.
PROMPTS = (5, 2 * WINDOW + 9, WINDOW - 1)
PAGE_SIZE = 16
MAX_LEN = 128
# The order of FP32 sums differs, over some layers.
TOLERANCE = 1e-4


@contextmanager
def no_kernels() -> Iterator[None]:
    """What is on the CPU is computed by the references, though kernels could be interpreted there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_support, "INTERPRETED", False)
        yield


def make_weights(spec: ModelSpec) -> ModelWeights:
    checkpoint = Checkpoint(
        name="tiny", spec=spec, eos_token_ids=(), bos_token_id=None, source=None, tensor_names={},
        tokenizer=None,
    )  # fmt: skip
    return load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"), seed=1)


def on_device(weights: ModelWeights, device: torch.device) -> ModelWeights:
    def move(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device, copy=True)

    layers = [
        LayerWeights(**{field.name: move(getattr(layer, field.name)) for field in fields(layer)})
        for layer in weights.layers
    ]
    return replace(
        weights,
        embedding=weights.embedding.to(device),
        layers=layers,
        final_norm=weights.final_norm.to(device),
        lm_head=weights.lm_head.to(device),
    )


@pytest.mark.parametrize("padding", [0, 6], ids=["few_rows", "many_rows"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_follows_the_decoder(device: torch.device, case: str, padding: int) -> None:
    spec = spec_of_case(case)
    weights = make_weights(spec)
    moved = on_device(weights, device)
    generator = torch.Generator().manual_seed(0)
    with no_kernels():
        paged = PagedDecoder(spec, weights, page_size=PAGE_SIZE, max_model_len=MAX_LEN)
        tokens = [
            torch.randint(spec.vocab_size, (length + 2,), generator=generator).tolist() for length in PROMPTS
        ]
        sequences = [paged.add(token_ids, max_len=MAX_LEN) for token_ids in tokens]
        paged.step([], list(zip(sequences, PROMPTS, strict=True)))
    cache = KVCache.allocate(spec, num_pages=400, page_size=PAGE_SIZE, dtype=torch.float32, device=device)
    cache.k.copy_(paged.kv_cache.k)
    cache.v.copy_(paged.kv_cache.v)
    count = len(PROMPTS)
    integers = torch.zeros(count, dtype=torch.int64, device=device)
    state = SlotState(
        page_table=torch.tensor([sequence.pages for sequence in sequences], device=device),
        computed_len=torch.tensor(PROMPTS, device=device),
        last_token=integers.clone(),
        stream=integers.clone(),
        sample_position=integers.clone(),
    )
    cos_sin = rope_table(spec.rope, max_len=MAX_LEN).to(device)
    chain = DecodeChain(spec, moved, cos_sin, cache)
    slots = torch.tensor([2, 0, 1] + [count] * padding, device=device)
    for step in range(2):
        state.computed_len.copy_(torch.tensor(PROMPTS) + step)
        state.last_token.copy_(
            torch.tensor([ids[length + step] for ids, length in zip(tokens, PROMPTS, strict=True)])
        )
        with no_kernels():
            expected = torch.cat(paged.step(sequences, []))[slots[:count].cpu()]
        actual = chain.logits(state, slots)[:count].cpu()
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))
