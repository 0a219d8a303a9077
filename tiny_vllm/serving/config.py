"""Options of the server, beside those of the engine. The command line is generated from these fields."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields
from typing import Any

from tiny_vllm.config import check_option
from tiny_vllm.errors import ConfigError, shown
from tiny_vllm.types import Pooling

API_KEY_VARIABLE = "TINY_VLLM_API_KEY"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


def _option(default: Any, help_text: str, *, low: float | None = None, high: float | None = None) -> Any:
    return field(default=default, metadata={"help": help_text, "low": low, "high": high})


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Every option of the server. Tuples are options that may be given several times."""

    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 is every network interface")
    port: int = _option(8000, "port to listen on; 0 takes a free one", low=0, high=65535)
    served_model_name: str | None = _option(None, "name of the model in the API (default: the model's own)")
    api_key: tuple[str, ...] = _option(
        (), f"key that clients must send; also read from ${API_KEY_VARIABLE}, separated by commas"
    )
    separate_keys: bool = _option(False, "share cached prefixes only between requests with the same API key")
    cors_origin: tuple[str, ...] = _option((), "origin whose web pages may call the API; * is every one")
    max_body_bytes: int = _option(8 << 20, "longest request body", low=1)
    max_prompts: int = _option(2048, "most prompts in one request", low=1)
    max_stop_strings: int = _option(16, "most stop strings in one request", low=1, high=64)
    max_requests: int = _option(4096, "most requests in progress; more are refused with 429", low=1)
    max_requests_per_key: int | None = _option(None, "most requests in progress for one API key", low=1)
    receive_timeout: float = _option(
        30.0, "seconds a client may take to send the head of a request, and again for its body", low=0.01
    )
    request_timeout: float | None = _option(None, "seconds until a request is given up", low=0.01)
    stall_timeout: float = _option(
        60.0, "seconds without a sign of life from the engine until /health fails", low=0.1
    )
    restart_engine: bool = _option(True, "start a new engine process when one has died")
    drain_delay: float = _option(
        0.0, "seconds that /ready fails on SIGTERM before requests are refused, for load balancers", low=0.0
    )
    drain_timeout: float = _option(30.0, "seconds that running requests get to finish on SIGTERM", low=0.0)
    pooling: Pooling = _option(
        "mean", "how /v1/embeddings makes one vector of a prompt's hidden states, unless a request says"
    )
    live_page: bool = _option(True, "serve the page with the chat and the picture of the engine at /")

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if option.type == "tuple[str, ...]":
                _check_texts(option.name, value)
            else:
                check_option(option.name, value, option.type, option.metadata)
        for origin in self.cors_origin:
            if origin not in ("*", "null") and not ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origin is {shown(origin)}, but must be * or an origin as browsers send it",
                    hint="https://example.org, with the port if there is one, and no path",
                )
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ConfigError("served_model_name is empty", hint="leave it out for the model's own")
        if not self.api_key and (self.separate_keys or self.max_requests_per_key is not None):
            name = "separate_keys" if self.separate_keys else "max_requests_per_key"
            raise ConfigError(
                f"{name} is on, but there is no API key", hint=f"give --api-key or set {API_KEY_VARIABLE}"
            )


def api_keys_from_environment() -> tuple[str, ...]:
    return tuple(key.strip() for key in os.environ.get(API_KEY_VARIABLE, "").split(",") if key.strip())


def _check_texts(name: str, values: object) -> None:
    if not isinstance(values, tuple):
        raise ConfigError(
            f"{name} is {shown(values)}, but must be a tuple of strings", hint='write ("text",)'
        )
    for value in values:
        if value == "" or (isinstance(value, str) and value.isspace()):
            raise ConfigError(
                f"{name} has an empty entry", hint="leave it out, or set the variable it is from"
            )
        if not isinstance(value, str) or not value.isascii():
            raise ConfigError(f"{name} has an entry that is no ASCII text", hint="leave it out")
