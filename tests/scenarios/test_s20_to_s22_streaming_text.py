"""Text as it streams: stop strings over several tokens, text held back for them, characters over tokens;
and the log-probabilities beside it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.support import RunningServer, running_server
from tiny_vllm.text.tokenizer import Tokenizer

TEXT = "One, two, three; and then some more."


@pytest.fixture(scope="module")
def repeater() -> Iterator[RunningServer]:
    """An engine that says the prompt's tokens over and over, so that a test can choose the output."""
    with running_server(engine={"max_num_seqs": 4, "max_logprobs": -1}) as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer(repeater: RunningServer) -> Tokenizer:
    assert repeater.service.model.tokenizer is not None
    return repeater.service.model.tokenizer


def deltas(answer: Any) -> list[str]:
    """The texts of a stream of one choice, that of a chat or of a completion."""
    assert answer.status == 200, answer.data
    choices = [event["choices"][0] for event in answer.events()]
    return [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices]


def ask(server: RunningServer, is_chat: bool, text: str, **options: Any) -> Any:
    """Have the server say a text: a conversation cannot choose its prompt, so its output is looked for."""
    if is_chat:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
        return server.post("/v1/chat/completions", {"ignore_eos": True, **body, **options})
    return server.complete(text, **options)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_s12_log_probabilities_of_the_whole_vocabulary_are_shown(
    repeater: RunningServer, is_streamed: bool
) -> None:
    """-1 asks for all tokens, of which the engine here has six."""
    options: dict[str, Any] = {"max_tokens": 2, "stream": is_streamed, "return_tokens_as_token_ids": True}

    def entries(answer: Any) -> list[Any]:
        assert answer.status == 200, answer.data
        parts = answer.events() if is_streamed else [answer.json()]
        return [part["choices"][0]["logprobs"] for part in parts if part["choices"][0]["logprobs"]]

    chat = ask(repeater, True, "x", **options, logprobs=True, top_logprobs=-1)
    content = [entry for part in entries(chat) for entry in part["content"]]
    assert [len(entry["top_logprobs"]) for entry in content] == [6, 6]
    for echo in (False, True):
        answer = repeater.complete([7, 8, 9], **options, logprobs=-1, echo=echo)
        tops = [top for part in entries(answer) for top in part["top_logprobs"]]
        assert [top and len(top) for top in tops] == ([None, 6, 6] if echo else []) + [6, 6]


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize(
    "stop",
    [
        "three; and then",
        ["e; an"],
        ["three; x", "three; and", "three; y"],
        ["three; and then some", "three"],
        ["hree; and", "three; and"],
    ],
    ids=str,
)
def test_s20_no_part_of_a_stop_string_leaves(
    repeater: RunningServer, stop: Any, included: bool, logprobs: bool, is_chat: bool
) -> None:
    stops = [stop] if isinstance(stop, str) else stop
    options: dict[str, Any] = {"max_tokens": 100, "skip_special_tokens": False}
    if logprobs:
        options["logprobs"] = True if is_chat else 1

    def whole_of(answer: Any) -> tuple[str, str]:
        (choice,) = answer.json()["choices"]
        return choice["message"]["content"] if is_chat else choice["text"], choice["finish_reason"]

    full, _ = whole_of(ask(repeater, is_chat, TEXT, **options))
    ends = {text: full.index(text) + len(text) for text in stops if text in full}
    end = min(ends.values())
    found = max((text for text in ends if ends[text] == end), key=len)
    expected = full[:end] if included else full[: end - len(found)]
    options |= {"stop": stop, "include_stop_str_in_output": included}
    whole = ask(repeater, is_chat, TEXT, **options)
    assert whole_of(whole) == (expected, "stop")
    assert whole.json()["choices"][0]["stop_reason"] == found
    streamed = ask(repeater, is_chat, TEXT, **options, stream=True)
    assert "".join(deltas(streamed)) == expected
    ends_seen = [e["choices"][0]["finish_reason"] for e in streamed.events()]
    assert ends_seen[:-1] == [None] * (len(ends_seen) - 1) and ends_seen[-1] == "stop"


