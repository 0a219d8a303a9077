from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from tiny_vllm.cli.main import build_parser
from tiny_vllm.cli.serve import server_config
from tiny_vllm.config import EngineConfig
from tiny_vllm.errors import ConfigError
from tiny_vllm.serving.config import API_KEY_VARIABLE, ServerConfig
from tiny_vllm.serving.server import PREFILL_TOKENS_PER_DECODE, with_server_defaults


def parsed(*arguments: str) -> ServerConfig:
    return server_config(build_parser().parse_args(["serve", *arguments]))


def test_no_arguments_give_the_defaults_and_these_are_for_this_machine_only() -> None:
    assert parsed() == ServerConfig()
    assert ServerConfig().host == "127.0.0.1" and ServerConfig().cors_origin == ()


def test_prompts_hold_up_a_servers_streams_for_a_bounded_time() -> None:
    assert with_server_defaults(EngineConfig()).max_prefill_tokens_per_decode == PREFILL_TOKENS_PER_DECODE
    chosen = EngineConfig(max_prefill_tokens_per_decode=7)
    assert with_server_defaults(chosen) == chosen


def test_every_option_is_on_the_command_line() -> None:
    known = vars(build_parser().parse_args(["serve"]))
    assert {option.name for option in fields(ServerConfig)} <= known.keys()


def test_options_reach_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "c, d,")
    config = parsed(
        "--port", "0", "--api-key", "a", "--api-key", "b", "--no-live-page", "--request-timeout", "2"
    )
    assert config == ServerConfig(port=0, api_key=("a", "b", "c", "d"), live_page=False, request_timeout=2.0)


@pytest.mark.parametrize(
    "options",
    [
        {"port": -1},
        {"port": 65536},
        {"port": 1.5},
        {"max_requests": 0},
        {"receive_timeout": 0.0},
        {"request_timeout": float("nan")},
        {"restart_engine": 1},
        {"api_key": ("",)},
        {"api_key": ("ä",)},
        {"api_key": "key"},
        {"cors_origin": (5,)},
        {"cors_origin": ("example.org",)},
        {"cors_origin": ("https://example.org/",)},
        {"cors_origin": ("https://example.org/page",)},
        {"served_model_name": " "},
        {"separate_keys": True},
        {"max_requests_per_key": 2},
        {"host": None},
    ],
)
def test_wrong_values_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ServerConfig(**options)


def test_an_unset_variable_for_a_key_is_told_as_what_it_is() -> None:
    with pytest.raises(ConfigError, match="api_key has an empty entry"):
        ServerConfig(api_key=("",))


def test_origins_are_as_browsers_send_them() -> None:
    origins = ("*", "null", "http://localhost:3000", "https://example.org", "http://[::1]:8080")
    assert ServerConfig(cors_origin=origins).cors_origin == origins
