"""Whatever a client sends, the answer is one bounded error in OpenAI's shape, and the server goes on."""

from __future__ import annotations

import concurrent.futures
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.stub_engine import BAD_LOGITS
from tests.serving.support import RunningServer, assert_once_below, running_server
from tiny_vllm.serving.parameters import IGNORED, REFUSED


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    engine = {"max_num_seqs": 4, "max_logprobs": 5, "max_n": 8, "max_model_len": 64, "num_pages": 3}
    # Longer than any of these tests waits: what is answered was not waited for.
    with running_server(
        engine=engine, max_body_bytes=6 << 20, max_prompts=8, receive_timeout=600.0
    ) as server:
        yield server
        server.assert_alive()


MESSAGES = [{"role": "user", "content": "Hi"}]
NESTED = b'{"prompt": ' + b"[" * 2_500_000 + b"]" * 2_500_000 + b"}"

MALFORMED = {
    "empty": b"",
    "list": b"[]",
    "true": b"true",
    "null": b"null",
    "truncated": b'{"prompt": "x"',
    "not utf-8": b'{"prompt": "\xff\xfe"}',
    "lone surrogate": b'{"prompt": "\\ud800"}',
    "nested": NESTED,
    "shallow nest": b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}",
    "wrong million": b'{"prompt": "x", "stop": [' + b"1," * 1_000_000 + b"1]}",
    "not a number": b'{"prompt": "x", "temperature": NaN}',
    "infinity": b'{"prompt": "x", "top_p": 1e999}',
    "digits": b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    "long name": b'{"prompt": "x", "' + b"y" * 100_000 + b'": 1}',
    "no prompt": b"{}",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_bodies(server: RunningServer, name: str) -> None:
    answer = server.post("/v1/completions", MALFORMED[name])
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"


def test_other_content_types_and_encodings_are_refused(server: RunningServer) -> None:
    for sent in (
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "text/plain"},
        {"content-encoding": "gzip"},
    ):
        answer = server.post("/v1/completions", b'{"prompt": "x"}', headers=sent)
        assert (answer.status, answer.error["type"]) == (415, "invalid_request_error")


def test_long_bodies_are_refused(server: RunningServer) -> None:
    answer = server.post("/v1/completions", b" " * (6 << 20) + b"{}")
    assert answer.status == 413 and "max_body_bytes" in answer.error["message"]


def test_a_very_long_prompt_holds_nobody_up(server: RunningServer) -> None:
    def slowest_health() -> float:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            long = pool.submit(server.complete, "hello world " * 300_000)
            slowest = server.slowest_health([long])
            assert "must be shorter than the context" in long.result().error["message"]
        return slowest

    assert_once_below(1, slowest_health)


def test_unknown_paths_and_methods(server: RunningServer) -> None:
    assert (server.get("/v1/nothing").status, server.get("/v1/completions").status) == (404, 405)
    assert "no /v1/nothing here" in server.get("/v1/nothing").error["message"]
    assert "GET is not possible" in server.get("/v1/completions").error["message"]


