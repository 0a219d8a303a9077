from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from tiny_vllm.cli.main import build_parser, main
from tiny_vllm.cli.serve import server_config
from tiny_vllm.config import EngineConfig
from tiny_vllm.errors import ConfigError
from tiny_vllm.serving import server
from tiny_vllm.serving.config import API_KEY_VARIABLE, ServerConfig
from tiny_vllm.serving.service import ServedModel


def parsed(*arguments: str) -> ServerConfig:
    return server_config(build_parser().parse_args(["serve", *arguments]))


def test_no_arguments_give_the_defaults_and_these_are_for_this_machine_only() -> None:
    assert parsed() == ServerConfig()
    assert ServerConfig().host == "127.0.0.1" and ServerConfig().cors_origin == ()


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [([], 4096), (["7"], 7), (["4096"], 4096), (["none"], None)],
    ids=["left out", "another", "the default", "none"],
)
def test_prompts_hold_up_a_servers_streams_for_a_bounded_time_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], limit: int | None
) -> None:
    """Of None the engine makes that there is no bound."""
    served = []

    def open_model(config: ServerConfig, engine_config: EngineConfig) -> ServedModel:
        served.append(engine_config)
        raise ConfigError("that was all to know")

    monkeypatch.setattr(server, "open_model", open_model)
    flags = [f"--max-prefill-tokens-per-decode={argument}" for argument in arguments]
    assert main(["serve", *flags]) == 2
    assert [config.max_prefill_tokens_per_decode for config in served] == [limit]


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


@pytest.mark.parametrize("host", ["", "a..b", "a" * 70, "\udcff", "a\0b"])
def test_a_host_that_is_none_is_one_error_with_a_hint(host: str) -> None:
    with pytest.raises(ConfigError, match="is no address of this machine") as error:
        server.listening_socket(host, 0)
    assert error.value.hint == "127.0.0.1 is for this machine only, 0.0.0.0 is every network interface"
    assert str(error.value).replace("\n", "").isprintable() and str(error.value).isascii()
