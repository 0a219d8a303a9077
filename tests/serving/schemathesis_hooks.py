"""Loaded by schemathesis: what JSON Schema cannot say, and so the document does not."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.hook
def before_call(context: Any, case: Any, options: Any) -> None:
    """min_tokens is at most max_tokens; prompts times n are limited."""
    body = case.body
    if not isinstance(body, dict):
        return
    value = body.get("min_tokens")
    # 2.0 counts as 2.
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        case.body = {**body, "min_tokens": 0}
    if isinstance(body.get("prompt"), list) and body.get("n") in (2, 3, 4):
        case.body = {**case.body, "n": 1}
