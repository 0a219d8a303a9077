"""The decoder against transformers' Llama in FP32: logits and greedy tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.oracle import all_logits
from tests.models.reference import PagedDecoder, make_llama, spec_of, weights_of

VARIANTS = {
    "gqa": {},
    "mha": dict(num_key_value_heads=4),
    "mqa": dict(num_key_value_heads=1),
    "tied": dict(tie_word_embeddings=True),
    "biases": dict(attention_bias=True, mlp_bias=True),
    "odd_sizes": dict(hidden_size=60, intermediate_size=37, num_attention_heads=6, vocab_size=101),
    "head_dim_beyond_hidden": dict(head_dim=32),
    "one_layer": dict(num_hidden_layers=1),
}


# Both sides accumulate dots of up to 100 terms in FP32, in different orders, through 2 layers: some ten
# roundings of 2^-24, amplified by norms and softmax. Logits here are of size 10: 2^-24 * 10 * 100 bounds it.
TOLERANCE = 1e-4


def random_tokens(length: int, seed: int = 1, vocab_size: int = 101) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def greedy(model: object, prompt: list[int], num_tokens: int) -> tuple[list[int], Tensor]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        logits = all_logits(model, token_ids)
        token_ids.append(int(logits[-1].argmax()))
    return token_ids[len(prompt) :], logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_and_logits_equal_transformers(variant: str) -> None:
    model = make_llama(**VARIANTS[variant])
    prompt = random_tokens(13)
    expected_tokens, expected_logits = greedy(model, prompt, 12)
    paged = PagedDecoder(spec_of(model.config), weights_of(model), page_size=4)
    tokens, logits = paged.generate(prompt, 12)
    assert tokens == expected_tokens
    assert_close(logits, expected_logits)


ROPE_VARIANTS = {
    "theta": dict(rope_type="default", rope_theta=500000.0),
    "linear": dict(rope_type="linear", rope_theta=10000.0, factor=4.0),
    "llama3": dict(
        rope_type="llama3",
        rope_theta=10000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    ),
    "yarn": dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32),
    "yarn_with_everything": dict(
        rope_type="yarn",
        rope_theta=10000.0,
        factor=4.0,
        original_max_position_embeddings=32,
        beta_fast=16.0,
        beta_slow=2.0,
        mscale=1.2,
        mscale_all_dim=0.8,
        truncate=False,
    ),
    "yarn_attention_factor": dict(
        rope_type="yarn",
        rope_theta=10000.0,
        factor=4.0,
        original_max_position_embeddings=32,
        attention_factor=1.5,
    ),
}


@pytest.mark.parametrize("variant", ROPE_VARIANTS)
def test_scaled_rope_equals_transformers_past_the_original_length(variant: str) -> None:
    model = make_llama(rope_parameters=ROPE_VARIANTS[variant])
    prompt = random_tokens(90)
    expected_tokens, expected_logits = greedy(model, prompt, 4)
    paged = PagedDecoder(spec_of(model.config), weights_of(model), page_size=16)
    tokens, logits = paged.generate(prompt, 4)
    assert tokens == expected_tokens
    assert_close(logits, expected_logits)


DYNAMIC = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)


@pytest.mark.parametrize(("prompt_len", "max_model_len"), [(20, 32), (90, 90)])
def test_dynamic_rope_equals_transformers_at_the_length_it_is_built_for(
    prompt_len: int, max_model_len: int
) -> None:
    model = make_llama(rope_parameters=DYNAMIC, max_position_embeddings=32)
    prompt = random_tokens(prompt_len)
    expected = all_logits(model, prompt)
    paged = PagedDecoder(spec_of(model.config), weights_of(model), page_size=16, max_model_len=max_model_len)
    _, logits = paged.generate(prompt, 1)
    assert_close(logits, expected)


def test_dynamic_rope_gives_a_position_one_rotation_whatever_the_length() -> None:
    model = make_llama(rope_parameters=DYNAMIC, max_position_embeddings=32)
    prompt = random_tokens(90)
    paged = PagedDecoder(spec_of(model.config), weights_of(model), page_size=16)
    _, long = paged.generate(prompt, 1)
    _, short = paged.generate(prompt[:10], 1)
    assert_close(short, long[:10])


@pytest.mark.parametrize("page_size", [1, 2, 8, 64])
@pytest.mark.parametrize("chunk_len", [1, 3, 16, 40])
def test_chunks_and_page_sizes_do_not_change_logits(page_size: int, chunk_len: int) -> None:
    model = make_llama()
    tokens = random_tokens(40)
    paged = PagedDecoder(spec_of(model.config), weights_of(model), page_size=page_size)
    sequence = paged.add(tokens, max_len=len(tokens))
    logits: list[Tensor] = []
    while sequence.computed_len < len(tokens):
        length = min(chunk_len, len(tokens) - sequence.computed_len)
        logits += paged.step([], [(sequence, length)])
    assert_close(torch.cat(logits), all_logits(model, tokens))


def test_prefix_hit_reads_the_other_sequences_pages() -> None:
    model = make_llama()
    prefix = random_tokens(16)
    paged = PagedDecoder(spec_of(model.config), weights_of(model), page_size=8)
    first = paged.add(prefix + random_tokens(5, seed=2), max_len=24)
    paged.step([], [(first, 21)])
    tokens = prefix + random_tokens(7, seed=3)
    second = paged.add(tokens, max_len=24, shared_pages=first.pages[:2])
    (logits,) = paged.step([], [(second, 7)])
    assert_close(logits, all_logits(model, tokens)[16:])


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_ragged_decodes_beside_prefill_chunks_over_poisoned_pages(poison: float) -> None:
    model = make_llama()
    paged = PagedDecoder(spec_of(model.config), weights_of(model), page_size=8, poison=poison)
    lens = [1, 7, 8, 9, 33, 2, 50]
    tokens = [random_tokens(length, seed=length) for length in lens]
    sequences = [paged.add(ids, max_len=length) for ids, length in zip(tokens, lens, strict=True)]
    decodes, prefills = sequences[1:4], sequences[4:]
    paged.step([], [(s, len(s.token_ids) - 1) for s in decodes])
    paged.step([], [(sequences[4], 5), (sequences[6], 49)])
    results = paged.step(decodes, [(sequences[0], 1), (sequences[4], 28), (prefills[1], 2), (prefills[2], 1)])
    order = [*decodes, sequences[0], sequences[4], prefills[1], prefills[2]]
    for sequence, logits in zip(order, results, strict=True):
        assert_close(logits, all_logits(model, sequence.token_ids)[-len(logits) :])


def test_logits_of_a_sequence_hardly_depend_on_its_neighbours() -> None:
    model = make_llama()
    spec = spec_of(model.config)
    alone = PagedDecoder(spec, weights_of(model), page_size=8)
    _, expected = alone.generate(random_tokens(20), 6)
    paged = PagedDecoder(spec, weights_of(model), page_size=8)
    sequences = [paged.add(random_tokens(20 + n, seed=1 + n), max_len=30 + n) for n in range(8)]
    logits = paged.step([], [(s, len(s.token_ids)) for s in sequences])[0]
    assert_close(logits, expected[:20])
    for position in range(20, 25):
        for sequence in sequences:
            sequence.token_ids.append(int(expected[position - 1].argmax()))
        logits = paged.step(sequences, [])[0]
        assert_close(logits, expected[position : position + 1])


def test_bfloat16_follows_float32_within_its_rounding() -> None:
    model = make_llama(initializer_range=0.1).to(torch.bfloat16)
    tokens = random_tokens(60)
    exact = all_logits(model.float(), tokens)
    theirs = all_logits(model.to(torch.bfloat16), tokens)
    paged = PagedDecoder(
        spec_of(model.config), weights_of(model), page_size=16, dtype=torch.bfloat16, poison=float("nan")
    )
    sequence = paged.add(tokens, max_len=60)
    first = paged.step([], [(sequence, 50)])
    rest = [paged.step([sequence], [])[0] for _ in range(10)]
    error = (torch.cat(first + rest) - exact).abs().mean()
    # Fewer roundings than transformers' own BF16, so not worse than it but for chance.
    assert error < 1.2 * (theirs - exact).abs().mean()


def test_weights_can_only_be_given_to_one_decoder() -> None:
    model = make_llama()
    weights = weights_of(model)
    PagedDecoder(spec_of(model.config), weights, page_size=8)
    with pytest.raises(AssertionError, match="given to a decoder before"):
        PagedDecoder(spec_of(model.config), weights, page_size=8)
