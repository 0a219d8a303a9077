"""Every sampling parameter, alone and in ragged company, against one slow request at a time."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.sampling_oracle import draw, log_softmax, processed_logits
from tiny_vllm.engine.sampler import Sampler, SlotSampling, prompt_logprobs
from tiny_vllm.engine.slot_table import SlotTable
from tiny_vllm.engine.transfers import PlainTransfers, Upload
from tiny_vllm.types import SamplingParams, TokenLogprobs

CPU = torch.device("cpu")
VOCAB = 600
ENDINGS = (2, 7)
BAD_WORDS = ((11,), (12, 13), (13, 12, 14))


@dataclass
class Client:
    """One request with logits of its own that do not depend on where it runs."""

    params: SamplingParams
    seed: int
    prompt: list[int]
    bad_words: tuple[tuple[int, ...], ...] = ()
    scale: float = 2.0
    output: list[int] = field(default_factory=list)

    def logits(self) -> torch.Tensor:
        """Raw logits of the next position: they favour few tokens, so that penalties and bad words matter."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + len(self.output))
        values = torch.randn(VOCAB, generator=generator) * self.scale
        values[:16] += 3 * self.scale
        return values

    def slot_sampling(self) -> SlotSampling:
        return SlotSampling(
            params=self.params,
            seed=self.seed,
            prompt_token_ids=tuple(self.prompt),
            output_token_ids=tuple(self.output),
            ending_token_ids=ENDINGS,
            bad_words_token_ids=self.bad_words,
        )

    def expected(self, length: int) -> list[int]:
        """The first tokens according to the oracle."""
        plain = Client(self.params, self.seed, self.prompt, self.bad_words, self.scale)
        for position in range(length):
            logits = processed_logits(
                plain.logits().numpy(), self.params, self.prompt, plain.output, ENDINGS, self.bad_words
            )
            plain.output.append(draw(logits, self.params, self.seed, position))
        return plain.output


