from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any

import openai.types as openai_types
import openai.types.chat as openai_chat_types
import pytest

from tests.serving.guide_tables import BODIES, GUIDE, filled, parameter_names
from tests.serving.support import running_server
from tests.serving.vllm_parameters import VLLM_PARAMETERS
from tiny_vllm.config import EngineConfig
from tiny_vllm.serving.config import ServerConfig
from tiny_vllm.serving.parameters import IGNORED, REFUSED


def test_the_guides_tables_are_those_of_the_code() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    assert filled(text) == text, "run python -m tests.serving.guide_tables"


@pytest.mark.parametrize("config_class", [ServerConfig, EngineConfig])
def test_every_option_of_the_command_is_in_the_guide(config_class: type) -> None:
    lines = GUIDE.read_text(encoding="utf-8").splitlines()
    listed = {line.split("`")[1] for line in lines if line.startswith("| `--")}
    assert {"--" + option.name.replace("_", "-") for option in fields(config_class)} <= listed


OPENAI_PARAMETERS: dict[str, Any] = {
    "completions": openai_types.completion_create_params.CompletionCreateParamsBase,
    "chat": openai_chat_types.completion_create_params.CompletionCreateParamsBase,
    "embeddings": openai_types.embedding_create_params.EmbeddingCreateParams,
}


@pytest.mark.parametrize("endpoint", OPENAI_PARAMETERS)
def test_every_parameter_of_the_installed_openai_client_is_in_the_table(endpoint: str) -> None:
    names = set(OPENAI_PARAMETERS[endpoint].__annotations__)
    assert len(names) >= 5
    assert names <= set(parameter_names())


@pytest.mark.parametrize("endpoint", VLLM_PARAMETERS)
def test_every_parameter_of_vllm_is_in_the_table(endpoint: str) -> None:
    assert set(VLLM_PARAMETERS[endpoint]) <= set(parameter_names())


def test_the_table_has_no_parameter_twice() -> None:
    """But for what is refused by one endpoint and taken by another."""
    in_bodies = {name for _, body in BODIES for name in body.model_fields}
    assert not set(IGNORED) & (in_bodies | set(REFUSED))
    assert set(REFUSED) & in_bodies == {"add_special_tokens", "echo"}


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads(GUIDE.with_name("grafana-dashboard.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for text in expressions for name in re.findall(r"(?:tiny_)?vllm:\w+", text)}
    with running_server() as server:
        assert server.complete([28, 29], max_tokens=3).status == 200
        page = server.get("/metrics").data.decode()
    given = {re.split(r"[{ ]", line)[0] for line in page.splitlines() if not line.startswith("#")}
    assert len(asked) > 10 and asked <= given


def test_every_endpoint_is_in_the_guide() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    with running_server() as server:
        paths = server.get("/openapi.json").json()["paths"]
    assert len(paths) > 10
    for path in paths:
        assert f"`{path.replace('{name}', 'NAME')}`" in re.sub(r"`(?:GET|POST) ", "`", text), path
