"""The server: clients that leave, bodies without sense, features it lacks, templates that refuse, one BOS."""

from __future__ import annotations

import itertools
import json
import logging
import time
from typing import Any

import pytest

from tests.helpers.tiny_models import BOS, BOS_ID
from tests.scenarios.conftest import Served
from tests.serving.support import assert_once_below, sent, wait_until
from tiny_vllm import LLM, RequestError, SamplingParams

USER = {"role": "user", "content": "hi"}
LONG_PROMPT = [30 + number % 40 for number in range(1200)]
"""The server computes eight tokens of it in a step."""


@pytest.mark.parametrize("is_streamed", [False, True])
def test_s25_who_leaves_during_prefill_stops_it_and_leaves_finished_pages(
    server: Served,
    is_streamed: bool,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    engine = server.service.engine
    prompt = [*LONG_PROMPT, 7 if is_streamed else 8]
    num_steps, salt = 0, ""

    def leave() -> int:
        """How many steps it takes. A busy machine may compute the whole prompt before it is noticed."""
        nonlocal num_steps, salt
        salt += f"prefill {is_streamed}"
        wait_until(server.is_idle)
        assert engine.stats is not None
        before = engine.stats.num_steps
        body = {"prompt": prompt, "max_tokens": 400, "stream": is_streamed, "cache_salt": salt}
        with sent(server, body):
            wait_until(lambda: engine.stats.num_steps > before)
        wait_until(server.is_idle)
        num_steps = engine.stats.num_steps - before
        return num_steps

    with caplog.at_level(logging.INFO):
        assert_once_below(len(prompt) // 8, leave)
    again = server.complete(prompt, max_tokens=1, cache_salt=salt).json()
    num_cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < num_cached <= 8 * num_steps
    assert not caplog.records and capfd.readouterr() == ("", "")
    server.assert_alive_and_right()


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_s25_who_leaves_during_decode_frees_everything(server: Served, is_streamed: bool, n: int) -> None:
    engine = server.service.engine
    prompt = [40 + n] * 50
    body = {"prompt": prompt, "max_tokens": 1500, "ignore_eos": True, "n": n, "stream": is_streamed}
    wait_until(server.is_idle)
    assert engine.stats is not None
    decoding = engine.stats.num_steps + 10  # the prompt takes seven
    with sent(server, {**body, "cache_salt": f"decode {is_streamed}"}):
        wait_until(lambda: engine.stats.num_steps > decoding)
    wait_until(server.is_idle)
    again = server.complete(prompt, max_tokens=1, cache_salt=f"decode {is_streamed}").json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    server.assert_alive_and_right()


MALFORMED = {
    "list": b"[]",
    "true": b"true",
    "number": b"5",
    "string": b'"x"',
    "cut": b'{"prompt": "x", "messages": [{"role"',
    "not utf-8": b'{"prompt": "\xff", "messages": [{"role": "user", "content": "\xff"}]}',
    "lone surrogate": b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "two values": b'{"prompt": "x"} {"prompt": "x"}',
    "deep": b'{"prompt": ' + b"[" * 400_000 + b"]" * 400_000 + b', "messages": []}',
    "deep beside": b'{"prompt": "x", "user": ' + b'{"a":' * 400_000 + b"1" + b"}" * 400_000 + b"}",
    "wrong entries": b'{"messages": [' + b"1," * 99_999 + b'1], "tokens": [' + b'"x",' * 99_999 + b"1]}",
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("name", MALFORMED)
def test_s27_malformed_bodies_get_one_short_error_everywhere(server: Served, path: str, name: str) -> None:
    answer = server.post(path, MALFORMED[name])
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    for content_type in ("text/plain", "multipart/form-data; boundary=x", ""):
        answer = server.post(path, b"{}", headers={"content-type": content_type})
        assert answer.status == 415 and answer.error["type"] == "invalid_request_error"


def test_s27_content_in_parts_is_the_text_of_the_parts(server: Served) -> None:
    def answer(content: Any) -> Any:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
        return server.post("/v1/chat/completions", {**body, "return_token_ids": True}).json()

    whole, parts = (
        answer("hi there"),
        answer([{"type": "text", "text": "hi "}, {"type": "text", "text": "there"}]),
    )
    assert whole["prompt_token_ids"] == parts["prompt_token_ids"]
    assert whole["choices"] == parts["choices"]
    for wrong in ({}, 5, True, [5], [None], ["hi"], [{}], [{"type": "text"}], [{"type": "text", "text": 5}]):
        refused = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": wrong}]})
        assert refused.status == 400 and refused.error["message"].startswith("messages[0]")


SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/nowhere"}}}
CONSTRAINTS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {}}}},
    {"response_format": {"type": "json_schema", "schema": SCHEMA}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
    {"response_format": {"type": "regex", "pattern": "foo**"}},
    {"response_format": {"type": "grammar", "grammar": "root ::="}},
    {"response_format": {"type": "text", "schema": SCHEMA}},
    {"response_format": {}},
    {"response_format": "json"},
    {"guided_json": {}},
    {"guided_json": json.dumps(SCHEMA)},
    {"guided_json": ""},
    {"guided_regex": "foo**"},
    {"guided_regex": "(a"},
    {"guided_choice": ["a", "b"]},
    {"guided_choice": []},
    {"guided_grammar": "root ::= ("},
    {"guided_decoding_backend": "outlines"},
    {"guided_whitespace_pattern": " "},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"regex": "foo**"}},
    {"structured_outputs": {"choice": ["a"]}},
    {"structured_outputs": {"grammar": "root ::="}},
    {"structured_outputs": {}},
    {"grammar": "root ::="},
    {"json_schema": SCHEMA},
    {"regex": "foo**"},
    {"ebnf": "root ::="},
    {"structural_tag": "{}"},
]
FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
NAMED = {"type": "function", "function": {"name": "add"}}
UNKNOWN = {"type": "function", "function": {"name": "nobody"}}