@dataclass
class Sampled:
    """One entry per row."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    invalid_rows: tuple[int, ...]


def assign(sampler: Sampler, slot: int, sampling: SlotSampling) -> None:
    upload = Upload()
    sampler.assign({slot: sampling}, upload)
    upload.send(PlainTransfers(CPU))


def draw_tokens(sampler: Sampler, logits: torch.Tensor, slots: list[int]) -> Sampled:
    upload = Upload()
    batch = sampler.prepare(slots, upload.integers(slots), upload)
    upload.send(PlainTransfers(CPU))
    drawn = sampler.draw(logits, batch, SlotTable(len(sampler.temperature), 1, CPU))
    tokens = drawn.tokens.tolist()
    logprobs = sampler.finish(batch, drawn, [token if token >= 0 else None for token in tokens])
    return Sampled(tokens, logprobs, tuple(row for row, token in enumerate(tokens) if token < 0))


def run(sampler: Sampler, clients: dict[int, Client], steps: int, order: list[int] | None = None) -> None:
    """Sample `steps` tokens for clients by slot."""
    slots = order or list(clients)
    for _ in range(steps):
        logits = torch.stack([clients[slot].logits() for slot in slots])
        sampled = draw_tokens(sampler, logits, slots)
        assert sampled.invalid_rows == ()
        for slot, token in zip(slots, sampled.token_ids, strict=True):
            clients[slot].output.append(token)


def start(clients: dict[int, Client], num_slots: int = 32) -> Sampler:
    sampler = Sampler(num_slots, VOCAB, "cpu")
    for slot, client in clients.items():
        assign(sampler, slot, client.slot_sampling())
    return sampler


def make_client(seed: int = 1, prompt: list[int] | None = None, **params: Any) -> Client:
    bad_words = BAD_WORDS if "bad_words" in params else ()
    return Client(SamplingParams(**params), seed, [3, 4, 4, 5] if prompt is None else prompt, bad_words)


ALONE: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "plain": {},
    "temperature": {"temperature": 1.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "presence": {"presence_penalty": 1.5},
    "negative presence": {"presence_penalty": -1.5},
    "frequency": {"frequency_penalty": 0.9},
    "repetition": {"repetition_penalty": 1.8},
    "repetition below one": {"repetition_penalty": 0.6},
    "greedy repetition": {"repetition_penalty": 1.5, "temperature": 0},
    "greedy frequency": {"frequency_penalty": 2.0, "temperature": 0},
    "bias": {"logit_bias": {5: 4.0, 9: -100.0, 599: 7}},
    "allowed": {"allowed_token_ids": [2, 3, 17, 500, 599]},
    "min_tokens": {"min_tokens": 6},
    "greedy min_tokens": {"min_tokens": 6, "temperature": 0},
    "bad_words": {"bad_words": ["x"]},
    "bad_words and allowed": {"bad_words": ["x"], "allowed_token_ids": [11, 12, 13, 14], "temperature": 2.0},
    "everything": {
        "temperature": 1.2,
        "top_k": 200,
        "top_p": 0.95,
        "min_p": 0.001,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.1,
        "logit_bias": {1: 2.0, 12: 3.0, 13: 3.0},
        "min_tokens": 4,
        "bad_words": ["x"],
        "logprobs": 2,
    },
}


@pytest.mark.parametrize("name", ALONE)
def test_each_parameter_alone_equals_the_oracle(name: str) -> None:
    for seed in (1, 2, 3):
        client = make_client(seed, **ALONE[name])
        run(start({5: client}), {5: client}, 10)
        assert client.output == client.expected(10)


@pytest.mark.parametrize("shuffle", range(4))
def test_all_parameters_mixed_in_one_batch_equal_the_oracle(shuffle: int) -> None:
    rng = random.Random(shuffle)
    slots = rng.sample(range(32), len(ALONE))
    cases = zip(slots, ALONE.values(), strict=True)
    clients = {slot: make_client(i, **case) for i, (slot, case) in enumerate(cases, start=10)}
    sampler = start(clients)
    for _ in range(8):
        rng.shuffle(slots)
        run(sampler, clients, 1, slots)
    for client in clients.values():
        assert client.output == client.expected(8)


def test_a_long_penalised_sequence_outgrows_its_first_table() -> None:
    prompt = list(range(250))
    penalised = make_client(1, prompt, repetition_penalty=1.2, presence_penalty=2.0, temperature=5.0)
    short = make_client(2, frequency_penalty=0.5)
    clients = {0: penalised, 3: short}
    run(start(clients), clients, 40)
    assert len(set(prompt + penalised.output)) > 256
    assert penalised.output == penalised.expected(40)
    assert short.output == short.expected(40)


@pytest.mark.parametrize("company", [{}, {"temperature": 0}, {"top_k": 3}, {"repetition_penalty": 2.0}])
def test_a_seed_gives_the_same_tokens_in_any_company_and_order(company: dict[str, Any]) -> None:
    alone = make_client(99, top_p=0.9)
    run(start({0: alone}), {0: alone}, 12)
    for slot, order in ((3, [0, 3, 1]), (0, [2, 1, 0])):
        seeded = make_client(99, top_p=0.9)
        clients = {s: make_client(s, **company) for s in order}
        clients[slot] = seeded
        run(start(clients), clients, 12, order)
        assert seeded.output == alone.output


def test_different_seeds_differ_and_large_or_negative_ones_work() -> None:
    seeds = [0, 1, 2, 2**32, 2**63, 2**64 - 1, -(2**63)]
    sampler = Sampler(len(seeds), VOCAB, "cpu")
    for slot, seed in enumerate(seeds):
        assign(sampler, slot, SlotSampling(params=SamplingParams(), seed=seed, prompt_token_ids=(1,)))
    logits = torch.zeros(len(seeds), VOCAB)
    drawn = [draw_tokens(sampler, logits.clone(), list(range(len(seeds)))).token_ids for _ in range(6)]
    streams = [tuple(step[slot] for step in drawn) for slot in range(len(seeds))]
    # 2**63 and -(2**63) are the same number modulo 2**64, all others differ.
    assert streams[4] == streams[6]
    assert len(set(streams)) == len(seeds) - 1
    for stream in streams:
        assert len(set(stream)) > 1


@pytest.mark.parametrize("name", ["plain", "everything", "greedy repetition", "bad_words", "min_tokens"])
@pytest.mark.parametrize("stop_at", [1, 4, 7])
def test_a_preempted_sequence_goes_on_with_the_same_tokens(name: str, stop_at: int) -> None:
    client = make_client(5, **ALONE[name])
    sampler = start({1: client})
    run(sampler, {1: client}, stop_at)
    sampler.release(1)
    other = make_client(6, temperature=0.5, frequency_penalty=1.0)
    assign(sampler, 1, other.slot_sampling())
    run(sampler, {1: other}, 2)
    assign(sampler, 4, client.slot_sampling())
    run(sampler, {1: other, 4: client}, 10 - stop_at, [4, 1])
    assert client.output == client.expected(10)


def test_a_slot_keeps_nothing_of_its_last_sequence() -> None:
    used = make_client(1, **ALONE["everything"])
    sampler = start({2: used})
    run(sampler, {2: used}, 5)
    sampler.release(2)
    sampler.release(2)
    for params in ({}, {"presence_penalty": 1.0}, {"temperature": 0}):
        fresh = make_client(8, **params)
        assign(sampler, 2, fresh.slot_sampling())
        run(sampler, {2: fresh}, 6)
        assert fresh.output == fresh.expected(6)
        logits = fresh.logits()[None]
        assert draw_tokens(sampler, logits, [2]).logprobs == [None]


def test_endings_cannot_be_drawn_before_min_tokens() -> None:
    client = make_client(min_tokens=3, logit_bias={2: 100.0})
    run(start({0: client}), {0: client}, 5)
    assert not set(client.output[:3]) & set(ENDINGS)
    assert client.output[3:] == [2, 2]


def test_bias_of_a_hundred_forces_and_forbids() -> None:
    forced = make_client(1, logit_bias={321: 100})
    forbidden = make_client(2, temperature=0, logit_bias=dict.fromkeys(range(16), -100))
    clients = {0: forced, 1: forbidden}
    run(start(clients), clients, 6)
    assert forced.output == [321] * 6
    assert not set(forbidden.output) & set(range(16))


def test_bad_words_forbid_only_the_completion_and_ignore_the_prompt() -> None:
    # Logits that want 12 above all and 13 next: 13 alone is free, 12 13 is not.
    wanted = torch.zeros(1, VOCAB)
    wanted[0, 12], wanted[0, 13], wanted[0, 20] = 9.0, 10.0, 5.0
    sampler = Sampler(1, VOCAB, "cpu")
    params = SamplingParams(temperature=0, bad_words=["x"])
    words = ((13, 12), (12, 12))
    assign(
        sampler,
        0,
        SlotSampling(params=params, seed=0, prompt_token_ids=(13, 13, 12), bad_words_token_ids=words),
    )
    without_13 = wanted.clone()
    without_13[0, 13] = 0
    steps = [without_13, wanted, without_13, without_13]
    # First 12: the prompt's 13 before it does not count. Then 13, and 12 may not follow it: 20; then 12 may.
    assert [draw_tokens(sampler, step.clone(), [0]).token_ids[0] for step in steps] == [12, 13, 20, 12]


@pytest.mark.parametrize(
    ("params", "bad_words", "expected"),
    [
        ({"allowed_token_ids": [11]}, ((11,),), {11}),
        ({"allowed_token_ids": [11, 12]}, ((11,), (12,)), {11, 12}),
        ({"allowed_token_ids": [2], "min_tokens": 5}, (), {2}),
        ({"allowed_token_ids": [2, 11], "min_tokens": 5}, ((11,),), {2}),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_allow_list_holds_even_if_other_masks_would_leave_nothing(
    params: dict[str, Any], bad_words: tuple[tuple[int, ...], ...], expected: set[int], temperature: float
) -> None:
    client = Client(SamplingParams(temperature=temperature, **params), 1, [3], bad_words)
    run(start({0: client}), {0: client}, 4)
    assert set(client.output) <= expected


def test_ending_tokens_and_bad_words_outside_the_vocabulary_are_harmless() -> None:
    sampling = SlotSampling(
        params=SamplingParams(min_tokens=2, bad_words=["x"]),
        seed=1,
        prompt_token_ids=(1,),
        ending_token_ids=(VOCAB, 10**6, -1),
        bad_words_token_ids=((VOCAB,), (3, VOCAB + 1)),
    )
    sampler = Sampler(1, VOCAB, "cpu")
    assign(sampler, 0, sampling)
    assert draw_tokens(sampler, torch.zeros(1, VOCAB), [0]).invalid_rows == ()


@pytest.mark.parametrize("prompt_is_all_one_token", [True, False])
def test_only_repetition_looks_at_the_prompt(prompt_is_all_one_token: bool) -> None:
    prompt = [30] * 50 if prompt_is_all_one_token else [31] * 50
    logits = torch.zeros(3, VOCAB)
    logits[:, 30], logits[:, 40] = 10.0, 9.0
    sampler = Sampler(3, VOCAB, "cpu")
    for slot, penalty in enumerate(("presence_penalty", "frequency_penalty", "repetition_penalty")):
        params = SamplingParams(temperature=0, **{penalty: 2.0})
        assign(sampler, slot, SlotSampling(params=params, seed=0, prompt_token_ids=prompt))
    first = draw_tokens(sampler, logits.clone(), [0, 1, 2]).token_ids
    assert first == [30, 30, 40 if prompt_is_all_one_token else 30]
    assert draw_tokens(sampler, logits.clone(), [0, 1, 2]).token_ids[:2] == [40, 40]


def test_penalised_rows_do_not_depend_on_the_order_of_plain_neighbours() -> None:
    def clients() -> Iterator[Client]:
        for seed in range(4):
            yield make_client(seed, temperature=0, **({"repetition_penalty": 1.4} if seed % 2 else {}))

    expected = [client.expected(6) for client in clients()]
    for order in itertools.permutations(range(4)):
        batch = dict(enumerate(clients()))
        run(start(batch), batch, 6, list(order))
        assert [client.output for client in batch.values()] == expected


@pytest.mark.parametrize("repetition", [1e-300, 1e-30, 1e30, 1e300])
@pytest.mark.parametrize("temperature", [1e-5, 1.0, 1e300])
def test_extreme_but_valid_parameters_never_break_a_row(repetition: float, temperature: float) -> None:
    params = SamplingParams(repetition_penalty=repetition, temperature=temperature, top_p=0.9)
    sampler = Sampler(1, VOCAB, "cpu")
    assign(sampler, 0, SlotSampling(params=params, seed=1, prompt_token_ids=list(range(100))))
    for _ in range(5):
        logits = torch.randn(1, VOCAB).clamp(-1, 1) * 1e4
        logits[0, 50:60] = 0.0
        assert draw_tokens(sampler, logits, [0]).invalid_rows == ()


@pytest.mark.parametrize("damage", [math.nan, math.inf])
def test_broken_logits_fail_one_row_and_spare_the_others(damage: float) -> None:
    cases = [ALONE["plain"], ALONE["allowed"], ALONE["everything"], ALONE["greedy"], ALONE["bad_words"]]
    for broken in range(len(cases)):
        clients = {slot: make_client(slot, **case) for slot, case in enumerate(cases)}
        sampler = start(clients)
        run(sampler, clients, 2)
        logits = torch.stack([client.logits() for client in clients.values()])
        logits[broken, 444] = damage
        sampled = draw_tokens(sampler, logits, list(clients))
        assert sampled.invalid_rows == (broken,)
        assert sampled.logprobs[broken] is None
        sampler.release(broken)
        for slot, client in clients.items():
            client.output.append(sampled.token_ids[slot])
        del clients[broken]
        run(sampler, clients, 2)
        for client in clients.values():
            assert client.output == client.expected(5)


def test_logprobs_are_raw_whatever_the_sampling_settings() -> None:
    settings: list[dict[str, Any]] = [
        {"temperature": 0.1},
        {"temperature": 2.0},
        {"top_p": 0.5},
        {"top_k": 1},
        {"presence_penalty": 2.0, "repetition_penalty": 3.0},
        {"logit_bias": {1: -50.0}},
        {"allowed_token_ids": [77], "logprobs": 0},
        {"bad_words": ["x"], "min_tokens": 9, "logprobs": -1},
    ]
    clients = {slot: make_client(slot, **{"logprobs": 4, **case}) for slot, case in enumerate(settings)}
    clients[8] = make_client(8)
    sampler = start(clients)
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    sampled = draw_tokens(sampler, logits.clone(), list(clients))
    assert sampled.logprobs[8] is None
    for row, num_top in enumerate([4, 4, 4, 4, 4, 4, 0, VOCAB]):
        entry = sampled.logprobs[row]
        assert entry is not None
        expected = log_softmax(logits[row].numpy())
        order = np.argsort(-logits[row].numpy(), kind="stable")[:num_top].tolist()
        assert entry.token_ids == (sampled.token_ids[row], *order)
        # FP32 logsumexp of 600 terms near 10: a few roundings of 2**-20 each.
        np.testing.assert_allclose(entry.logprobs, expected[list(entry.token_ids)], atol=6 * 2.0**-20)
        assert entry.ranks[1:] == tuple(range(1, num_top + 1))
        assert entry.ranks[0] == 1 + int((logits[row] > logits[row, entry.token_ids[0]]).sum())


@pytest.mark.parametrize("num_top", [0, 3, -1])
def test_prompt_logprobs_do_not_depend_on_how_the_prompt_is_cut(num_top: int) -> None:
    logits = torch.randn(150, VOCAB, generator=torch.Generator().manual_seed(2))
    tokens = torch.arange(150) * 3
    whole = prompt_logprobs(logits, tokens, num_top)
    parts = [
        entry
        for start_row in range(0, 150, 40)
        for entry in prompt_logprobs(
            logits[start_row : start_row + 40], tokens[start_row : start_row + 40], num_top
        )
    ]
    assert whole == parts
    assert len(whole) == 150
    for row in (0, 63, 64, 149):
        assert whole[row].token_ids[0] == tokens[row]
        assert len(whole[row].token_ids) == 1 + (VOCAB if num_top < 0 else num_top)
        assert whole[row].logprobs[0] == pytest.approx(
            log_softmax(logits[row].numpy())[tokens[row]], abs=1e-5
        )


def test_steps_inside_and_outside_inference_mode_can_be_mixed() -> None:
    client = make_client(1, **ALONE["everything"], prompt=list(range(300)))
    sampler = Sampler(2, VOCAB, "cpu")
    with torch.inference_mode():
        assign(sampler, 0, client.slot_sampling())
        run(sampler, {0: client}, 2)
    assign(sampler, 1, make_client(2, presence_penalty=1.0).slot_sampling())
    run(sampler, {0: client}, 2)
    assert client.output == client.expected(4)


def test_no_prompt_positions_are_no_error() -> None:
    assert prompt_logprobs(torch.empty(0, VOCAB), torch.empty(0, dtype=torch.int64), 2) == []
