"""The device rows always list exactly the distinct tokens of their sequence, with true counts."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from tiny_vllm.engine.seen_tokens import INITIAL_WIDTH, SeenTokens
from tiny_vllm.engine.transfers import PlainTransfers, Upload


def assign(seen: SeenTokens, slot: int, prompt: list[int], output: list[int]) -> None:
    upload = Upload()
    seen.assign(slot, prompt, output, upload)
    upload.send(PlainTransfers(torch.device("cpu")))


def record(seen: SeenTokens, slots: list[int], token_ids: torch.Tensor) -> None:
    with torch.inference_mode():
        seen.record(slots, torch.tensor(slots), token_ids)


def listed(seen: SeenTokens, slot: int) -> dict[int, tuple[int, bool]]:
    """Tokens of a row: count and in_prompt. Repeats must agree; entries without effect are left out."""
    entries: dict[int, tuple[int, bool]] = {}
    rows = (seen.token_ids[slot].tolist(), seen.counts[slot].tolist(), seen.in_prompt[slot].tolist())
    for token, count, in_prompt in zip(*rows, strict=True):
        assert entries.setdefault(token, (count, in_prompt)) == (count, in_prompt)
    return {token: entry for token, entry in entries.items() if entry != (0, False)}


def truth(prompt: list[int], output: list[int]) -> dict[int, tuple[int, bool]]:
    counts = Counter(output)
    return {token: (counts[token], token in prompt) for token in {*prompt, *output}}


@pytest.mark.parametrize("vocab_size", [3, 40, 5000])
def test_random_sequences_are_counted_truly(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    seen = SeenTokens(4, torch.device("cpu"))
    prompts: dict[int, list[int]] = {}
    outputs: dict[int, list[int]] = {}
    for step in range(400):
        if step % 50 == 0:
            slot = rng.randrange(4)
            prompts[slot] = rng.choices(range(vocab_size), k=rng.choice([0, 1, 30]))
            outputs[slot] = rng.choices(range(vocab_size), k=rng.choice([0, 5]))
            assign(seen, slot, prompts[slot], outputs[slot])
        slots = rng.sample(sorted(prompts), rng.randint(1, len(prompts)))
        tokens = rng.choices(range(vocab_size), k=len(slots))
        record(seen, slots, torch.tensor(tokens))
        for slot, token in zip(slots, tokens, strict=True):
            outputs[slot].append(token)
        if step % 10 == 0:
            for slot in prompts:
                assert listed(seen, slot) == truth(prompts[slot], outputs[slot])


@pytest.mark.parametrize(
    "num_distinct", [INITIAL_WIDTH - 2, INITIAL_WIDTH - 1, INITIAL_WIDTH, 3 * INITIAL_WIDTH]
)
def test_rows_widen_for_one_slot_without_harm_to_the_others(num_distinct: int) -> None:
    seen = SeenTokens(3, torch.device("cpu"))
    short = [9, 0]
    assign(seen, 0, short, [4])
    long = list(range(num_distinct))
    assign(seen, 2, long, [])
    output = []
    for token in range(num_distinct, num_distinct + 5):
        record(seen, [2, 0], torch.tensor([token, 4]))
        output.append(token)
    assert listed(seen, 2) == truth(long, output)
    assert listed(seen, 0) == truth(short, [4] * 6)


def test_nothing_is_allocated_before_the_first_use() -> None:
    assert SeenTokens(256, torch.device("cpu")).token_ids.numel() == 0