@pytest.mark.parametrize("is_chat", [False, True])
def test_s21_what_was_held_back_arrives_in_the_last_chunk_at_length(
    repeater: RunningServer, tokenizer: Tokenizer, is_chat: bool
) -> None:
    text = "a b c d e f g h i j k l"
    num_tokens = 40
    full = "".join(deltas(ask(repeater, is_chat, text, max_tokens=num_tokens, stream=True)))
    for held in (1, 3, 7):
        stop = full[-held:] + "never"
        parts = deltas(ask(repeater, is_chat, text, max_tokens=num_tokens, stream=True, stop=stop))
        assert "".join(parts) == full
        assert parts[-1].endswith(full[-held:])
        body = parts[1:-1] if is_chat else parts[:-1]
        assert all(body), "chunks without text"


def test_s21_text_of_the_prompt_is_no_stop(repeater: RunningServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    for options in ({}, {"echo": True}):
        answer = repeater.complete(TEXT, max_tokens=len(ids) - 1, stop=["more."], **options)
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        # Neither is what ends in the output but began in the prompt.
        answer = repeater.complete(TEXT, max_tokens=3, stop=["more.One"], **options)
        assert answer.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stop", ["", [""], ["x", ""], 5, [5], [None], {"a": 1}, True])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_s21_a_stop_string_has_text(repeater: RunningServer, stop: Any, is_streamed: bool) -> None:
    for is_chat in (False, True):
        answer = ask(repeater, is_chat, "x", stop=stop, stream=is_streamed)
        assert answer.status == 400 and "stop" in answer.error["message"]


@pytest.mark.parametrize("stop", ["x", ["x"], [], None])
def test_s21_a_stop_may_be_text_a_list_or_nothing(repeater: RunningServer, stop: Any) -> None:
    for is_chat in (False, True):
        assert ask(repeater, is_chat, "abc", stop=stop, max_tokens=2).status == 200


def sequences(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Token ids that hold parts of characters, valid and not."""
    rng = random.Random(6)
    by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in range(3, tokenizer.vocab_size)}
    single = [by_bytes[bytes([value])] for value in range(256) if bytes([value]) in by_bytes]

    def spelled(text: str) -> list[int]:
        return [by_bytes[bytes([value])] for value in text.encode()]

    emoji, hangul = "👩‍👩‍👧🇰🇷🦀", "한국어 뷁"
    return {
        "emoji": spelled(emoji),
        "hangul": spelled(hangul),
        "mixed": spelled("漢字 and kana カナ, ñ ü ß"),
        "as tokenised": tokenizer.encode(f"{emoji} {hangul} é\u0301 \u200d \ufffd"),
        "a real replacement character": spelled("a\ufffdb"),
        "lone continuations": [by_bytes[bytes([value])] for value in (0x80, 0xBF, 0x41, 0x80)],
        "starts without ends": spelled("🦀")[:3] + spelled("é")[:1] + spelled("한")[:2] + spelled("z"),
        "random": [rng.choice(single) for _ in range(200)],
    }


@pytest.mark.parametrize("is_streamed", [False, True])
def test_s22_parts_of_characters_join_to_the_decoded_whole(
    repeater: RunningServer, tokenizer: Tokenizer, is_streamed: bool
) -> None:
    for name, ids in sequences(tokenizer).items():
        data = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
        for logprobs in (None, 1):
            answer = repeater.complete(
                ids, max_tokens=len(ids), ignore_eos=True, stream=is_streamed, logprobs=logprobs
            )
            text = "".join(deltas(answer)) if is_streamed else answer.json()["choices"][0]["text"]
            assert text == data.decode("utf-8", "replace"), name
        if is_streamed and not name.startswith(("lone", "starts", "random")):
            assert text.count("\ufffd") == data.decode().count("\ufffd"), name


def test_s22_a_stop_string_of_split_characters_is_found(
    repeater: RunningServer, tokenizer: Tokenizer
) -> None:
    ids = sequences(tokenizer)["mixed"]
    for stop, expected in (("字 a", "漢"), ("カナ", "漢字 and kana "), ("ñ", "漢字 and kana カナ, ")):
        answer = repeater.complete(ids, max_tokens=len(ids), stop=stop, stream=True)
        assert "".join(deltas(answer)) == expected