def refused_before_any_step(server: Served, path: str, body: dict[str, Any]) -> Any:
    """The error of a request that must not have reached the engine."""
    assert server.service.engine.num_requests == 0
    answer = server.post(path, body)
    assert answer.status == 400, answer.data
    assert server.service.engine.num_requests == 0
    return answer.error


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda case: json.dumps(case)[:60])
def test_s28_a_grammar_that_cannot_be_kept_to_is_refused_by_name(
    server: Served, constraint: dict[str, Any]
) -> None:
    (name,) = constraint
    for stream in (False, True):
        for path, asked in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": [USER]})):
            error = refused_before_any_step(server, f"/v1/{path}", {**asked, **constraint, "stream": stream})
            assert error["param"] == name and name in error["message"]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("tools", [TOOLS, TOOLS * 2, [{}], {}, "add"], ids=lambda tools: str(tools)[:9])
@pytest.mark.parametrize("choice", [None, "none", "auto", "required", NAMED, UNKNOWN], ids=json.dumps)
def test_s30_tools_are_refused_whatever_the_choice(
    server: Served, tools: Any, choice: Any, is_streamed: bool
) -> None:
    asked = {} if choice is None else {"tool_choice": choice}
    body = {"messages": [USER], "tools": tools, **asked, "stream": is_streamed}
    for fields in itertools.permutations(body):  # whatever is read first
        error = refused_before_any_step(server, "/v1/chat/completions", {name: body[name] for name in fields})
        assert error["param"] in ("tools", "tool_choice")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_s30_a_choice_without_tools_is_refused_if_it_asks_for_one(server: Served, is_streamed: bool) -> None:
    for tools in ({}, {"tools": []}, {"tools": None}):
        for choice in ("required", "any", NAMED, UNKNOWN, {}, 5):
            body = {"messages": [USER], **tools, "tool_choice": choice, "stream": is_streamed}
            assert refused_before_any_step(server, "/v1/chat/completions", body)["param"] == "tool_choice"
        for choice in ("none", "auto", None):
            answer = server.post(
                "/v1/chat/completions",
                {"messages": [USER], **tools, "tool_choice": choice, "stream": is_streamed, "max_tokens": 2},
            )
            assert answer.status == 200
            choices = answer.events()[-1]["choices"] if is_streamed else answer.json()["choices"]
            assert choices[0]["finish_reason"] in ("length", "stop")
            assert "tool_calls" not in choices[0].get("message", choices[0].get("delta"))


@pytest.mark.parametrize(
    "older",
    [
        {"functions": [FUNCTION]},
        {"function_call": {"name": "add"}},
        {"functions": [FUNCTION], "function_call": "none"},
    ],
    ids=json.dumps,
)
def test_s30_the_older_names_are_refused_too(server: Served, older: dict[str, Any]) -> None:
    error = refused_before_any_step(server, "/v1/chat/completions", {"messages": [USER], **older})
    assert error["param"] in older


