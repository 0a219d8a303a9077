"""The OpenAPI document: the framework's, with the request bodies as this server takes them.

Bodies are validated by other code than the framework's, so what that code refuses is told here: parameters
that are not supported, and limits that depend on the model and on options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from tiny_vllm.serving.parameters import IGNORED, REFUSED
from tiny_vllm.serving.schemas import Body
from tiny_vllm.text.request_builder import (
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_STOP_STRING_LEN,
)
from tiny_vllm.types import MAX_INTEGER

Schema = dict[str, Any]
NULL: Schema = {"type": "null"}
OFF: Schema = {"enum": [False, None]}
REFERENCE = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What bodies may hold on this server.

    num_ids: token ids of the model. num_text_ids: those that stand for text; 0 without a tokenizer.
    hidden_size: values of an embedding.
    takes_empty_prompts: an empty prompt is a BOS token. max_logprobs: -1 for the whole vocabulary.
    """

    model_name: str
    num_ids: int
    num_text_ids: int
    takes_empty_prompts: bool
    hidden_size: int
    max_n: int
    max_logprobs: int
    max_prompts: int
    max_stop_strings: int


def describe(app: FastAPI, bodies: Sequence[type[Body]], limits: BodyLimits) -> Schema:
    """The document of an application whose endpoints take these bodies."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, made = models_json_schema([(body, "validation") for body in bodies], ref_template=REFERENCE)
    schemas = made["$defs"]
    for body in bodies:
        schema = schemas[body.__name__]
        _limit(schema["properties"], limits)
        _add_extras(schema)
        if rules := _combinations(set(body.model_fields)):
            schema["allOf"] = rules
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
    return document


def _limit(properties: Schema, limits: BodyLimits) -> None:
    most_logprobs = limits.num_ids if limits.max_logprobs == -1 else min(limits.max_logprobs, limits.num_ids)
    logprobs = {"minimum": -1 if limits.max_logprobs == -1 else 0, "maximum": most_logprobs}
    ids = _array(_ids_below(limits.num_ids))
    text = {"type": "string", "minLength": 0 if limits.takes_empty_prompts else 1}
    prompt_ids = {**ids, "minItems": text["minLength"]}
    many = {"minItems": 1, "maxItems": limits.max_prompts}
    prompts = [text, {**_array(text), **many}, prompt_ids, {**_array(prompt_ids), **many}]
    stop = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_LEN}
    bad_word = {"type": "string", "pattern": r"\S", "maxLength": MAX_BAD_WORD_LEN}
    bias = {
        "type": "object",
        "propertyNames": {"pattern": f"^({numerals_below(limits.num_ids)})$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    }
    known: Schema = {
        "model": {"anyOf": [{"const": limits.model_name}, NULL]},
        "n": {
            "maximum": limits.max_n,
            "description": "choices per prompt; all of them count against a limit",
        },
        "max_tokens": {"maximum": MAX_INTEGER},
        "max_completion_tokens": {"maximum": MAX_INTEGER},
        "top_k": {"maximum": MAX_INTEGER},
        "min_tokens": {"maximum": MAX_INTEGER, "description": "at most max_tokens"},
        "prompt_logprobs": {**logprobs, "description": "not with stream"},
        "top_logprobs": {**logprobs, "description": "with logprobs only"},
        "stop": {"anyOf": [stop, {**_array(stop), "maxItems": limits.max_stop_strings}, NULL]},
        "stop_token_ids": {"anyOf": [ids, NULL]},
        "allowed_token_ids": {"anyOf": [{**ids, "minItems": 1}, NULL]},
        "bad_words": {"anyOf": [{**_array(bad_word), "maxItems": MAX_BAD_WORDS}, NULL]},
        "logit_bias": {"anyOf": [bias, NULL]},
        "dimensions": {"maximum": limits.hidden_size},
        "input": {"anyOf": prompts},
        "tokens": _array(_ids_below(limits.num_text_ids)),
    }
    for name, told in known.items():
        if name in properties:
            properties[name].update(told)
    if "cache_salt" in properties:
        properties["cache_salt"]["minLength"] = 1
    if "n" in properties and "prompt" in properties:  # of a completion: elsewhere these names mean less
        properties["logprobs"].update(logprobs)
        properties["prompt"].update(anyOf=prompts)


def _add_extras(schema: Schema) -> None:
    """Parameters without a field: some do nothing, the others may only have values that ask for nothing."""
    properties = schema["properties"]
    for name, remark in IGNORED.items():
        properties.setdefault(name, {"description": f"no effect: {remark}"})
    for name, refused in REFUSED.items():
        told = {"description": f"not supported: {refused.reason}", "enum": [*refused.neutral, None]}
        properties.setdefault(name, told)
    schema["additionalProperties"] = False


def _combinations(names: set[str]) -> list[Schema]:
    """What parameters may not be together. That min_tokens is at most max_tokens, or how many choices all
    prompts may have together, cannot be said."""
    absent = {name: {"properties": {name: NULL}} for name in names}
    rules: list[list[Schema]] = []
    if {"prompt", "messages"} <= names:
        of_messages = {"add_generation_prompt": OFF, "chat_template_kwargs": {"enum": [{}, None]}}
        rules.append(
            [
                _given("prompt", {"messages": NULL, **of_messages}),
                _given("messages", {"prompt": NULL, "add_special_tokens": OFF}),
            ]
        )
    if "stream" in names:
        rules.append([absent["stream_options"], _is_on("stream")])
        rules.append([absent["prompt_logprobs"], {"properties": {"stream": OFF}}])
    if "top_logprobs" in names:
        rules.append([absent["top_logprobs"], _is_on("logprobs")])
    return [{"anyOf": rule} for rule in rules]


def _given(name: str, others: Schema) -> Schema:
    return {"required": [name], "properties": {name: {"not": NULL}, **others}}


def _is_on(name: str) -> Schema:
    return {"required": [name], "properties": {name: {"const": True}}}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _ids_below(limit: int) -> Schema:
    return {"type": "integer", "minimum": 0, "maximum": max(limit - 1, 0)}


def numerals_below(limit: int) -> str:
    """A regular expression for the decimal numerals of 0 to limit - 1, without leading zeros. limit > 0."""
    last = str(limit - 1)
    choices = ["0"] if len(last) > 1 else []
    choices += [f"[1-9][0-9]{{{length - 1}}}" for length in range(1, len(last))]
    for place, digit in enumerate(last):
        low = 1 if place == 0 and len(last) > 1 else 0
        if int(digit) > low:
            choices.append(f"{last[:place]}[{low}-{int(digit) - 1}][0-9]{{{len(last) - place - 1}}}")
    return "|".join([*choices, last])