def test_a_slash_too_many_is_another_path(server: RunningServer) -> None:
    # A redirect would name this server as it is called behind a proxy, and the client would go there.
    answer = server.post("/v1/completions/", {"prompt": [5]})
    assert answer.status == 404 and "location" not in answer.headers
    assert "no /v1/completions/ here" in answer.error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": [5], "dimensions": 10**60}),
        ("/v1/completions", {"prompt": [5], "logit_bias": 10**60}),
        ("/v1/completions", {"prompt": [5], "logit_bias": 10**300}),
        ("/v1/completions", {"prompt": [10**60]}),
        ("/detokenize", {"tokens": [10**60]}),
    ],
)
def test_a_number_with_many_digits_is_told_whole_or_not_at_all(
    server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    message = server.post(path, body).error["message"]
    assert {len(digits) for digits in re.findall(r"10{20,}", message)} <= {61}


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NO_TYPES_OF_PYTHON: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": None}, "messages is of type null"),
    (CHAT, {"messages": {}}, "messages is of type object"),
    (CHAT, {"messages": [None]}, "messages[0] is of type null"),
    (CHAT, {"messages": [True]}, "messages[0] is of type boolean"),
    (CHAT, {"messages": [{"role": {"a": None}, "content": "x"}]}, "messages[0] has a role of type object"),
    (CHAT, {"messages": [{"role": "user", "content": {}}]}, "messages[0].content is of type object"),
    (CHAT, {"messages": [{"role": "user", "content": [None]}]}, "holds something of type null"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": True}]}]}, "a part of type boolean"),
    ("/tokenize", {"messages": [5]}, "messages[0] is of type number"),
    (COMPLETIONS, {"prompt": [1, None]}, "the prompt contains null"),
    (COMPLETIONS, {"prompt": [1, True]}, "the prompt contains true"),
    (COMPLETIONS, {"prompt": [1, {"a": None}]}, "the prompt contains an object"),
    (COMPLETIONS, {"prompt": [[1], [1, [None]]]}, "prompt[1] contains a list"),
    (COMPLETIONS, {"prompt": 5}, "prompt must be a string, token ids, or a list of either, not 5"),
    (COMPLETIONS, {"prompt": ["x", None]}, "prompt holds null, but must hold strings or lists"),
    ("/v1/embeddings", {"input": {}}, "input must be a string, token ids, or a list of either, not an obj"),
    ("/v1/embeddings", {"input": [None]}, "the prompt contains null"),
    (COMPLETIONS, {"prompt": [5], "logit_bias": True}, "logit_bias is true, but must map"),
    (COMPLETIONS, {"prompt": [5], "logit_bias": [None]}, "logit_bias is a list, but must map"),
    (COMPLETIONS, {"prompt": [5], "logit_bias": {"5": None}}, "logit_bias[5] is null, but must be a number"),
    (COMPLETIONS, {"prompt": [5], "logit_bias": {"5": {"a": None}}}, "logit_bias[5] is an object"),
    (COMPLETIONS, {"prompt": [5], "logit_bias": {"x": 1}}, "in logit_bias is 'x', but must be an integer"),
    (COMPLETIONS, {"prompt": [5], "logit_bias": {"\x1b" * 99: False}}, r"logit_bias[\x1b\x1b"),
]


@pytest.mark.parametrize(("path", "body", "message"), NO_TYPES_OF_PYTHON)
def test_wrong_values_and_types_are_told_in_words_of_json(
    server: RunningServer, path: str, body: dict[str, Any], message: str
) -> None:
    answer = server.post(path, body)
    assert answer.status == 400 and message in answer.error["message"]
    assert answer.error["message"].count("\nhint: ") == answer.error["message"].count("\n") == 1
    assert not re.search(r"NoneType|dict|\b(str|int|float|bool|None|True|False)\b", answer.error["message"])
    name = next(name for name in ("messages", "logit_bias", "input", "prompt") if name in body)
    assert answer.error["param"] == name


def test_what_is_cut_of_a_clients_words_says_so(server: RunningServer) -> None:
    long, cut = "x" * 1000, f"{'x' * 40}"
    answers = [
        server.post(COMPLETIONS, {"prompt": [5], "model": long}),
        server.post(COMPLETIONS, {"prompt": [5], long: 1}),
        server.post(COMPLETIONS, b"{}", headers={"content-type": long}),
        server.get(f"/{long}"),
    ]
    for answer in answers:
        assert re.search(f"{cut}+ \\.\\.\\.", answer.error["message"])


@pytest.mark.parametrize("key", ["-1", "99999999999999999999", "-99999999999999999999", "9" * 77])
def test_a_token_id_out_of_range_is_an_integer_all_the_same(server: RunningServer, key: str) -> None:
    error = server.complete([5], logit_bias={key: 1}).error
    assert error["param"] == "logit_bias" and "must be an integer" not in error["message"]
    assert f"a token id in logit_bias is {key}, but must be" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [5] * 64}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 63}, "prompt"),  # more than the pool of the engine
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 99}]}, "messages"),
        ("/v1/embeddings", {"input": [5] * 64}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
    ],
)
def test_faults_of_a_prompt_name_its_parameter(
    server: RunningServer, path: str, body: dict[str, Any], param: str
) -> None:
    assert server.post(path, body).error["param"] == param


def test_of_several_prompts_the_wrong_one_is_told(server: RunningServer) -> None:
    error = server.complete([[5], [6], [7] * 64]).error
    assert error["message"].startswith("prompt[2] has 64 tokens")
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert (
        server.post("/v1/embeddings", {"input": ["a", ""]}).error["message"].startswith("input[1] is empty")
    )
    assert server.complete([[5], [6]], n=99).error["message"].startswith("n is 99")