def test_s30_calls_in_the_conversation_reach_the_prompt_or_are_refused(server: Served) -> None:
    """A template that knows no calls would write "None" in their place, or drop them beside the content."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    for content in (None, "", "I will add."):
        for calls in ({"tool_calls": [call]}, {"function_call": call["function"]}):
            messages = [USER, {"role": "assistant", "content": content, **calls}]
            for path in ("/v1/chat/completions", "/tokenize"):
                message = server.post(path, {"messages": messages}).error["message"]
                assert message.startswith(f"messages[1] has {next(iter(calls))}, which")
    empty = [USER, {"role": "assistant", "content": "Yes.", "tool_calls": []}]
    assert server.post("/v1/chat/completions", {"messages": empty, "max_tokens": 1}).status == 200


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([USER, {"role": "system", "content": "late"}], "system must come first"),
        ([USER, USER], "roles must alternate"),
        ([USER, {"role": "tool", "content": "3", "tool_call_id": "1"}], "there is no role tool"),
        ([{"role": "developer", "content": "x"}, USER], "there is no role developer"),
        ([{"role": "function", "content": "x", "name": "f"}], "there is no role function"),
    ],
)
def test_s32_the_templates_own_words_reach_the_client(
    server: Served, llm: LLM, messages: list[dict[str, Any]], message: str
) -> None:
    for stream in (False, True):
        error = refused_before_any_step(
            server, "/v1/chat/completions", {"messages": messages, "stream": stream}
        )
        assert message in error["message"]
    assert message in server.post("/tokenize", {"messages": messages}).error["message"]
    with pytest.raises(RequestError, match=message):
        llm.chat(messages, use_tqdm=False)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_s32_a_template_variable_cannot_stand_for_a_field_of_the_request(server: Served, name: str) -> None:
    variables = {"chat_template_kwargs": {name: False}}
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = server.post(path, {"messages": [USER], **variables})
        assert answer.status == 400 and name in answer.error["message"]


def test_s32_fields_of_tokenize_without_effect_are_refused(server: Served) -> None:
    for body in (
        {"prompt": "x", "add_generation_prompt": True},
        {"prompt": "x", "chat_template_kwargs": {"a": 1}},
        {"messages": [USER], "add_special_tokens": True},
    ):
        assert "has no meaning" in server.post("/tokenize", body).error["message"]
    assert server.post("/tokenize", {"prompt": "x", "add_generation_prompt": False}).status == 200
    assert server.post("/tokenize", {"messages": [USER], "add_special_tokens": False}).status == 200


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_s33_a_conversation_has_one_bos_on_every_path(
    server: Served, llm: LLM, system: list[dict[str, Any]]
) -> None:
    """The tokenizer adds BOS and so does the template."""
    messages = [*system, USER, {"role": "assistant", "content": "Hello!"}, USER]
    params = SamplingParams(temperature=0, max_tokens=3)
    (offline,) = llm.chat(messages, params, use_tqdm=False)
    assert offline.prompt is not None and offline.prompt.startswith(BOS)
    chat = server.post(
        "/v1/chat/completions",
        {"messages": messages, "temperature": 0, "max_tokens": 3, "return_token_ids": True},
    ).json()
    written = server.complete(offline.prompt, temperature=0, max_tokens=3, return_token_ids=True).json()
    (offline_written,) = llm.generate([offline.prompt], params, use_tqdm=False)
    token_ids = offline.prompt_token_ids
    assert token_ids.count(BOS_ID) == 1 and token_ids[0] == BOS_ID
    assert chat["prompt_token_ids"] == token_ids
    assert written["choices"][0]["prompt_token_ids"] == token_ids
    assert offline_written.prompt_token_ids == token_ids
    assert server.post("/tokenize", {"messages": messages}).json()["tokens"] == token_ids
    assert server.post("/tokenize", {"prompt": offline.prompt}).json()["tokens"] == token_ids
    answers = [chat["choices"][0], written["choices"][0]]
    assert [answer["token_ids"] for answer in answers] == [offline.outputs[0].token_ids] * 2


def test_r9_health_answers_while_a_long_prompt_is_computed_and_probes_leave_nothing(server: Served) -> None:
    engine = server.service.engine
    salts = itertools.count()

    def slowest_probe() -> float:
        wait_until(server.is_idle)
        assert engine.stats is not None
        before, slowest = engine.stats.num_steps, 0.0
        body = {"prompt": [9, *LONG_PROMPT], "max_tokens": 300, "ignore_eos": True}
        with sent(server, {**body, "cache_salt": f"probed {next(salts)}"}):
            wait_until(lambda: engine.stats.num_steps > before)
            for number in range(500):
                start = time.monotonic()
                assert server.get("/health" if number % 2 else "/ready").status == 200
                slowest = max(slowest, time.monotonic() - start)
                assert engine.num_requests <= 1 and server.service.admission.num_requests <= 1
        return slowest

    assert_once_below(1, slowest_probe)
    server.assert_alive_and_right()
