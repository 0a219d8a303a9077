"""The server keeps to its own OpenAPI document, and the document says what the server takes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.support import RunningServer, running_server
from tiny_vllm.serving.errors import ApiError
from tiny_vllm.serving.openapi import numerals_below
from tiny_vllm.serving.parameters import IGNORED, REFUSED
from tiny_vllm.serving.schemas import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
    parse_body,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    engine = {"max_num_seqs": 4, "max_model_len": 4096, "max_n": 4, "max_logprobs": 3}
    with running_server(engine=engine, max_prompts=8, max_stop_strings=5) as server:
        yield server
        server.assert_alive()


@pytest.fixture(scope="module")
def schemas(server: RunningServer) -> Any:
    return server.get("/openapi.json").json()["components"]["schemas"]


@pytest.mark.parametrize(
    ("phases", "max_examples", "least"),
    [
        # The coverage of every parameter's limits and types depends on no number of examples.
        ("coverage,fuzzing,stateful", 15, 1000),
        pytest.param("fuzzing,stateful", 40, 300, marks=pytest.mark.slow),
    ],
    ids=["coverage and 15", "40"],
)
def test_generated_requests_are_answered_as_documented(
    server: RunningServer, tmp_path: Path, phases: str, max_examples: int, least: int
) -> None:
    """No 5xx, no hang, no undocumented answer; valid bodies are accepted, and others refused.

    /live never ends, so it is left out.
    """
    pytest.importorskip("schemathesis", reason="schemathesis, of the extra dev, is not installed")
    options = [
        "--exclude-path",
        "/live",
        "--phases",
        phases,
        "--max-examples",
        str(max_examples),
        "--request-timeout",
        "120",
        "--no-color",
    ]
    options += ["--seed", "1"]  # the same cases in every run
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", *options],
        env={"PYTHONPATH": str(ROOT), "SCHEMATHESIS_HOOKS": "tests.serving.schemathesis_hooks"},
        capture_output=True,
        text=True,
        timeout=900,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) generated", done.stdout)[0]) > least


@pytest.mark.parametrize("body", ["CompletionBody", "ChatBody", "TokenizeBody", "DetokenizeBody"])
def test_parameters_without_support_are_documented_as_such(schemas: Any, body: str) -> None:
    schema = schemas[body]
    assert schema["additionalProperties"] is False
    assert {*REFUSED, *IGNORED} <= set(schema["properties"])
    assert schema["properties"]["tools"]["enum"] == [[], None]
    assert "no effect" in schema["properties"]["user"]["description"]


SMALLEST: dict[type[Body], dict[str, Any]] = {
    CompletionBody: {"prompt": "x"},
    ChatBody: {"messages": [{"role": "user", "content": "x"}]},
    EmbeddingBody: {"input": "x"},
    TokenizeBody: {"prompt": "x"},
    DetokenizeBody: {"tokens": []},
}
VALUES = [
    None,
    False,
    True,
    0,
    1,
    -1,
    0.5,
    1.0,
    2**70,
    "",
    "x",
    "0",
    [],
    [None],
    ["x"],
    [[]],
    {},
    {"x": None},
]
VALUES += [value for refused in REFUSED.values() for value in refused.neutral]


@pytest.mark.parametrize("body", SMALLEST)
def test_of_parameters_without_support_the_documented_values_are_taken(
    schemas: Any, body: type[Body]
) -> None:
    """Of those that are ignored every value, of the others those that ask for nothing."""
    without: dict[str, Any] = dict(SMALLEST[body])
    for name in sorted({*REFUSED, *IGNORED} - set(body.model_fields)):
        without[name] = None
        parse_body(body, json.dumps(without).encode())
        allowed = schemas[body.__name__]["properties"][name].get("enum", VALUES)
        for value in VALUES:
            sent = json.dumps({**SMALLEST[body], name: value}).encode()
            if any(value == other and (type(value) is bool) == (type(other) is bool) for other in allowed):
                parse_body(body, sent)
                continue
            with pytest.raises(ApiError) as error:
                parse_body(body, sent)
            assert (error.value.status, error.value.param) == (400, name), (name, value)
            assert error.value.code == "unsupported_parameter"


def test_limits_of_this_server_are_documented(schemas: Any) -> None:
    completion, chat = schemas["CompletionBody"]["properties"], schemas["ChatBody"]["properties"]
    assert completion["n"]["maximum"] == chat["n"]["maximum"] == 4
    assert completion["logprobs"]["maximum"] == chat["top_logprobs"]["maximum"] == 3
    assert "maximum" not in chat["logprobs"]
    assert [form.get("maxItems") for form in completion["prompt"]["anyOf"]] == [None, 8, None, 8]
    assert completion["stop"]["anyOf"][1]["maxItems"] == 5
    assert schemas["DetokenizeBody"]["properties"]["tokens"]["items"]["maximum"] == 49151


def test_numerals_below_a_limit() -> None:
    for limit in (1, 2, 9, 10, 11, 99, 100, 101, 1234, 2005):
        pattern = re.compile(f"^({numerals_below(limit)})$")
        assert [number for number in range(3000) if pattern.match(str(number))] == list(range(limit))
        assert not pattern.match("00") and not pattern.match("")


def test_the_document_is_json_without_paths_of_this_machine(server: RunningServer) -> None:
    assert str(ROOT) not in json.dumps(server.get("/openapi.json").json())
