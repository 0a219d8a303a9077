"""A body that does not fit its schema: what its sender is told."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from pydantic import BaseModel, Field, ValidationError

from tiny_vllm.serving.errors import ApiError
from tiny_vllm.serving.schema_errors import schema_error
from tiny_vllm.serving.schemas import BODIES, Body, ChatBody, CompletionBody, EmbeddingBody, parse_body

GIVEN: dict[str, Any] = {"prompt": "x", "input": "x", "messages": [], "tokens": [5]}
WRONG = [
    None,
    True,
    5,
    -5,
    1.5,
    "x",
    "5",
    "",
    ["x"],
    [5],
    [None],
    [1.5],
    [[]],
    [{}],
    {},
    {"a": 1},
    "x" * 10**5,
]
WRONG += [float("nan"), float("inf"), 10**30, ["x", 10**300]]


def body_with(body_class: type[Body], **fields: Any) -> bytes:
    given = {name: GIVEN[name] for name in body_class.model_fields if name in GIVEN}
    return json.dumps(given | fields).encode()


def fault_of(body_class: type[Body], **fields: Any) -> ApiError:
    return fault_of_text(body_class, body_with(body_class, **fields))


def fault_of_text(body_class: type[Body], text: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_body(body_class, text)
    return caught.value


@pytest.mark.parametrize("body_class", BODIES)
def test_each_wrong_type_is_one_line_with_field_and_value_and_a_hint(body_class: type[Body]) -> None:
    num_faults = 0
    for name, value in itertools.product(body_class.model_fields, WRONG):
        try:
            parse_body(body_class, body_with(body_class, **{name: value}))
        except ApiError as fault:
            num_faults += 1
            message, hint = fault.message.split("\nhint: ")
            assert (fault.status, fault.param) == (400, name)
            assert message.startswith(name) and "\n" not in message + hint
            assert len(message) < 200 and 0 < len(hint) < 80
            if not isinstance(value, str | list | dict | None):
                assert message.endswith(f", not {json.dumps(value)}")
    assert num_faults > 10


HINTS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": "5"}, "write a whole number, without quotes"),
    ({"max_tokens": 1.5}, "write a whole number"),
    ({"max_tokens": [5]}, "write a whole number"),
    ({"temperature": "0.5"}, "write a number, without quotes"),
    ({"temperature": True}, "write a number"),
    ({"temperature": float("nan")}, "JSON has no such number"),
    ({"echo": "true"}, "write true or false, without quotes"),
    ({"echo": 1}, "write true or false"),
    ({"model": 5}, "write a text in quotes"),
    ({"stop": 5}, "write a text in quotes, or a list of such texts"),
    ({"stop": ["a", 5]}, "write a text in quotes"),
    ({"bad_words": ["a", 5]}, "write a text in quotes"),
    ({"bad_words": "a"}, "write a list in square brackets, even of one entry"),
    ({"stop_token_ids": 5}, "write a list in square brackets, even of one entry"),
    ({"stop_token_ids": [5, "6"]}, "write a whole number, without quotes"),
    ({"stream_options": True}, "write an object in braces"),
    ({"stream_options": {"include_usages": True}}, "did you mean include_usage?"),
    ({"stream_options": {"colour": True}}, "leave it out"),
    ({"request_id": "x" * 200}, "shorten it"),
]


@pytest.mark.parametrize(("fields", "hint"), HINTS)
def test_the_hint_says_what_would_be_right(fields: dict[str, Any], hint: str) -> None:
    assert fault_of(CompletionBody, **fields).message.partition("\nhint: ")[2] == hint


def test_one_of_few_words_is_named() -> None:
    message = fault_of(EmbeddingBody, encoding_format="Float").message
    assert message.endswith('not "Float"\nhint: take one of these, or leave it out')


def test_what_is_too_long_and_what_is_no_string_is_shown() -> None:
    message = fault_of(CompletionBody, request_id="x" * 200).message
    assert "at most 128 characters, not a text of 200 characters\n" in message
    assert fault_of(CompletionBody, stop=["a", [5]]).message.startswith(
        "stop: entry 1 is no string, but a list\n"
    )


def test_of_several_faults_the_hint_is_of_the_first_and_says_so() -> None:
    fault = fault_of(CompletionBody, n="3", top_p="a", echo=1)
    message, hint = fault.message.split("\nhint: ")
    assert message.count("; ") == 2 and fault.param == "n"
    assert hint == "n: write a whole number, without quotes"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (b"", "send one object of JSON, in UTF-8"),
        (b"{", "send one object of JSON, in UTF-8"),
        (b'{"messages": "\xff"}', "send one object of JSON, in UTF-8"),
        (b"[]", "write an object in braces"),
        (b"{}", "add it: nothing stands for it"),
    ],
)
def test_bodies_that_are_no_object_or_lack_something_get_a_hint(text: bytes, hint: str) -> None:
    assert fault_of_text(ChatBody, text).message.partition("\nhint: ")[2] == hint


def test_what_a_client_wrote_breaks_no_line() -> None:
    fault = fault_of(CompletionBody, stream_options={"a\nhint: b\x1b[31m": 1})
    assert fault.message.count("\n") == 1 and "\x1b" not in fault.message
    assert "\n" not in fault_of(CompletionBody, n="a\nb\x1b").message.partition("\nhint")[0]


def test_a_kind_of_fault_without_a_hint_of_its_own_points_at_the_document() -> None:
    class Small(BaseModel):
        n: int = Field(lt=5)

    with pytest.raises(ValidationError) as caught:
        Small(n=7)
    message = schema_error(caught.value, ()).message
    assert message == "n: Input should be less than 5, not 7\nhint: /openapi.json tells what is taken"
