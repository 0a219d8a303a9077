from __future__ import annotations

from dataclasses import replace
from enum import IntEnum
from typing import Any

import numpy as np
import pytest

from tiny_vllm.errors import PromptTooLong, RequestError
from tiny_vllm.text.gguf_tokenizer import tokenizer_from_gguf
from tiny_vllm.text.gguf_vocabulary import GGUFVocabulary
from tiny_vllm.text.request_builder import RequestBuilder
from tiny_vllm.text.tokenizer import Tokenizer
from tiny_vllm.types import Request, SamplingParams

PADDED_VOCAB_SIZE = 832
CONTEXT = 50
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}<{{ message.role }}>{{ message.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def plain_tokenizer(byte_level_vocabulary: GGUFVocabulary) -> Tokenizer:
    return tokenizer_from_gguf(replace(byte_level_vocabulary, chat_template=TEMPLATE))


@pytest.fixture(scope="module")
def bos_tokenizer(byte_level_vocabulary: GGUFVocabulary) -> Tokenizer:
    template = "{{ bos_token }}" + TEMPLATE
    return tokenizer_from_gguf(replace(byte_level_vocabulary, add_bos_token=True, chat_template=template))


def builder(tokenizer: Tokenizer | None, **options: int) -> RequestBuilder:
    return RequestBuilder(tokenizer, **{"vocab_size": PADDED_VOCAB_SIZE, "max_model_len": CONTEXT, **options})


def build(tokenizer: Tokenizer | None, prompt: Any = "hi", **sampling: Any) -> Request:
    return builder(tokenizer).build(prompt, SamplingParams(**sampling)).request


def test_text_becomes_ids_and_is_kept(plain_tokenizer: Tokenizer) -> None:
    prepared = builder(plain_tokenizer).build(
        "hi 12", SamplingParams(), request_id="a", priority=-3, cache_salt="tenant", arrival_time=1.5
    )
    request = prepared.request
    assert prepared.prompt == "hi 12"
    assert request.prompt_token_ids == tuple(plain_tokenizer.encode("hi 12"))
    assert (request.request_id, request.priority) == ("a", -3)
    assert (request.cache_salt, request.arrival_time) == ("tenant", 1.5)


def test_made_up_request_ids_differ(plain_tokenizer: Tokenizer) -> None:
    requests = builder(plain_tokenizer)
    ids = {requests.build("hi", SamplingParams()).request.request_id for _ in range(3)}
    assert len(ids) == 3


@pytest.mark.parametrize(
    "prompt",
    [[5, 6], (5, 6), np.array([5, 6]), [np.int32(5), np.int64(6)]],
    ids=["list", "tuple", "array", "numpy ints"],
)
def test_token_ids_are_taken_as_they_are(bos_tokenizer: Tokenizer, prompt: Any) -> None:
    prepared = builder(bos_tokenizer).build(prompt, SamplingParams())
    assert prepared.request.prompt_token_ids == (5, 6)
    assert all(type(token_id) is int for token_id in prepared.request.prompt_token_ids)
    assert prepared.prompt is None


class Named(IntEnum):
    FIVE = 5


@pytest.mark.parametrize("prompt", [[5, Named.FIVE], [np.int64(5), 5], [*range(4, 800), np.uint16(5)]])
def test_what_counts_as_an_integer_becomes_one(plain_tokenizer: Tokenizer, prompt: Any) -> None:
    wide = RequestBuilder(plain_tokenizer, vocab_size=PADDED_VOCAB_SIZE, max_model_len=1000)
    token_ids = wide.build(prompt, SamplingParams()).request.prompt_token_ids
    assert token_ids == tuple(map(int, prompt))
    assert {type(token_id) for token_id in token_ids} == {int}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5, 6, True, None], "the prompt contains True, which is not a token id"),
        ([np.int64(5), 6.0, True], "the prompt contains 6.0, which is not a token id"),
        ([5, -3, 2**70], "token id -3, but this model's ids"),
        ([5, 2**70, -3], f"token id {2**70}, but this model's ids"),
        ([5, -(2**70), 832], f"token id {-(2**70)}, but this model's ids"),
    ],
)
def test_the_first_wrong_value_is_named(plain_tokenizer: Tokenizer, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build(plain_tokenizer, prompt)


@pytest.mark.parametrize("wrong", [-1, PADDED_VOCAB_SIZE, 2**63, 2**64])
def test_ids_outside_the_vocabulary_are_named(plain_tokenizer: Tokenizer, wrong: int) -> None:
    message = rf"token id {wrong}, but this model's ids are 0 to 831\nhint: take ids from this model's own"
    with pytest.raises(RequestError, match=message):
        build(plain_tokenizer, [5, wrong, 6])


def test_an_id_too_long_to_write_out_is_refused(plain_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="token id an integer of 16610 bits, but this model's ids"):
        build(plain_tokenizer, [10**5000])


def test_rows_beyond_the_tokenizer_are_valid_ids(plain_tokenizer: Tokenizer) -> None:
    assert plain_tokenizer.vocab_size < PADDED_VOCAB_SIZE
    assert build(plain_tokenizer, [PADDED_VOCAB_SIZE - 1]).prompt_token_ids == (PADDED_VOCAB_SIZE - 1,)


@pytest.mark.parametrize(
    "prompt",
    [[5, True], [5, 6.0], [5, None], ["hi"], np.array([0.5]), np.array([True]), [[5]], [np.bool_(True)]],
)
def test_what_is_no_token_id_is_refused(plain_tokenizer: Tokenizer, prompt: Any) -> None:
    with pytest.raises(RequestError, match="which is not a token id"):
        build(plain_tokenizer, prompt)


@pytest.mark.parametrize("prompt", [None, 5, b"hi", {"a": 1}, {5, 6}, np.array(5)])
def test_other_types_of_prompts_are_refused(plain_tokenizer: Tokenizer, prompt: Any) -> None:
    with pytest.raises(RequestError, match="but must be text or a list of token ids"):
        build(plain_tokenizer, prompt)


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_an_empty_prompt_needs_bos(plain_tokenizer: Tokenizer, bos_tokenizer: Tokenizer, prompt: Any) -> None:
    assert build(bos_tokenizer, prompt).prompt_token_ids == (0,)
    with pytest.raises(RequestError, match="the prompt is empty"):
        build(plain_tokenizer, prompt)


def test_max_tokens_is_lowered_to_what_the_context_leaves(plain_tokenizer: Tokenizer) -> None:
    prompt = [5] * (CONTEXT - 1)
    for max_tokens in (None, 1, 10**9):
        assert build(plain_tokenizer, prompt, max_tokens=max_tokens).sampling.max_tokens == 1
    assert build(plain_tokenizer, [5], max_tokens=None).sampling.max_tokens == CONTEXT - 1
    assert build(plain_tokenizer, [5], max_tokens=7).sampling.max_tokens == 7
    assert build(plain_tokenizer, [5], max_tokens=0).sampling.max_tokens == 0


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 10 * CONTEXT])
@pytest.mark.parametrize("max_tokens", [0, 1, None])
def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers(
    plain_tokenizer: Tokenizer, length: int, max_tokens: int | None
) -> None:
    with pytest.raises(PromptTooLong, match=rf"has {length} tokens, but must be shorter .* is 50 tokens"):
        build(plain_tokenizer, [5] * length, max_tokens=max_tokens)