def test_a_parameter_of_another_endpoint_is_told_as_such(server: RunningServer) -> None:
    error = server.post("/v1/chat/completions", {"messages": MESSAGES, "prompt": "x"}).error
    assert (error["param"], error["code"]) == ("prompt", "unknown_parameter")
    assert "other endpoints" in error["message"] and "did you mean" not in error["message"]


def test_a_chat_is_told_its_own_names(server: RunningServer) -> None:
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 10**6}
    error = server.post("/v1/chat/completions", body).error
    assert error["message"].startswith("top_logprobs is 1000000") and error["param"] == "top_logprobs"
    error = server.post("/v1/chat/completions", body | {"top_logprobs": -5}).error
    assert error["message"].startswith("top_logprobs is -5") and error["param"] == "top_logprobs"
    body = {"messages": [{"role": "logprobs!", "content": "x"}], "logprobs": True}
    assert "'logprobs!'" in server.post("/v1/chat/completions", body).error["message"]


def test_control_characters_are_written_out(server: RunningServer) -> None:
    message = server.request("GET", "/v1/%1b[31m").error["message"]
    assert message.splitlines()[0] == r"there is no /v1/\x1b[31m here"
    assert server.complete("x", **{"\x1b[31m": 1}).error["param"] == r"\x1b[31m"


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("GET", "/v1/model", "did you mean /v1/models?"),
        ("POST", "/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("GET", "/nothing/like/it", "/openapi.json lists what is here"),
        ("GET", "/v1/completions", "use POST"),
        ("PUT", "/v1/models", "use GET"),
    ],
)
def test_a_wrong_path_or_method_is_told_the_right_one(
    method: str, path: str, hint: str, server: RunningServer
) -> None:
    assert server.request(method, path).error["message"].splitlines()[1] == f"hint: {hint}"


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/"])
def test_probes_may_ask_for_the_head_alone(server: RunningServer, path: str) -> None:
    answer = server.request("HEAD", path)
    assert (answer.status, answer.data) == (200, b"")


BAD_COMPLETIONS: dict[str, tuple[dict[str, Any], str]] = {
    "max_tokens negative": ({"max_tokens": -1}, "max_tokens is -1"),
    "max_tokens float": ({"max_tokens": 1.5}, "max_tokens: Input should be a valid integer, not 1.5"),
    "max_tokens string": ({"max_tokens": "5"}, 'max_tokens: Input should be a valid integer, not "5"'),
    "max_tokens bool": ({"max_tokens": True}, "max_tokens: Input should be a valid integer, not true"),
    "max_tokens list": ({"max_tokens": [1]}, "max_tokens: Input should be a valid integer, not a list"),
    "max_tokens object": ({"max_tokens": {}}, "max_tokens: Input should be a valid integer, not an object"),
    "max_tokens text": ({"max_tokens": "x" * 9999}, "a valid integer, not a text of 9999 characters"),
    "echo digits": ({"echo": 10**39}, f"echo: Input should be a valid boolean, not {10**39}"),
    "echo more digits": ({"echo": 10**4000}, "a valid boolean, not a number of more than 40 digits"),
    "stop number": ({"stop": 1.5}, "stop: Input should be a string or a list of strings, not 1.5"),
    "stop entry": ({"stop": ["a", 5]}, "stop: entry 1 is no string"),
    "prompt number": ({"prompt": 5}, "prompt must be a string, token ids, or a list of either, not 5"),
    "prompt empty list": ({"prompt": []}, "the prompt is empty"),
    "prompt empty text": ({"prompt": ""}, "the prompt is empty"),
    "prompt empty texts": ({"prompt": [""]}, "the prompt is empty"),
    "prompt empty ids": ({"prompt": [[]]}, "the prompt is empty"),
    "prompt mixed": ({"prompt": [5, "x"]}, "mixes"),
    "prompt bools": ({"prompt": [True, False]}, "not a token id"),
    "too many prompts": ({"prompt": ["x"] * 9}, "max_prompts"),
    "id negative": ({"prompt": [5, -1]}, "token id -1"),
    "id too high": ({"prompt": [5, 49152]}, "49152"),
    "id huge": ({"prompt": [5, 2**63]}, str(2**63)),
    "context": ({"prompt": [5] * 64}, "64 tokens"),
    "ten contexts": ({"prompt": [5] * 640}, "640 tokens"),
    "pool": ({"prompt": [5] * 63}, "never fit"),
    "n huge": ({"n": 10**6}, "n is 1000000"),
    "n zero": ({"n": 0}, "n is 0"),
    "logprobs": ({"logprobs": 49152}, "logprobs is 49152"),
    "all prompt logprobs": ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
    "stops": ({"stop": ["x"] * 10_000}, "max_stop_strings"),
    "empty stop": ({"stop": ""}, "no text"),
    "temperature": ({"temperature": -0.1}, "temperature is -0.1"),
    "top_p": ({"top_p": 1.1}, "top_p is 1.1"),
    "top_k": ({"top_k": -2}, "top_k is -2"),
    "min_p": ({"min_p": 2}, "min_p is 2"),
    "bias key": ({"logit_bias": {"x": 1}}, "logit_bias"),
    "bias id": ({"logit_bias": {"49152": 1}}, "49152"),
    "bias value": ({"logit_bias": {"5": 1e9}}, "logit_bias[5]"),
    "bad word": ({"bad_words": [" "]}, "bad_words"),
    "min above max": ({"min_tokens": 6, "max_tokens": 5}, "min_tokens is 6"),
    "priority": ({"priority": 2**40}, "priority"),
    "stream options alone": ({"stream_options": {"include_usage": True}}, "needs stream"),
    "stream options": (
        {"stream": True, "stream_options": {"foo": True}},
        "stream_options.foo: there is no such",
    ),
    "streamed prompt logprobs": ({"stream": True, "prompt_logprobs": 1}, "cannot be streamed"),
    "unknown": ({"max_token": 5}, "did you mean max_tokens?"),
    "best_of": ({"best_of": 3}, "best_of is not supported"),
    "suffix": ({"suffix": "x"}, "suffix is not supported"),
    "regex": ({"guided_regex": "foo**"}, "guided_regex is not supported"),
}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("name", BAD_COMPLETIONS)
def test_bad_completions(server: RunningServer, name: str, is_streamed: bool) -> None:
    options, message = BAD_COMPLETIONS[name]
    stream = (
        {"stream": True} if is_streamed and not {"stream_options", "prompt_logprobs"} & set(options) else {}
    )
    answer = server.post("/v1/completions", {"prompt": "x", **stream, **options})
    assert answer.status == 400, answer.data
    assert message in answer.error["message"]
    assert "\nhint: " in answer.error["message"]


