"""Decode steps through the chain's kernels over keys and values in FP8, against the decoder on a CPU."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.gpu.test_chain_families import (
    MAX_LEN,
    PAGE_SIZE,
    PROMPTS,
    TOLERANCE,
    make_weights,
    no_kernels,
    on_device,
)
from tests.models.reference import PagedDecoder
from tests.models.test_family_devices import spec_of_case
from tiny_vllm.kernels.fp8_cache import Fp8Cache
from tiny_vllm.kernels.slot_inputs import SlotState
from tiny_vllm.kernels.triton_support import INTERPRETED
from tiny_vllm.models.decode_chain import DecodeChain
from tiny_vllm.models.kv_cache import KVCache
from tiny_vllm.models.rope import rope_table
from tiny_vllm.models.spec import ModelSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
        reason="GPUs before sm_89 do not read FP8",
    ),
]


def allocate(spec: ModelSpec, device: torch.device | str) -> KVCache:
    return KVCache.allocate(
        spec, num_pages=400, page_size=PAGE_SIZE, dtype=torch.float32, is_fp8=True, device=device
    )


def copy_cache(source: KVCache, target: KVCache) -> None:
    for theirs, ours in zip(source.layers, target.layers, strict=True):
        for one, other in zip(theirs, ours, strict=True):
            assert isinstance(one, Fp8Cache) and isinstance(other, Fp8Cache)
            other.codes.view(torch.uint8).copy_(one.codes.view(torch.uint8))
            other.scales.copy_(one.scales)


@pytest.mark.parametrize("padding", [0, 6], ids=["few_rows", "many_rows"])
# Plain, biases, windows with soft caps, norms of heads.
@pytest.mark.parametrize("case", ["llama", "qwen2", "gemma2", "qwen3"])
def test_a_step_follows_the_decoder(device: torch.device, case: str, padding: int) -> None:
    spec = spec_of_case(case)
    weights = make_weights(spec)
    moved = on_device(weights, device)
    generator = torch.Generator().manual_seed(0)
    with no_kernels():
        paged = PagedDecoder(spec, weights, page_size=PAGE_SIZE, max_model_len=MAX_LEN)
        paged.kv_cache = allocate(spec, "cpu")
        tokens = [
            torch.randint(spec.vocab_size, (length + 2,), generator=generator).tolist() for length in PROMPTS
        ]
        sequences = [paged.add(token_ids, max_len=MAX_LEN) for token_ids in tokens]
        paged.step([], list(zip(sequences, PROMPTS, strict=True)))
    cache = allocate(spec, device)
    copy_cache(paged.kv_cache, cache)
    count = len(PROMPTS)
    integers = torch.zeros(count, dtype=torch.int64, device=device)
    state = SlotState(
        page_table=torch.tensor([sequence.pages for sequence in sequences], device=device),
        computed_len=torch.tensor(PROMPTS, device=device),
        last_token=integers.clone(),
        stream=integers.clone(),
        sample_position=integers.clone(),
    )
    chain = DecodeChain(spec, moved, rope_table(spec.rope, max_len=MAX_LEN).to(device), cache)
    slots = torch.tensor([2, 0, 1] + [count] * padding, device=device)
    for step in range(2):
        state.computed_len.copy_(torch.tensor(PROMPTS) + step)
        state.last_token.copy_(
            torch.tensor([ids[length + step] for ids, length in zip(tokens, PROMPTS, strict=True)])
        )
        with no_kernels():
            expected = torch.cat(paged.step(sequences, []))[slots[:count].cpu()]
        actual = chain.logits(state, slots)[:count].cpu()
        # Of the median sequence: where a sum falls on the other side of a border between two codes, one
        # sequence has another key.
        errors = (actual - expected).abs().amax(-1)
        assert float(errors.median()) <= TOLERANCE * float(expected.abs().max())
