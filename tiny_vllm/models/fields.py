"""Typed access to what a checkpoint says about itself: an untrusted mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiny_vllm.errors import ModelError, shown

_REQUIRED: Any = object()

REPAIR = "correct the configuration, or download the model again"
"""The hint where a configuration says what cannot be."""

OTHER_VARIANT = "use another variant of the model: this one computes what is not built here"
"""The hint where it says what may be, but is not supported."""

LARGEST = 2**31 - 1
"""What an integer may be: no size of a model comes near it, and sums and products of such stay exact."""

SMALLEST_NUMBER, LARGEST_NUMBER = 1.2e-38, 3.4e38
"""What a number that is not 0 may be: what FP32, in which it is used, can hold."""

MOST_PARTS = 1024
"""How many layers, or experts in one, a model may have: each is gone through before anything is loaded."""


class Fields:
    """A missing or null value takes the default given with the question, else that of `defaults`, if any.

    source: what the mapping is, for messages, unless the caller says it. prefix: stands before every name.
    Raises ModelError naming the key.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        source: str = "",
        *,
        prefix: str = "",
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.values = values
        self._of = source and f"{source}: "
        self._prefix = prefix
        self._defaults = defaults or {}

    def key(self, name: str) -> str:
        """The whole key, for messages."""
        return self._prefix + name

    def get(self, name: str) -> Any:
        """The value as it is, also null where it says so; the default only if there is no such key."""
        key = self._prefix + name
        return self.values[key] if key in self.values else self._defaults.get(name)

    def integer(self, name: str, default: Any = _REQUIRED, *, limit: int = LARGEST) -> Any:
        """A positive integer up to `limit`; None only if that is the default."""
        value = self._get(name, default)
        if value is default or value is None:
            return value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, value, "a positive integer")
        if value > limit:
            raise self.error(name, value, f"at most {limit}")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """A number that FP32 holds and that is not negative; None only if that is the default."""
        value = self._get(name, default)
        if value is default or value is None:
            return value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= LARGEST_NUMBER:
            raise self.error(name, value, f"a number from 0 to {LARGEST_NUMBER}")
        if 0 < value < SMALLEST_NUMBER:
            raise self.error(name, value, f"0 or at least {SMALLEST_NUMBER}")
        return float(value)

    def positive(self, name: str, default: Any = _REQUIRED) -> Any:
        """As `number`, and above 0."""
        value = self.number(name, default)
        if value == 0:
            raise self.error(name, value, "above 0")
        return value

    def boolean(self, name: str, default: Any = _REQUIRED) -> Any:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def indices(self, name: str, limit: int) -> tuple[int, ...]:
        """A list of layer numbers below `limit`, empty by default."""
        value = self.get(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(
            isinstance(item, int) and not isinstance(item, bool) and 0 <= item < limit for item in value
        ):
            raise self.error(name, value, f"a list of layer numbers below {limit}")
        return tuple(value)

    def error(self, name: str, value: object, expected: str) -> ModelError:
        return ModelError(
            f"{self._of}{self._prefix}{name} is {shown(value)}, but must be {expected}", hint=REPAIR
        )

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(self._prefix + name)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # GGUF may repeat a number for every layer
        if value is not None:
            return value
        if default is not _REQUIRED:
            return default
        if name not in self._defaults:
            raise ModelError(f"{self._of}{self._prefix}{name} is missing", hint=REPAIR)
        return self._defaults[name]