def test_token_ids_and_priorities_that_are_none_get_a_hint(server: RunningServer) -> None:
    answers = [
        server.post("/detokenize", {"tokens": [49152]}),
        server.post("/v1/completions", b'{"prompt": "x"}', headers={"x-priority": "high"}),
    ]
    for answer in answers:
        assert "\nhint: " in answer.error["message"]


BAD_CHATS: dict[str, tuple[dict[str, Any], str]] = {
    "number": ({"messages": 5}, "messages"),
    "empty": ({"messages": []}, "messages is empty"),
    "strings": ({"messages": ["x"]}, "messages[0]"),
    "no role": ({"messages": [{"content": "x"}]}, "no role"),
    "no content": ({"messages": [{"role": "user"}]}, "no content"),
    "picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "only text",
    ),
    "top_logprobs alone": ({"top_logprobs": 2}, "needs logprobs"),
    "logprobs number": ({"logprobs": 2}, "logprobs"),
    "tools": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools is not supported"),
    "tool choice": ({"tool_choice": "required"}, "tool_choice is not supported"),
    "json": ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
    "schema": ({"guided_json": {"$ref": "#/nowhere"}}, "guided_json is not supported"),
    "echo": ({"echo": True}, "echo is not supported"),
    "long": ({"messages": [{"role": "user", "content": "x " * 10_000}]}, "shorter than the context"),
}


@pytest.mark.parametrize("name", BAD_CHATS)
def test_bad_chats(server: RunningServer, name: str) -> None:
    options, message = BAD_CHATS[name]
    answer = server.post("/v1/chat/completions", {"messages": MESSAGES, **options})
    assert answer.status == 400, answer.data
    assert message in answer.error["message"]
    assert "\nhint: " in answer.error["message"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_parameter_is_named_and_its_neutral_values_are_taken(
    server: RunningServer, name: str
) -> None:
    path = "/v1/chat/completions"
    refusal = server.post(path, {"messages": MESSAGES, "max_tokens": 1, name: {"some": "thing"}})
    assert (refusal.status, refusal.error["param"]) == (400, name)
    for neutral in (None, *REFUSED[name].neutral):
        assert server.post(path, {"messages": MESSAGES, "max_tokens": 1, name: neutral}).status == 200


def test_harmless_parameters_are_taken(server: RunningServer) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
    ):
        extras = dict.fromkeys(IGNORED, "whatever")
        assert server.post(path, {**body, "max_tokens": 1, **extras}).status == 200


