"""Request bodies. Types are checked here, values by SamplingParams, RequestBuilder and ChatTemplate.

null means the default everywhere, as in OpenAI's API.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from tiny_vllm.serving.errors import shown
from tiny_vllm.serving.parameters import check_unsupported
from tiny_vllm.serving.schema_errors import schema_error
from tiny_vllm.text.chat_template import ROLE
from tiny_vllm.text.request_builder import MAX_PRIORITY, MIN_PRIORITY
from tiny_vllm.types import SAMPLING_FIELDS, Pooling

TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}


def whole(value: Any) -> Any:
    """A number as an integer if it is one: JSON has one kind of number, and some clients write 2 as 2.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def whole_numbers(values: Any) -> Any:
    """The same for the entries of a list."""
    return list(map(whole, values)) if isinstance(values, list) and float in map(type, values) else values


def text_or_texts(value: Any) -> Any:
    """Raises one error, where the union of both types would have one of each."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("texts", "Input should be a string or a list of strings")
    for place, entry in enumerate(value):
        if not isinstance(entry, str):
            found = {"place": place, "found": shown(entry)}
            raise PydanticCustomError("text_entry", "entry {place} is no string, but {found}", found)
    return value


Integer = Annotated[int, BeforeValidator(whole)]
# One fault is enough: a million wrong entries must not become a million error objects.
Texts = Annotated[list[str], Field(fail_fast=True)]
Ids = Annotated[list[int], Field(fail_fast=True), BeforeValidator(whole_numbers)]

# Their schemas are of this server's limits: see openapi.
PromptField = Annotated[Any, WithJsonSchema({})]
BiasField = Annotated[Any, WithJsonSchema({})]
MessagesField = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {
                    "role": {"type": "string", "pattern": f"^{ROLE.pattern}$"},
                    "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART}]},
                },
            },
        }
    ),
]


def _documented(low: int, high: Integer | None = None, *, description: str | None = None) -> Any:
    """A field whose range the OpenAPI document tells; SamplingParams and RequestBuilder check it."""
    limits: dict[str, Any] = {"minimum": low} if high is None else {"minimum": low, "maximum": high}
    return Field(None, description=description, json_schema_extra=limits)


class Body(BaseModel):
    """A request body. allow_inf_nan: JSON has no such numbers, but some parsers take them."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    # What errors call a prompt.
    PROMPT_NAME: ClassVar[str] = "prompt"

    model: str | None = Field(None, description="one of /v1/models; the served model if left out")

    def check_extras(self) -> None:
        """Raises ApiError for parameters that are unknown or cannot be honoured."""
        if not self.model_extra:
            return
        elsewhere = {name for body in BODIES for name in body.model_fields}
        check_unsupported(self.model_extra, type(self).model_fields, elsewhere)


ADD_SPECIAL = "begin text prompts with BOS (default: true)"
OPEN_TURN = "open the assistant's turn (default: true)"
PARSE_SPECIAL = "take control tokens that the client writes as such (default: in prompts, not in messages)"


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = Field(None, description="end with a chunk that carries the usage")
    continuous_usage_stats: bool | None = Field(None, description="usage so far in every chunk")
    include_obfuscation: bool | None = Field(None, description="accepted; there is none")


class RequestBody(Body):
    """What all endpoints share that have the engine compute something."""

    priority: Integer | None = _documented(
        MIN_PRIORITY,
        MAX_PRIORITY,
        description="smaller is more urgent; also the header X-Priority; default 0",
    )
    cache_salt: str | None = Field(None, description="share cached prefixes only under the same salt")
    request_id: str | None = Field(
        None, max_length=128, description="part of the answer's id; need not be unique"
    )
    parse_special_tokens: bool | None = Field(None, description=PARSE_SPECIAL)


