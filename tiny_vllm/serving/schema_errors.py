"""What is told of a body that does not fit its schema: where, what was sent, and what would be right."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from tiny_vllm.errors import printable
from tiny_vllm.serving.errors import ApiError, shown
from tiny_vllm.serving.parameters import name_hint

MAX_PLACE_LEN = 100
MAX_SHOWN_ERRORS = 5

OBJECT, TEXT = "write an object in braces", "write a text in quotes"
HINTS: Mapping[str, str] = {
    "bool_type": "write true or false",
    "dict_type": OBJECT,
    "finite_number": "JSON has no such number",
    "float_type": "write a number",
    "int_type": "write a whole number",
    "json_invalid": "send one object of JSON, in UTF-8",
    "list_type": "write a list in square brackets, even of one entry",
    "literal_error": "take one of these, or leave it out",
    "missing": "add it: nothing stands for it",
    "model_type": OBJECT,
    "string_too_long": "shorten it",
    "string_type": TEXT,
    "text_entry": TEXT,
    "texts": f"{TEXT}, or a list of such texts",
}
"""By kinds of pydantic's, and of the schemas' own."""
OTHERWISE = "/openapi.json tells what is taken"
WRITTEN_WITHOUT_QUOTES = frozenset({"bool_type", "float_type", "int_type"})
WITHOUT_VALUE = frozenset({"extra_forbidden", "json_invalid", "missing", "text_entry"})


def schema_error(error: ValidationError, option_names: Collection[str]) -> ApiError:
    """The first few faults, with what was sent instead, and a hint for the first one.

    option_names: fields of the objects in a body that take no others.
    """
    faults: list[Any] = error.errors(include_url=False, include_context=False)
    first = faults[0]
    texts = [_text(fault) for fault in faults[:MAX_SHOWN_ERRORS]]
    if len(faults) > MAX_SHOWN_ERRORS:
        texts.append(f"and {len(faults) - MAX_SHOWN_ERRORS} more")
    hint = _hint(first, option_names)
    if len(faults) > 1:
        hint = f"{_place(first)}: {hint}"
    param = printable(str(first["loc"][0]), MAX_PLACE_LEN) if first["loc"] else None
    return ApiError(400, f"{'; '.join(texts)}\nhint: {hint}", param=param)


def _place(fault: Mapping[str, Any]) -> str:
    return printable(".".join(str(part) for part in fault["loc"]), MAX_PLACE_LEN)


def _text(fault: Mapping[str, Any]) -> str:
    place, kind = _place(fault), fault["type"]
    reason = "there is no such option" if kind == "extra_forbidden" else fault["msg"]
    text = f"{place}: {reason}" if place else str(reason)
    return text if kind in WITHOUT_VALUE else f"{text}, not {shown(fault['input'])}"


def _hint(fault: Mapping[str, Any], option_names: Collection[str]) -> str:
    kind = fault["type"]
    if kind == "extra_forbidden":
        return name_hint(str(fault["loc"][-1]), option_names)
    hint = HINTS.get(kind, OTHERWISE)
    is_quoted = kind in WRITTEN_WITHOUT_QUOTES and isinstance(fault["input"], str)
    return f"{hint}, without quotes" if is_quoted else hint
