"""Errors as the API shows them: OpenAI's shape, a real status, bounded in size."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tiny_vllm.errors import (
    CapacityError,
    EngineDead,
    PromptTooLong,
    RequestError,
    TinyVLLMError,
)
from tiny_vllm.types import SAMPLING_FIELDS

MAX_MESSAGE_LEN = 1000
MAX_SHOWN_VALUE = 40
RETRY_SECONDS = "1"
PARAMETERS = frozenset(
    {
        *SAMPLING_FIELDS,
        "cache_salt",
        "dimensions",
        "input",
        "max_completion_tokens",
        "messages",
        "priority",
        "prompt",
        "tokens",
        "top_logprobs",
    }
)


class ApiError(Exception):
    """What a client is told. kind: OpenAI's error type. param: the parameter at fault, if it is one."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE_LEN else message[:MAX_MESSAGE_LEN] + " ..."
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def encoded(self) -> bytes:
        return msgspec.json.encode(self.body())


def api_error(error: TinyVLLMError, prompt_name: str | None = None) -> ApiError:
    """The answer to a request that met this error. prompt_name: the parameter that prompts came in."""
    match error:
        case RequestError():
            code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
            return ApiError(400, str(error), param=_parameter_in(error.message, prompt_name), code=code)
        case CapacityError():
            return overloaded(str(error))
        case EngineDead():
            return ApiError(
                503,
                str(error),
                kind="server_error",
                code="engine_unavailable",
                headers={"retry-after": RETRY_SECONDS},
            )
    return ApiError(500, str(error), kind="server_error")


def _parameter_in(message: str, prompt_name: str | None) -> str | None:
    """The parameter at fault: messages begin with the name of what is wrong, if it has one."""
    if message.startswith("the prompt "):
        return prompt_name
    name = re.match(r"(?:a token id in )?(\w*)", message)
    return name[1] if name is not None and name[1] in PARAMETERS else None


def overloaded(message: str) -> ApiError:
    return ApiError(
        429,
        message,
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"retry-after": RETRY_SECONDS},
    )


def shutting_down() -> ApiError:
    """The answer to whoever comes when the server is about to end."""
    return ApiError(
        503,
        "the server is shutting down\nhint: try again later",
        kind="server_error",
        code="engine_unavailable",
        headers={"retry-after": RETRY_SECONDS, "connection": "close"},
    )


def shown(value: Any) -> str:
    """What a client sent, in a few words."""
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, str) and len(value) > MAX_SHOWN_VALUE:
        return f"a text of {len(value)} characters"
    # Python refuses to write integers of some thousand digits.
    if isinstance(value, int) and abs(value) >= 10**MAX_SHOWN_VALUE:
        return f"a number of more than {MAX_SHOWN_VALUE} digits"
    return json.dumps(value)
