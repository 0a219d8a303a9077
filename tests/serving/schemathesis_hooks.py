"""Loaded by schemathesis: what JSON Schema cannot say, and so the document does not; and what need not be
sent to every endpoint."""

from __future__ import annotations

import re
from typing import Any

import schemathesis

from tiny_vllm.serving.parameters import IGNORED, REFUSED
from tiny_vllm.serving.schemas import ChatBody, DetokenizeBody, EmbeddingBody, TokenizeBody

OTHER_BODIES = {
    "/v1/chat/completions": ChatBody,
    "/v1/embeddings": EmbeddingBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}


@schemathesis.hook
def filter_case(context: Any, case: Any) -> bool:
    """Of the cases that vary one parameter after the other, those of parameters without support go to
    /v1/completions alone: there are some fifty of them, and all bodies have them from one table, as
    test_openapi.py shows without a server."""
    phase = case.meta.phase
    if phase.name != "coverage" or case.operation.path not in OTHER_BODIES:
        return True
    description = phase.data.description
    if description.endswith("a subset of optional properties"):
        name = max(case.body)  # subsets grow in alphabetical order
    else:
        found = re.search(r"^\w+(?=:| ->)|(?<=')\w+(?=')", description)
        name = "" if found is None else found[0]
    is_supported = name in OTHER_BODIES[case.operation.path].model_fields
    return is_supported or name not in {*REFUSED, *IGNORED}


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
