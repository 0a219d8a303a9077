"""The unmodified OpenAI client over a server whose engine repeats the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serving.stub_engine import EOS
from tests.serving.support import RunningServer, running_server
from tiny_vllm.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(engine={"max_num_seqs": 4, "max_logprobs": 5, "max_n": 8}) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(server: RunningServer) -> Tokenizer:
    assert server.service.model.tokenizer is not None
    return server.service.model.tokenizer


MODEL = "SmolLM2-135M-Instruct"
TEXT = "One, two, three; and then some more."
HELLO: Any = [{"role": "user", "content": "Hello there"}]


def test_the_model_is_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("gpt-5")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="gpt-5", prompt="x")


def test_a_completion_repeats_the_prompt(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    num_tokens = len(tokenizer.encode(TEXT))
    answer = client.completions.create(model=MODEL, prompt=TEXT, max_tokens=num_tokens)
    assert answer.object == "text_completion" and answer.model == MODEL
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_tokens, num_tokens)
    assert answer.usage.total_tokens == 2 * num_tokens


def test_completions_default_to_16_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=TEXT, max_tokens=None)
    assert answer.usage is not None and answer.usage.completion_tokens == 16


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_joins_to_the_whole_answer(client: openai.OpenAI, n: int) -> None:
    options: Any = dict(model=MODEL, prompt=[TEXT, [7, 8, 9]], max_tokens=12, n=n)
    whole = client.completions.create(**options)
    texts = dict.fromkeys(range(2 * n), "")
    reasons: dict[int, list[str]] = {index: [] for index in texts}
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert [choice.index for choice in whole.choices] == list(range(2 * n))
    assert [choice.text for choice in whole.choices] == list(texts.values())
    assert all(given == ["length"] for given in reasons.values())


@pytest.mark.parametrize("prompt", ["a b", ["a b", "c d"], [5, 6], [[5, 6], [7]], ["a b", [5, 6]]])
def test_every_form_of_prompt(client: openai.OpenAI, prompt: Any) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt, n=2, max_tokens=2)
    is_list = isinstance(prompt, list) and not isinstance(prompt[0], int)
    assert len(answer.choices) == (2 * len(prompt) if is_list else 2)


def test_echo_puts_the_prompt_first(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    answer = client.completions.create(model=MODEL, prompt=TEXT, max_tokens=3, echo=True)
    assert answer.choices[0].text.startswith(TEXT + "One")
    ids = tokenizer.encode(TEXT)
    answer = client.completions.create(model=MODEL, prompt=ids, max_tokens=3, echo=True)
    assert answer.choices[0].text.startswith(TEXT + "One")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_prompt_is_scored_without_generating(
    client: openai.OpenAI, tokenizer: Tokenizer, is_streamed: bool
) -> None:
    num_tokens = len(tokenizer.encode(TEXT))
    options: Any = dict(model=MODEL, prompt=TEXT, max_tokens=0, logprobs=1, echo=True)
    if is_streamed:
        chunks = list(
            client.completions.create(**options, stream=True, stream_options={"include_usage": True})
        )
        usage, (chunk,) = chunks[-1].usage, chunks[:-1]
        choice: Any = chunk.choices[0]
    else:
        answer = client.completions.create(**options)
        usage, choice = answer.usage, answer.choices[0]
    assert choice.text == TEXT and choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens) == TEXT
    assert choice.logprobs.token_logprobs == [None] + [-0.5] * (num_tokens - 1)
    assert choice.logprobs.top_logprobs[0] is None
    assert usage is not None and usage.completion_tokens == 0


def test_no_tokens_without_echo_is_an_empty_answer(client: openai.OpenAI) -> None:
    choice = client.completions.create(model=MODEL, prompt=TEXT, max_tokens=0).choices[0]
    assert (choice.text, choice.finish_reason) == ("", "length")


def test_completion_logprobs(client: openai.OpenAI) -> None:
    options: Any = dict(model=MODEL, prompt=TEXT, max_tokens=6, logprobs=2)
    logprobs = client.completions.create(**options).choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.text_offset is not None
    assert logprobs.tokens[:3] == ["One", ",", " two"]
    assert logprobs.text_offset[:4] == [0, 3, 4, 8]
    assert logprobs.token_logprobs == [-0.5] * 6
    # A probability of zero is the lowest number there is, never -Infinity, which is no JSON.
    assert all(sorted(top.values()) == [-9999.0, -0.5] for top in logprobs.top_logprobs or ())
    streamed = [chunk.choices[0].logprobs for chunk in client.completions.create(**options, stream=True)]
    assert [token for part in streamed if part for token in part.tokens or ()] == logprobs.tokens
    assert [at for part in streamed if part for at in part.text_offset or ()] == logprobs.text_offset


def test_logprobs_can_name_tokens_by_id(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=[7, 8],
        max_tokens=2,
        logprobs=0,
        extra_body={"return_tokens_as_token_ids": True},
    )
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["token_id:7", "token_id:8"]


def test_a_chat_answers_in_whole_and_streamed(client: openai.OpenAI) -> None:
    options: Any = dict(model=MODEL, messages=HELLO, max_completion_tokens=12)
    whole = client.chat.completions.create(**options)
    assert whole.object == "chat.completion"
    message = whole.choices[0].message
    assert message.role == "assistant" and message.content
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == [
        "length"
    ]
    assert {chunk.id for chunk in chunks} == {chunks[0].id} != {whole.id}


def test_a_chat_may_fill_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, extra_body={"ignore_eos": True, "top_k": 3}
    )
    assert answer.usage is not None and answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_prompts_at_the_edge_of_the_context(server: RunningServer, is_streamed: bool) -> None:
    """The context has 512 tokens, of which at least one must be left to generate."""
    for num_tokens, max_tokens in ((511, 1), (511, 10**6), (510, 10**6)):
        answer = server.complete([28] * num_tokens, max_tokens=max_tokens, stream=is_streamed)
        assert answer.status == 200
        choice = (answer.events()[-1] if is_streamed else answer.json())["choices"][0]
        assert choice["finish_reason"] == "length"
    for num_tokens in (512, 513, 5120):
        answer = server.complete([28] * num_tokens, max_tokens=1, stream=is_streamed)
        assert answer.status == 400
        assert f"{num_tokens} tokens" in answer.error["message"] and "512" in answer.error["message"]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    options: Any = dict(model=MODEL, messages=HELLO, max_tokens=4, logprobs=True)
    plain = client.chat.completions.create(**options).choices[0].logprobs
    assert plain is not None and plain.content is not None
    assert all(entry.top_logprobs == [] for entry in plain.content) and len(plain.content) == 4
    whole = client.chat.completions.create(**options, top_logprobs=2).choices[0].logprobs
    assert whole is not None and whole.content is not None
    first = whole.content[0]
    assert bytes(first.bytes or []).decode() == first.token
    assert [entry.logprob for entry in first.top_logprobs] == [-0.5, -9999.0]
    streamed = [
        entry
        for chunk in client.chat.completions.create(**options, top_logprobs=2, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or ()
    ]
    assert [entry.model_dump() for entry in streamed] == [entry.model_dump() for entry in whole.content]


def test_chat_choices_each_have_their_end(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5, n=3, stream=True)
    ends = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize("continuous", [False, True])
def test_usage_in_streams(client: openai.OpenAI, continuous: bool) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": continuous}
    chunks = list(
        client.completions.create(
            model=MODEL, prompt=[5, 6, 7], max_tokens=6, stream=True, stream_options=options
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 6
    others = [chunk.usage for chunk in chunks[:-1]]
    if continuous:
        counts = [usage.completion_tokens for usage in others if usage is not None]
        assert len(counts) == len(others) and counts == sorted(counts) and counts[-1] == 6
    else:
        assert others == [None] * len(others)


def test_without_asking_a_stream_has_no_usage(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=3, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_eos_and_stop_tokens_end_a_choice(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=[28, 29, EOS], max_tokens=9)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    answer = client.completions.create(
        model=MODEL, prompt=[28, 29, 30], max_tokens=9, extra_body={"stop_token_ids": [30]}
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == 30  # type: ignore[attr-defined]


@pytest.mark.parametrize("stop", ["three; and", ["and th", "three; a"], ["ee; and"]])
@pytest.mark.parametrize("included", [False, True])
def test_stop_strings_never_leave(client: openai.OpenAI, stop: Any, included: bool) -> None:
    """Stop strings over several tokens, starting and ending inside of tokens."""
    stops = [stop] if isinstance(stop, str) else stop
    ends = {text: TEXT.index(text) + len(text) for text in stops}
    found = min(ends, key=lambda text: ends[text])
    expected = TEXT[: ends[found]] if included else TEXT[: TEXT.index(found)]
    options: Any = dict(
        model=MODEL,
        prompt=TEXT,
        stop=stop,
        max_tokens=100,
        extra_body={"include_stop_str_in_output": included},
    )
    choice = client.completions.create(**options).choices[0]
    assert (choice.text, choice.finish_reason) == (expected, "stop")
    chunks = list(client.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_text_held_back_for_a_stop_string_comes_at_the_end(
    client: openai.OpenAI, tokenizer: Tokenizer
) -> None:
    num_tokens = len(tokenizer.encode(TEXT))
    chunks = list(
        client.completions.create(
            model=MODEL, prompt=TEXT, stop="more.One, four", max_tokens=num_tokens + 3, stream=True
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT + "One, two"
    assert all(chunk.choices[0].text for chunk in chunks[:-1])


@pytest.mark.parametrize("text", ["a 😀 b 한국어 c", "漢字kana カナ", "e\u0301 👩‍👩‍👧"])
def test_characters_over_several_tokens_are_whole(
    client: openai.OpenAI, tokenizer: Tokenizer, text: str
) -> None:
    num_tokens = len(tokenizer.encode(text))
    chunks = list(client.completions.create(model=MODEL, prompt=text, max_tokens=num_tokens, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    assert not any("\ufffd" in chunk.choices[0].text for chunk in chunks)


def test_bytes_that_are_no_text_do_not_hurt(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = [token_id for token_id in range(3, 600) if tokenizer.token_bytes(token_id)[:1] >= b"\x80"]
    assert len(ids) > 100
    options: Any = dict(model=MODEL, prompt=ids, max_tokens=len(ids), logprobs=1)
    whole = client.completions.create(**options)
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True))
    assert whole.choices[0].text == streamed == tokenizer.decode(ids)


def test_sampling_parameters_reach_the_engine_in_one_piece(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=[5],
        max_tokens=3,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"5": 1},
        user="somebody",
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 1,
            "bad_words": ["foo"],
            "allowed_token_ids": [5, 6],
            "skip_special_tokens": False,
            "priority": -1,
            "cache_salt": "me",
        },
    )
    assert answer.usage is not None and answer.usage.completion_tokens == 3


def test_prompt_logprobs_and_token_ids(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=[5, 6], max_tokens=1, extra_body={"prompt_logprobs": 1, "return_token_ids": True}
    )
    choice: Any = answer.choices[0]
    assert choice.prompt_logprobs[0] is None and choice.prompt_logprobs[1]["6"]["rank"] == 1
    assert (choice.prompt_token_ids, choice.token_ids) == ([5, 6], [5])


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is -1") as caught:
        client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert caught.value.type == "invalid_request_error"
    # Also with a stream, and before its first byte.
    with pytest.raises(openai.BadRequestError, match="temperature is -1"):
        client.completions.create(model=MODEL, prompt="x", temperature=-1, stream=True)
    with pytest.raises(openai.BadRequestError, match="response_format is not supported") as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO, response_format={"type": "json_object"})
    assert caught.value.param == "response_format"


def test_the_payload_of_vllms_load_generator(server: RunningServer) -> None:
    """What `vllm bench serve` sends, and what it reads: an event with text per token, then the usage."""
    events = server.post(
        "/v1/completions",
        {
            "model": MODEL,
            "prompt": TEXT,
            "repetition_penalty": 1.0,
            "max_tokens": 8,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "temperature": 0.0,
        },
        headers={"x-request-id": "bench-0", "authorization": "Bearer None"},
    ).events()
    assert all(event["choices"][0]["text"] for event in events[:-1]) and 1 < len(events) <= 9
    assert (events[-1]["choices"], events[-1]["usage"]["completion_tokens"]) == ([], 8)
