"""What the API process and the engine process say to each other: msgpack over one ZeroMQ socket pair.

Both run on one machine, so times are seconds on the one monotonic clock of the system.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tiny_vllm.config import EngineConfig
from tiny_vllm.engine.engine import EngineStats, SequenceStatus
from tiny_vllm.errors import (
    CapacityError,
    ConfigError,
    EngineDead,
    ModelError,
    PromptTooLong,
    RequestError,
    TinyVLLMError,
)
from tiny_vllm.types import Request, TokenEvent


class Start(msgspec.Struct, tag=True):
    """The command-line argument of an engine process. config: as the user gave it, unresolved. parent_id: the
    process that it must not outlive."""

    config: EngineConfig
    log_level: int
    parent_id: int


class Add(msgspec.Struct, tag=True):
    """Queue these requests, all or none. The engine answers with Accepted or Refused of the same number."""

    number: int
    requests: list[Request]


class Abort(msgspec.Struct, tag=True):
    """Nobody waits for these requests any more."""

    request_ids: list[str]


class Stop(msgspec.Struct, tag=True):
    """Choices (request id, index) whose text is complete."""

    choices: list[tuple[str, int]]


class Watch(msgspec.Struct, tag=True):
    """Send page maps from now on, or no more."""

    is_on: bool


class Quit(msgspec.Struct, tag=True):
    """End the engine process."""


ToEngine = Add | Abort | Stop | Watch | Quit


class Loading(msgspec.Struct, tag=True):
    """Values of the weights loaded so far, and in all; sent at least once, when the process has started."""

    num_done: int
    num_total: int


class Ready(msgspec.Struct, tag=True):
    """The model is loaded and warm. options: the resolved EngineConfig by field."""

    options: dict[str, Any]


class Accepted(msgspec.Struct, tag=True):
    number: int


class Refused(msgspec.Struct, tag=True):
    number: int
    error: Fault


class Events(msgspec.Struct, tag=True):
    """Events of one engine step."""

    events: list[TokenEvent]


class Report(msgspec.Struct, tag=True):
    """A sign of life, every two seconds or more often, as far as steps are shorter than that.

    page_map: a letter per page (page_pool.PAGE_STATES) while somebody watches; then also the sequences in
    slots.
    step_seconds: time in steps so far, for the share of time that anything else takes.
    """

    stats: EngineStats
    step_seconds: float
    page_map: str | None = None
    slots: list[SequenceStatus] = []


class Failed(msgspec.Struct, tag=True):
    """The last message of an engine that could not start, or whose step failed."""

    error: Fault


FromEngine = Loading | Ready | Accepted | Refused | Events | Report | Failed


class Fault(msgspec.Struct):
    """An exception on its way to another process. kind: the name of its class."""

    kind: str
    message: str
    hint: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        if isinstance(error, TinyVLLMError):
            return cls(type(error).__name__, error.message, error.hint)
        return cls(type(error).__name__, str(error))

    def exception(self) -> TinyVLLMError:
        """The error to raise here. Whatever is none of ours means that the engine is dead."""
        known = {
            error.__name__: error
            for error in (RequestError, PromptTooLong, CapacityError, ConfigError, ModelError, EngineDead)
        }
        if self.kind in known:
            return known[self.kind](self.message, hint=self.hint)
        return EngineDead(f"{self.kind}: {self.message}", hint="the server's log has more")


def encode(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)