class GenerationBody(RequestBody):
    """What both generating endpoints share. Fields without a description are those of SamplingParams."""

    # Fields that are renamed or combined before they become sampling parameters.
    SPECIAL: ClassVar[frozenset[str]] = frozenset({"max_tokens", "logprobs", "detokenize"})

    n: Integer | None = _documented(1, description="choices per prompt")
    max_tokens: Integer | None = _documented(0, description="most tokens per choice")
    min_tokens: Integer | None = _documented(0)
    temperature: float | None = _documented(0)
    top_p: float | None = _documented(0, 1)
    top_k: Integer | None = _documented(-1)
    min_p: float | None = _documented(0, 1)
    presence_penalty: float | None = _documented(-2, 2)
    frequency_penalty: float | None = _documented(-2, 2)
    repetition_penalty: float | None = Field(None, json_schema_extra={"exclusiveMinimum": 0})
    seed: Integer | None = _documented(-(2**63), 2**64 - 1)
    stop: Annotated[str | list[str] | None, BeforeValidator(text_or_texts)] = None
    stop_token_ids: Ids | None = Field(None, description="tokens that end the text")
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: Texts | None = None
    allowed_token_ids: Ids | None = None
    logit_bias: BiasField = None
    prompt_logprobs: Integer | None = _documented(
        -1, description="log-probabilities of this many tokens at every prompt token but the first"
    )
    skip_special_tokens: bool | None = Field(None, description="leave control tokens out of the text")

    stream: bool | None = Field(None, description="send server-sent events as text is generated")
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="add token ids to prompts and choices")
    return_tokens_as_token_ids: bool | None = Field(None, description="name tokens token_id:N in logprobs")

    def sampling_options(self) -> dict[str, Any]:
        """The sampling parameters that were given, under their own names."""
        names = [name for name in SAMPLING_FIELDS if name not in self.SPECIAL]
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class CompletionBody(GenerationBody):
    """Body of /v1/completions."""

    prompt: PromptField = Field(description="text, token ids, or a list of either")
    echo: bool | None = Field(None, description="begin the text with the prompt")
    logprobs: Integer | None = _documented(
        -1, description="log-probabilities of this many tokens per position"
    )
    add_special_tokens: bool | None = Field(None, description=ADD_SPECIAL)


class ChatBody(GenerationBody):
    """Body of /v1/chat/completions."""

    PROMPT_NAME = "messages"

    messages: MessagesField
    max_completion_tokens: Integer | None = _documented(0, description="most tokens per choice")
    logprobs: bool | None = Field(None, description="in a chat, yes or no")
    top_logprobs: Integer | None = _documented(-1, description="of this many tokens per position")
    add_generation_prompt: bool | None = Field(None, description=OPEN_TURN)
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables of the chat template")


class EmbeddingBody(RequestBody):
    """Body of /v1/embeddings."""

    PROMPT_NAME = "input"

    input: PromptField = Field(description="text, token ids, or a list of either")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: of FP32 values, little-endian (default: float)"
    )
    dimensions: Integer | None = _documented(
        1, description="keep the first so many values, for models trained for it"
    )
    pooling: Pooling | None = Field(
        None, description="mean over all tokens, or the last one (default: the server's --pooling)"
    )
    normalize: bool | None = Field(None, description="to length 1 (default: true)")
    add_special_tokens: bool | None = Field(None, description=ADD_SPECIAL)


class TokenizeBody(Body):
    """Body of /tokenize: either prompt or messages."""

    # RequestMaker checks it: a list is a prompt elsewhere, so more is said than that the type is wrong.
    prompt: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "null"}]})] = None
    messages: MessagesField = None
    add_special_tokens: bool | None = Field(None, description=ADD_SPECIAL)
    add_generation_prompt: bool | None = Field(None, description=OPEN_TURN)
    chat_template_kwargs: dict[str, Any] | None = None
    parse_special_tokens: bool | None = Field(None, description=PARSE_SPECIAL)
    return_token_strs: bool | None = Field(None, description="add each token's text")


class DetokenizeBody(Body):
    """Body of /detokenize."""

    tokens: Ids


BODIES: tuple[type[Body], ...] = (CompletionBody, ChatBody, EmbeddingBody, TokenizeBody, DetokenizeBody)
AnyBody = TypeVar("AnyBody", bound=Body)


@contextmanager
def _without_collector() -> Iterator[None]:
    """A million lists in a body make it look for garbage again and again: four times as slow, for nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def parse_body(body_class: type[AnyBody], data: bytes) -> AnyBody:
    """A body from JSON text. Raises ApiError for text that is no JSON and for wrong types and names."""
    try:
        with _without_collector():
            body = body_class.model_validate_json(data)
    except ValidationError as error:
        raise schema_error(error, StreamOptions.model_fields) from None
    body.check_extras()
    return body