def test_null_is_the_default_of_every_parameter(server: RunningServer) -> None:
    from tiny_vllm.serving.schemas import ChatBody, CompletionBody

    nulls = dict.fromkeys(CompletionBody.model_fields, None)
    assert server.post("/v1/completions", {**nulls, "prompt": "x"}).status == 200
    nulls = dict.fromkeys(ChatBody.model_fields, None)
    assert server.post("/v1/chat/completions", {**nulls, "messages": MESSAGES}).status == 200


def test_a_broken_choice_is_an_error_in_both_forms(server: RunningServer) -> None:
    prompt = [BAD_LOGITS, BAD_LOGITS, 5]
    answer = server.complete(prompt, max_tokens=9)
    assert (answer.status, answer.error["code"]) == (500, "model_failure")
    events = server.complete(prompt, max_tokens=9, stream=True).events()
    assert events[-1]["error"]["code"] == "model_failure"
    assert sum("error" in event for event in events) == 1


def test_client_ids_may_repeat(server: RunningServer) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(
                lambda _: server.post(
                    "/v1/completions",
                    {"prompt": [5, 6], "max_tokens": 20, "request_id": "same"},
                    headers={"x-request-id": "same"},
                ),
                range(4),
            )
        )
    assert {answer.status for answer in answers} == {200}
    assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
    ids = [answer.json()["id"] for answer in answers]
    assert len(set(ids)) == 4 and all(name.startswith("cmpl-same-") for name in ids)


def test_prompt_and_budget_against_the_context(server: RunningServer) -> None:
    answer = server.complete([5] * 40, max_tokens=10**6)
    assert answer.json()["usage"]["total_tokens"] == 64
    assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_tokenize_and_detokenize(server: RunningServer) -> None:
    tokens = server.post("/tokenize", {"prompt": "Hello, world!", "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert (tokens["max_model_len"], "".join(tokens["token_strs"])) == (64, "Hello, world!")
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "Hello, world!"}
    chat = server.post("/tokenize", {"messages": MESSAGES}).json()
    rendered = server.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"]
    assert "Hi" in rendered and "assistant" in rendered
    for body in ({}, {"prompt": "x", "messages": MESSAGES}, {"prompt": 5}):
        assert server.post("/tokenize", body).status == 400
    for tokens in ([-1], [49152], [2**70], ["x"], 5):
        assert server.post("/detokenize", {"tokens": tokens}).status == 400


@pytest.mark.parametrize("prompt", [[], [5, 6], ["x"], [[]], 5, {}, False])
def test_tokenize_takes_one_text_and_says_so(server: RunningServer, prompt: Any) -> None:
    """Elsewhere lists are prompts, too, and the empty one is an empty prompt."""
    answer = server.post("/tokenize", {"prompt": prompt})
    found = {list: "a list", dict: "an object"}.get(type(prompt), json.dumps(prompt))
    assert (answer.status, answer.error["param"]) == (400, "prompt")
    message = f"prompt must be a string, not {found}\nhint: send one text; token ids are tokens already"
    assert answer.error["message"] == message
    assert server.post("/tokenize", {"prompt": ""}).json()["tokens"] == []


def test_the_openapi_document_describes_the_bodies(server: RunningServer) -> None:
    document = server.get("/openapi.json").json()
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    name = body["schema"]["$ref"].rpartition("/")[2]
    assert "prompt" in document["components"]["schemas"][name]["required"]
    text = json.dumps(document)
    assert all(f'"{part}"' in text for part in ("ChatBody", "StreamOptions", "TokenizeBody"))


def test_more_choices_than_the_queue_can_ever_hold_are_no_matter_of_waiting() -> None:
    with running_server(engine={"max_num_seqs": 2, "max_queue_len": 5, "max_n": 20}) as small:
        for body in ({"prompt": [5], "n": 8}, {"prompt": [[5], [6]], "n": 4}):
            answer = small.complete(max_tokens=1, **body)
            assert answer.status == 400 and "retry-after" not in answer.headers
            assert "8 choices" in answer.error["message"] and "7" in answer.error["message"]
        chat = small.post("/v1/chat/completions", {"messages": MESSAGES, "n": 8})
        assert chat.status == 400
        assert small.complete([5], n=7, max_tokens=1).status == 200
