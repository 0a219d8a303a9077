"""Conversations to prompt text, by the Jinja template that comes with a model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn, TypeGuard

from jinja2 import Template, TemplateError, TemplateSyntaxError, UndefinedError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tiny_vllm.errors import JSON_TYPES, MAX_REASON_LEN, RequestError, json_type, printable, shown

Message = Mapping[str, Any]

CALL_FIELDS = ("tool_calls", "function_call")
"""Fields of a message beside its content. A template that does not know them drops them without a word."""

OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})
"""What a request says in fields of its own."""

USE_MESSAGE = 'use {"role": "user", "content": "..."}'
USE_LIST = 'use [{"role": "user", "content": "..."}]'
USE_PART = 'use {"type": "text", "text": "..."}'
REPAIR = "repair the template, or send a prompt as text"
SHAPE_HINT = "compare roles, contents and further fields with what the model's template takes"

ROLE = re.compile("[A-Za-z0-9_ .:/-]{1,64}")
"""Some templates put the role between the parts of a control token, so it must not have parts of its own."""


TYPE_NAME = re.compile(rf"\b({'|'.join(JSON_TYPES)}|None)\b(?: object(?='))?")
"""As Python and Jinja write it: 'dict object', "NoneType"."""


class ChatTemplate:
    """A chat template, compiled when it is first used: a broken one is no obstacle to plain prompts.

    source: Jinja, with what chat templates expect: loop controls, blocks of `generation`, `raise_exception`,
    `strftime_now`, a `tojson` that does not escape HTML. It runs in a sandbox that cannot change its input.
    tool_source: the template to use when tools are given, if there is a separate one.
    special_tokens: variables of the template, for example {"bos_token": "<s>"}.
    """

    def __init__(
        self, source: str, *, tool_source: str | None = None, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self.source = source
        self.tool_source = tool_source
        self.special_tokens = dict(special_tokens or {})

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        messages: mappings with "role" and "content"; content is a string, a list of {"type": "text"} parts,
        or None beside "tool_calls". add_generation_prompt: end with the opening of the assistant's turn.
        variables: further variables of the template. Raises RequestError for messages that are malformed or
        that the template refuses, with the template's words, for what would not reach the prompt, and for a
        template that is not valid Jinja.
        """
        for name in OWN_VARIABLES & (variables or {}).keys():
            raise RequestError(f"{name} is no variable for the chat template", hint="give it on its own")
        checked = [self._check_message(place, message) for place, message in enumerate(_check_list(messages))]
        if tools is not None and not _is_list(tools):
            raise RequestError(
                f"tools is of type {json_type(tools)}, but must be a list",
                hint="write it in square brackets, even of one tool",
            )
        compiled = self._compiled
        if tools and not compiled.takes_tools:
            raise RequestError("this model's chat template takes no tools", hint="leave tools out")
        template = compiled.tool_template if tools else compiled.template
        try:
            return template.render(
                {
                    **self.special_tokens,
                    "documents": None,
                    **(variables or {}),
                    "messages": checked,
                    "tools": list(tools) if tools else None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except UndefinedError as error:
            raise RequestError(
                f"the chat template cannot render these messages: {_in_words_of_json(error)}",
                hint=SHAPE_HINT,
            ) from None
        except TemplateError as error:
            reason = printable(error.message or str(error), MAX_REASON_LEN)
            raise RequestError(
                f"the chat template refuses these messages: {reason}",
                hint="the reason is the template's own; change the messages or their order accordingly",
            ) from None
        except (
            *(TypeError, ValueError, KeyError, AttributeError, ArithmeticError, LookupError),
            *(RecursionError, MemoryError),
        ) as error:
            # The template tripped over the messages: it has no other input.
            raise RequestError(
                f"the chat template cannot render these messages: {_in_words_of_json(error)}",
                hint=SHAPE_HINT,
            ) from None

    def read_arguments(self, messages: Any) -> Any:
        """The messages, with the arguments of tool calls as objects if the template takes them so.

        OpenAI's clients send them as JSON in a text, which such a template would write as a string in JSON.
        What is no JSON object, or is malformed otherwise, stays as it is.
        """
        if not _is_list(messages) or not any(_calls(message) for message in messages):
            return messages
        if not self._compiled.wants_objects:
            return messages
        return [_with_objects(message) for message in messages]

    def _check_message(self, place: int, message: object) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise RequestError(
                f"messages[{place}] is of type {json_type(message)}, but must be an object", hint=USE_MESSAGE
            )
        # Clients send back all fields of an answer. Templates know absent ones, and would write None.
        message = {name: value for name, value in message.items() if value is not None}
        role, content = message.get("role"), message.get("content")
        for name in CALL_FIELDS:
            if message.get(name) and name not in f"{self.source}{self.tool_source}":
                raise RequestError(
                    f"messages[{place}] has {name}, which this model's chat template does not write",
                    hint="say in content what was called",
                )
        if role is None:
            raise RequestError(f"messages[{place}] has no role", hint=USE_MESSAGE)
        if not isinstance(role, str):
            raise RequestError(
                f"messages[{place}] has a role of type {json_type(role)}, but must have a string",
                hint='use "user"',
            )
        if not role:
            raise RequestError(f"messages[{place}] has role '', but needs one", hint='use "user"')
        if not ROLE.fullmatch(role):
            raise RequestError(
                f"messages[{place}] has role {shown(role)}, which is no name", hint='use "user"'
            )
        if content is None:
            if not message.get("tool_calls"):
                raise RequestError(f"messages[{place}] has no content", hint=USE_MESSAGE)
            return message
        if isinstance(content, str):
            return message
        parts = _text_parts(place, content)
        if self._compiled.wants_parts:
            return {**message, "content": parts}
        return {**message, "content": "".join(part["text"] for part in parts)}

    @cached_property
    def _compiled(self) -> _Compiled:
        environment = _environment()
        try:
            template = environment.from_string(self.source)
            tool_template = environment.from_string(self.tool_source) if self.tool_source else template
            variables = meta.find_undeclared_variables(environment.parse(self.tool_source or self.source))
        except TemplateSyntaxError as error:
            raise RequestError(
                f"this model's chat template is not valid Jinja: line {error.lineno}: "
                f"{printable(error.message or '', MAX_REASON_LEN)}",
                hint=REPAIR,
            ) from None
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            # Jinja writes Python, which has limits of its own.
            reason = error.msg if isinstance(error, SyntaxError) else str(error)
            if isinstance(error, RecursionError | MemoryError):
                reason = "it is nested too deeply"
            raise RequestError(
                f"this model's chat template cannot be compiled: {printable(reason, MAX_REASON_LEN)}",
                hint=REPAIR,
            ) from None
        return _Compiled(
            template,
            tool_template,
            takes_tools="tools" in variables,
            wants_parts=self._takes_parts(template),
            wants_objects=self._takes_objects(tool_template),
        )

    def _takes_parts(self, template: Template) -> bool:
        """Whether the template reads a list of parts; one for text only would print the list itself."""
        probe = "content-parts-probe"
        rendered = self._try(template, [{"role": "user", "content": [{"type": "text", "text": probe}]}])
        return probe in rendered and f"'{probe}'" not in rendered and f'"{probe}"' not in rendered

    def _takes_objects(self, template: Template) -> bool:
        """Whether the template writes arguments of calls from an object, and not from a text as it is."""
        key, value = "argument-key-probe", "argument-value-probe"

        def written(arguments: object) -> str:
            function = {"name": "f", "arguments": arguments}
            call = {"id": "call00000", "type": "function", "function": function}
            messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]
            return self._try(template, [messages[0], {**messages[1], "tool_calls": [call]}])

        text = json.dumps({key: value})
        rendered = written({key: value})
        return (
            text not in written(text) and key in rendered and value in rendered and f"'{key}'" not in rendered
        )

    def _try(self, template: Template, messages: Sequence[Message]) -> str:
        """Empty if the template refuses the messages."""
        try:
            return template.render(
                {**self.special_tokens, "messages": messages, "tools": None, "add_generation_prompt": True}
            )
        except Exception:
            return ""


@dataclass(frozen=True, slots=True)
class _Compiled:
    """takes_tools: whether tools reach the prompt. wants_parts: whether it reads content as parts.
    wants_objects: whether it writes arguments of tool calls from objects.
    """

    template: Template
    tool_template: Template
    takes_tools: bool
    wants_parts: bool
    wants_objects: bool


def _in_words_of_json(error: Exception) -> str:
    """What a template tripped over, for clients that may not know Python."""
    reason = printable(str(error) or type(error).__name__, MAX_REASON_LEN)
    return TYPE_NAME.sub(lambda name: JSON_TYPES.get(name[1], "null"), reason)


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _calls(message: object) -> Sequence[object]:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    return calls if _is_list(calls) else ()


def _with_objects(message: object) -> object:
    calls = _calls(message)
    if not calls or not isinstance(message, Mapping):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(arguments, str):
        return call
    try:
        # Models write nothing where a function takes nothing.
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": value}} if isinstance(value, dict) else call


def _check_list(messages: object) -> Sequence[object]:
    if not _is_list(messages):
        raise RequestError(
            f"messages is of type {json_type(messages)}, but must be a list",
            hint=USE_LIST,
        )
    if not messages:
        raise RequestError("messages is empty", hint=USE_LIST)
    return messages


def _text_parts(place: int, content: object) -> list[dict[str, str]]:
    if not _is_list(content):
        raise RequestError(
            f"messages[{place}].content is of type {json_type(content)}, "
            "but must be a string or a list of text parts",
            hint=USE_MESSAGE,
        )
    parts = []
    for part in content:
        if not isinstance(part, Mapping):
            raise RequestError(
                f"messages[{place}].content holds something of type {json_type(part)}, "
                "but must hold objects: text parts",
                hint=USE_PART,
            )
        kind = part.get("type")
        if kind is None:
            raise RequestError(f"messages[{place}].content has a part without a type", hint='use "text"')
        if kind != "text":
            name = shown(kind) if isinstance(kind, str) else json_type(kind)
            raise RequestError(
                f"messages[{place}].content has a part of type {name}, but only text is supported",
                hint=USE_PART,
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"messages[{place}].content has a text part without text", hint=USE_PART)
        parts.append({"type": "text", "text": part["text"]})
    return parts


class _Generation(Extension):
    """Marks of what the model says, for its training: `{% generation %} ... {% endgeneration %}`. No text."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(format_text: str) -> str:
    return datetime.now().strftime(format_text)
