from __future__ import annotations

from typing import Any

import pytest

from tests.serving.support import RunningServer, running_server
from tiny_vllm.serving.errors import ApiError
from tiny_vllm.serving.openai_requests import Call, RequestMaker, tenant_salt
from tiny_vllm.serving.schemas import ChatBody, CompletionBody, parse_body
from tiny_vllm.text.request_builder import RequestBuilder


@pytest.fixture
def maker() -> RequestMaker:
    builder = RequestBuilder(None, vocab_size=100, max_model_len=50)
    return RequestMaker(builder, None, max_prompts=4, max_stop_strings=2)


def completion(maker: RequestMaker, call: Call, **body: Any) -> Any:
    (prepared,) = maker.completion(CompletionBody(**{"prompt": [5, 6], **body}), call)
    return prepared.request


CALL = Call("cmpl-x", None, None, 1.5)


def test_tenants_and_salts_never_meet(maker: RequestMaker) -> None:
    tenants = (None, tenant_salt("one"), tenant_salt("two"))
    salts = (None, "a", f"{tenant_salt('one')}:")
    made = {
        completion(maker, Call("c", None, tenant, 0.0), cache_salt=salt).cache_salt
        for tenant in tenants[1:]
        for salt in salts
    }
    assert len(made) == 6
    assert completion(maker, CALL).cache_salt is None
    assert completion(maker, CALL, cache_salt="a").cache_salt == "a"
    assert "one" not in tenant_salt("one")


def test_a_priority_in_the_body_beats_that_of_the_header(maker: RequestMaker) -> None:
    header = Call("c", -5, None, 0.0)
    assert completion(maker, CALL).priority == 0
    assert completion(maker, header).priority == -5
    assert completion(maker, header, priority=0).priority == 0


def test_request_ids_come_from_the_call_and_times_too(maker: RequestMaker) -> None:
    made = [prepared.request for prepared in maker.completion(CompletionBody(prompt=[[5], [6]]), CALL)]
    assert [request.request_id for request in made] == ["cmpl-x-0", "cmpl-x-1"]
    assert {request.arrival_time for request in made} == {1.5}


def test_echoed_logprobs_ask_for_those_of_the_prompt(maker: RequestMaker) -> None:
    assert completion(maker, CALL, echo=True, logprobs=2).sampling.prompt_logprobs == 2
    assert completion(maker, CALL, echo=True).sampling.prompt_logprobs is None
    assert completion(maker, CALL, logprobs=2).sampling.prompt_logprobs is None


def test_a_model_without_a_tokenizer_takes_ids_only(maker: RequestMaker) -> None:
    assert completion(maker, CALL).prompt_token_ids == (5, 6)
    with pytest.raises(ValueError, match="tokenizer"):
        completion(maker, CALL, prompt="text")
    with pytest.raises(ValueError, match="tokenizer"):
        maker.chat(ChatBody(messages=[{"role": "user", "content": "x"}]), CALL)


@pytest.fixture(scope="module")
def server() -> Any:
    with running_server() as server:
        yield server


def test_the_priority_header_is_an_integer(server: RunningServer) -> None:
    body = {"prompt": [28], "max_tokens": 1}
    for header, status in (("-3", 200), ("high", 400), ("1.5", 400), ("1_0", 400), ("9" * 15, 400)):
        answer = server.post("/v1/completions", body, headers={"x-priority": header})
        assert answer.status == status, header


def test_a_long_priority_header_is_never_read_in_part(server: RunningServer) -> None:
    for header in ("0" * 20 + "5", "-" + "1" * 30, "9" * 5000):
        answer = server.post("/v1/completions", {"prompt": [28]}, headers={"x-priority": header})
        assert (answer.status, answer.error["param"]) == (400, "priority")
        message = answer.error["message"]
        assert "from -2147483648 to 2147483647" in message and header[:20] + "," not in message


def test_prompts_without_special_tokens_are_the_same_where_there_are_none(server: RunningServer) -> None:
    body = {"prompt": "One, two", "max_tokens": 3, "temperature": 0}
    plain = server.post("/v1/completions", body).json()["choices"][0]["text"]
    without = server.post("/v1/completions", {**body, "add_special_tokens": False})
    assert without.json()["choices"][0]["text"] == plain == "One, two"


def test_whole_numbers_may_be_written_with_a_point(maker: RequestMaker) -> None:
    body = parse_body(CompletionBody, b'{"prompt": [5.0, 6], "max_tokens": 4.0, "stop_token_ids": [7.0]}')
    (prepared,) = maker.completion(body, CALL)
    assert prepared.request.prompt_token_ids == (5, 6)
    assert (prepared.request.sampling.max_tokens, prepared.request.sampling.stop_token_ids) == (4, (7,))
    for wrong in (b'"max_tokens": 4.5', b'"max_tokens": "4"', b'"n": true', b'"stop_token_ids": [1.5]'):
        with pytest.raises(ApiError, match="valid integer"):
            parse_body(CompletionBody, b'{"prompt": [5], ' + wrong + b"}")


def test_of_two_limits_of_a_chat_both_hold(server: RunningServer) -> None:
    for limits in (
        {"max_tokens": 2, "max_completion_tokens": 3},
        {"max_tokens": 3, "max_completion_tokens": 2},
    ):
        body = {"messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True, **limits}
        answer = server.post("/v1/chat/completions", body)
        assert answer.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (
            {"max_completion_tokens": -1},
            "max_completion_tokens",
            "max_completion_tokens is -1, but must be at",
        ),
        (
            {"max_completion_tokens": -1, "max_tokens": 5},
            "max_completion_tokens",
            "max_completion_tokens is -1",
        ),
        (
            {"max_completion_tokens": 5, "max_tokens": -1},
            "max_tokens",
            "max_tokens is -1, but must be at least",
        ),
        ({"max_completion_tokens": 2**63}, "max_completion_tokens", f"max_completion_tokens is {2**63}, but"),
        ({"max_completion_tokens": 3, "min_tokens": 4}, "min_tokens", "more than max_completion_tokens (3)"),
        ({"max_completion_tokens": 3, "max_tokens": 2, "min_tokens": 4}, "min_tokens", "than max_tokens (2)"),
    ],
)
def test_a_wrong_limit_of_a_chat_has_the_name_that_the_client_sent(
    body: dict[str, Any], param: str, words: str, server: RunningServer
) -> None:
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], **body})
    assert (answer.status, answer.error["param"]) == (400, param)
    assert words in answer.error["message"]
    other = "max_tokens" if "max_completion_tokens" in words else "max_completion_tokens"
    assert other not in answer.error["message"]


def test_a_text_that_no_context_holds_is_refused_without_encoding_it(server: RunningServer) -> None:
    """Encoded, a text takes a hundred times its size of the API process's memory."""
    text = "é x" * 500_000
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/embeddings", {"input": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        answer = server.post(path, body)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded"), path
        assert " tokens or more, but must be shorter than the context" in answer.error["message"]
