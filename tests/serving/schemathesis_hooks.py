"""Loaded by schemathesis: what JSON Schema cannot say, and so the document does not."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.hook
def before_call(context: Any, case: Any, options: Any) -> None:
    """min_tokens is at most max_tokens."""
    body = case.body
    if isinstance(body, dict) and type(body.get("min_tokens")) is int and body["min_tokens"] > 0:
        case.body = {**body, "min_tokens": 0}