def test_min_tokens_that_cannot_be_reached_are_refused(plain_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="min_tokens is 20, but 40 prompt tokens leave room for 10"):
        build(plain_tokenizer, [5] * 40, min_tokens=20, max_tokens=None)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"logit_bias": {PADDED_VOCAB_SIZE: 1.0}}, "logit_bias has token id 832"),
        ({"allowed_token_ids": [5, PADDED_VOCAB_SIZE]}, "allowed_token_ids has token id 832"),
        ({"stop_token_ids": [10**12]}, "stop_token_ids has token id 1000000000000"),
        ({"allowed_token_ids": [5] * 1000}, "allowed_token_ids has 1000 entries"),
        ({"n": 129}, "n is 129, but must be at most 128\nhint: the limit is the engine option max_n"),
        ({"logprobs": 21}, "logprobs is 21, but must be at most 20"),
        ({"prompt_logprobs": 10**6}, "prompt_logprobs is 1000000, but must be at most 20"),
        ({"logprobs": -1}, "logprobs is -1, the whole vocabulary"),
        ({"stop": ["x"] * 10_000}, "stop has 10000 entries"),
        ({"stop": "x" * 10_000}, "stop has an entry of 10000 characters"),
        ({"bad_words": ["x"] * 10_000}, "bad_words has 10000 entries"),
    ],
)
def test_requests_beyond_the_limits_are_refused(
    plain_tokenizer: Tokenizer, sampling: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        build(plain_tokenizer, **sampling)


def test_added_tokens_may_be_biased(byte_level_vocabulary: GGUFVocabulary) -> None:
    tokens = [*byte_level_vocabulary.tokens, "<added>"]
    types = [*(byte_level_vocabulary.token_types or ()), 4]
    tokenizer = tokenizer_from_gguf(replace(byte_level_vocabulary, tokens=tokens, token_types=types))
    added = tokenizer.vocab_size - 1
    assert build(tokenizer, logit_bias={added: 5.0}).sampling.logit_bias == {added: 5.0}


def test_logprobs_of_the_whole_vocabulary_need_the_option(plain_tokenizer: Tokenizer) -> None:
    requests = builder(plain_tokenizer, max_logprobs=-1)
    for number in (-1, 0, PADDED_VOCAB_SIZE):
        sampling = SamplingParams(logprobs=number, prompt_logprobs=number)
        assert requests.build("hi", sampling).request.sampling.logprobs == number
    with pytest.raises(RequestError, match="logprobs is 833, but must be at most 832"):
        requests.build("hi", SamplingParams(logprobs=PADDED_VOCAB_SIZE + 1))


def test_logprobs_never_exceed_a_small_vocabulary(plain_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="logprobs is 9, but must be at most 8"):
        builder(plain_tokenizer, vocab_size=8).build([5], SamplingParams(logprobs=9))


def test_bad_words_stand_for_both_forms(plain_tokenizer: Tokenizer) -> None:
    spaced = tuple(plain_tokenizer.encode(" import", add_special_tokens=False))
    bare = tuple(plain_tokenizer.encode("import", add_special_tokens=False))
    for word in ("import", " import"):
        assert set(build(plain_tokenizer, bad_words=[word]).bad_words_token_ids) == {spaced, bare}
    assert len(build(plain_tokenizer, bad_words=["import", " import", "import"]).bad_words_token_ids) == 2


def test_bad_words_stand_for_both_forms_in_sentencepiece(sentencepiece_tokenizer: Tokenizer) -> None:
    requests = builder(sentencepiece_tokenizer)
    sequences = requests.build("x", SamplingParams(bad_words=["is not"])).request.bad_words_token_ids
    texts = {sentencepiece_tokenizer.decode(sequence, continues=True) for sequence in sequences}
    assert texts == {"is not", " is not"}


def test_bad_words_get_no_bos(bos_tokenizer: Tokenizer) -> None:
    sequences = build(bos_tokenizer, bad_words=["hi", "\x07"]).bad_words_token_ids
    assert all(bos_tokenizer.bos_token_id not in sequence for sequence in sequences)


def test_conversations_are_rendered_and_encoded(bos_tokenizer: Tokenizer, plain_tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for tokenizer, text in ((bos_tokenizer, "<s><user>hi"), (plain_tokenizer, "<user>hi")):
        chat = builder(tokenizer).build_chat(messages, SamplingParams())
        assert chat.prompt == text
        assert chat.request.prompt_token_ids == build(tokenizer, text).prompt_token_ids
        assert chat.request.prompt_token_ids.count(0) == int(tokenizer.adds_bos)


def test_refusals_of_the_template_reach_the_client(plain_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="no tools here"):
        builder(plain_tokenizer).build_chat([{"role": "tool", "content": "x"}], SamplingParams())
    with pytest.raises(RequestError, match="messages is empty"):
        builder(plain_tokenizer).build_chat([], SamplingParams())


def test_a_model_without_a_template_has_no_conversations(byte_level_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        builder(byte_level_tokenizer).build_chat([{"role": "user", "content": "x"}], SamplingParams())


def test_a_model_without_a_tokenizer_takes_ids_only() -> None:
    assert build(None, [5, 6]).prompt_token_ids == (5, 6)
    for attempt in (
        lambda: build(None, "hi"),
        lambda: build(None, [5], bad_words=["x"]),
        lambda: build(None, [5], stop="x"),
        lambda: builder(None).build_chat([{"role": "user", "content": "x"}], SamplingParams()),
    ):
        with pytest.raises(RequestError, match="needs a tokenizer"):
            attempt()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"request_id": ""}, "request_id is ''"),
        ({"request_id": 5}, "request_id is 5"),
        ({"priority": "high"}, "priority is 'high'"),
        ({"priority": True}, "priority is True"),
        ({"priority": 2**31}, "priority is 2147483648, but must be between -2147483648 and 2147483647"),
        ({"priority": -(2**31) - 1}, "priority is -2147483649, but must be between"),
        ({"priority": 10**400}, "priority is an integer of 1329 bits, but must be between"),
        ({"priority": -(10**5000)}, "priority is an integer of 16610 bits, but must be between"),
        ({"cache_salt": ""}, "cache_salt is ''"),
    ],
)
def test_options_are_checked(plain_tokenizer: Tokenizer, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        builder(plain_tokenizer).build("hi", SamplingParams(), **options)


@pytest.mark.parametrize("priority", [-(2**31), 2**31 - 1])
def test_the_extreme_priorities_are_taken(plain_tokenizer: Tokenizer, priority: int) -> None:
    prepared = builder(plain_tokenizer).build("hi", SamplingParams(), priority=priority)
    assert prepared.request.priority == priority


@pytest.mark.parametrize("message", [{}, {"foo": "x"}])
def test_a_message_without_a_role_is_named(plain_tokenizer: Tokenizer, message: dict[str, str]) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\] has no role"):
        builder(plain_tokenizer).build_chat([message], SamplingParams())


def test_sampling_parameters_must_be_of_their_type(plain_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="of type dict, but must be SamplingParams"):
        builder(plain_tokenizer).build("hi", {"n": 1})  # type: ignore[arg-type]
