"""Every error a user can meet.

    TinyVLLMError
    ├── ConfigError      an engine option is wrong, unknown or does not fit this machine
    ├── ModelError       a checkpoint is unsupported, incomplete or damaged
    ├── RequestError     one request is invalid (HTTP 400)
    │   └── PromptTooLong
    ├── CapacityError    valid, but there is no room now (HTTP 429 / 503)
    └── EngineDead       the engine loop has stopped (HTTP 503)

The first four are also `ValueError`: they say that a value given from outside cannot be used.
A message names what was wrong, the value, the limit, and ends with a hint.
"""

from __future__ import annotations

MAX_SHOWN_LEN = 80
MAX_PATH_LEN = 500
"""Of a path: its end tells most."""
MAX_REASON_LEN = 500
"""Of what a library, or the template of a model, says."""

UNREADABLE = "check its permissions and the disk"
"""The hint for a file that cannot be read."""
UNWRITABLE = "check its directory, its permissions and the disk, or name another file"
"""The hint for a file that cannot be written."""
SWITCH = "without quotes, and no number"
"""The hint where true or false is meant."""
LEAVE_OUT = "leave it out for the default"

JSON_TYPES = {
    "NoneType": "null",
    "bool": "boolean",
    "int": "number",
    "float": "number",
    "str": "string",
    "list": "list",
    "dict": "object",
}


class TinyVLLMError(Exception):
    """Base class of every error tiny-vllm raises on purpose."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"{message}\nhint: {hint}" if hint else message)
        self.message = message
        self.hint = hint


class ConfigError(TinyVLLMError, ValueError):
    """An engine option is unknown, out of range or cannot be met on this machine."""


class ModelError(TinyVLLMError, ValueError):
    """A checkpoint is unsupported, incomplete or damaged."""


class RequestError(TinyVLLMError, ValueError):
    """One request is invalid. Nothing else is affected."""


class PromptTooLong(RequestError):
    """A prompt has more tokens than the context or the page pool holds."""

    @classmethod
    def for_context(cls, count: str, context_len: int) -> PromptTooLong:
        """count: of its tokens, in words."""
        return cls(
            f"the prompt has {count}, but must be shorter than the context: this model's maximum context "
            f"length is {context_len} tokens",
            hint="shorten the prompt or raise max_model_len",
        )


class CapacityError(TinyVLLMError, ValueError):
    """A valid request that cannot be taken now."""


class EngineDead(TinyVLLMError):
    """The engine loop has stopped and takes no more work."""


def shown(value: object, max_len: int = MAX_SHOWN_LEN) -> str:
    """A value as a message shows it: bounded, marked where it is cut, and never failing as integers of some
    thousand digits do when printed."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except ValueError:  # it holds such an integer
        return f"a {type(value).__name__}"
    return text if len(text) <= max_len else f"{text[:max_len]} ..."


def printable(text: str, max_len: int = MAX_SHOWN_LEN) -> str:
    """Text from outside, such as a name in a file, as a message shows it without quotes: bounded, marked
    where it is cut, and with control characters written out, so that no terminal obeys them."""
    kept = text if len(text) <= max_len else f"{text[:max_len]} ..."
    return written_out(kept)


def written_out(text: str) -> str:
    """The whole text, with control characters written out, line ends too."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def json_type(value: object) -> str:
    """The type of a value in the words of JSON; Python's name for what JSON does not have."""
    name = type(value).__name__
    return JSON_TYPES.get(name, name)
