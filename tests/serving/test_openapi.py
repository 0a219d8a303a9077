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
from tiny_vllm.serving.openapi import numerals_below
from tiny_vllm.serving.parameters import IGNORED, REFUSED

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


@pytest.mark.parametrize("max_examples", [15, pytest.param(40, marks=pytest.mark.slow)])
def test_generated_requests_are_answered_as_documented(
    server: RunningServer, tmp_path: Path, max_examples: int
) -> None:
    """No 5xx, no hang, no undocumented answer; valid bodies are accepted, and others refused.

    /live never ends, so it is left out.
    """
    pytest.importorskip("schemathesis", reason="schemathesis, of the extra dev, is not installed")
    options = [
        "--exclude-path",
        "/live",
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
    assert int(re.findall(r"(\d+) generated", done.stdout)[0]) > 500


@pytest.mark.parametrize("body", ["CompletionBody", "ChatBody", "TokenizeBody", "DetokenizeBody"])
def test_parameters_without_support_are_documented_as_such(schemas: Any, body: str) -> None:
    schema = schemas[body]
    assert schema["additionalProperties"] is False
    assert {*REFUSED, *IGNORED} <= set(schema["properties"])
    assert schema["properties"]["tools"]["enum"] == [[], None]
    assert "no effect" in schema["properties"]["user"]["description"]


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
