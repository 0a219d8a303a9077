"""From request bodies to prepared requests: prompts, sampling parameters, and the limits of this server."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tiny_vllm.errors import RequestError, printable
from tiny_vllm.serving.errors import ApiError, shown
from tiny_vllm.serving.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    GenerationBody,
    RequestBody,
    TokenizeBody,
    whole_numbers,
)
from tiny_vllm.text.request_builder import IDS_HINT, VOCABULARY_HINT, PreparedRequest, RequestBuilder
from tiny_vllm.text.tokenizer import Tokenizer
from tiny_vllm.types import Pooling, Request, SamplingParams

LONG_TEXT = 2_000
TOKENIZER_HINT = "start the server with --tokenizer"
USE_BIAS = 'use {"42": -100}'


MAX_LIST_ENTRIES = 1 << 20
"""Token ids in lists that go to the engine with every prompt of a call."""


@dataclass(frozen=True, slots=True)
class Call:
    """What is known of a call beside its body.

    call_id: unique; the engine's request ids are made from it. priority: from a header. salt: of the tenant.
    arrival_time: seconds on the monotonic clock.
    """

    call_id: str
    priority: int | None
    salt: str | None
    arrival_time: float


@dataclass(frozen=True, slots=True)
class RequestMaker:
    """Makes requests for one model. tokenizer: None for a model without one.

    sampling_defaults: of the model, for parameters that a request leaves out.
    """

    builder: RequestBuilder
    tokenizer: Tokenizer | None
    max_prompts: int
    max_stop_strings: int
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)

    def completion(self, body: CompletionBody, call: Call) -> list[PreparedRequest]:
        """One request per prompt. Raises ApiError or RequestError."""
        options = self._sampling_options(body)
        if body.max_tokens is not None:
            options["max_tokens"] = body.max_tokens
        if body.logprobs is not None:
            options["logprobs"] = body.logprobs
            if body.echo:
                numbers = (body.logprobs, body.prompt_logprobs or 0)
                options["prompt_logprobs"] = -1 if -1 in numbers else max(numbers)
        params = SamplingParams(**options)
        requests: list[PreparedRequest] = []
        prompts = self._prompts("prompt", body.prompt)
        for place, prompt in enumerate(prompts):
            with _naming_prompt("prompt", place, len(prompts)):
                token_ids = self._token_ids(prompt, body, self.builder.max_model_len)
                prepared = self.builder.build(token_ids, params, **self._options(body, call, place))
            if place == 0:
                _check_lists(prepared.request, len(prompts))
            requests.append(_with_text(prepared, prompt))
        return requests

    def embeddings(self, body: EmbeddingBody, pooling: Pooling, call: Call) -> list[PreparedRequest]:
        """One request per prompt. Raises ApiError or RequestError."""
        requests = []
        prompts = self._prompts("input", body.input)
        for place, prompt in enumerate(prompts):
            options = self._options(body, call, place)
            with _naming_prompt("input", place, len(prompts)):
                token_ids = self._token_ids(prompt, body, self.builder.max_model_len)
                prepared = self.builder.build_embedding(token_ids, pooling, **options)
            requests.append(_with_text(prepared, prompt))
        return requests

    def chat(self, body: ChatBody, call: Call) -> list[PreparedRequest]:
        """One request for a conversation. Raises ApiError or RequestError."""
        options = self._sampling_options(body)
        given = {"max_tokens": body.max_tokens, "max_completion_tokens": body.max_completion_tokens}
        limits = {name: limit for name, limit in given.items() if limit is not None}
        limit_name = min(limits, key=limits.__getitem__, default="max_tokens")
        # Without a limit, an answer may fill the context.
        options["max_tokens"] = limits.get(limit_name, self.sampling_defaults.get("max_tokens"))
        if body.logprobs:
            options["logprobs"] = body.top_logprobs or 0
        elif body.top_logprobs is not None:
            raise ApiError(
                400,
                "top_logprobs needs logprobs: true\nhint: add it, or leave out both",
                param="top_logprobs",
            )
        generates = body.add_generation_prompt is not False
        with _renaming({"max_tokens": limit_name, "logprobs": "top_logprobs"}):
            params = SamplingParams(**options)
            prepared = self.builder.build_chat(
                body.messages,
                params,
                add_generation_prompt=generates,
                template_variables=body.chat_template_kwargs,
                parse_special_tokens=body.parse_special_tokens is True,
                **self._options(body, call, 0),
            )
        return [prepared]

    def tokens(self, body: TokenizeBody) -> list[int]:
        """The ids of /tokenize. Raises ApiError or RequestError."""
        tokenizer = self._need_tokenizer(TOKENIZER_HINT)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(
                400,
                "give either prompt or messages\nhint: leave one of them out, and not the other",
                param="prompt",
            )
        given, useless = "prompt", ["add_generation_prompt", "chat_template_kwargs"]
        if body.prompt is None:
            given, useless = "messages", ["add_special_tokens"]
        for name in useless:
            if getattr(body, name):
                raise ApiError(400, f"{name} has no meaning beside {given}\nhint: leave it out", param=name)
        if body.prompt is not None:
            if not isinstance(body.prompt, str):
                raise ApiError(
                    400,
                    f"prompt must be a string, not {shown(body.prompt)}\n"
                    "hint: send one text; token ids are tokens already",
                    param="prompt",
                )
            return self._token_ids(body.prompt, body)
        _, token_ids = tokenizer.encode_messages(
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=body.chat_template_kwargs,
            parse_special_tokens=body.parse_special_tokens is True,
        )
        return token_ids

    def text(self, body: DetokenizeBody) -> str:
        """The text of /detokenize, special tokens included. Raises RequestError."""
        tokenizer = self._need_tokenizer(TOKENIZER_HINT)
        unknown = [token_id for token_id in body.tokens if not 0 <= token_id < tokenizer.vocab_size]
        if unknown:
            raise RequestError(
                f"tokens has id {shown(unknown[0])}, but the ids are 0 to {tokenizer.vocab_size - 1}",
                hint=VOCABULARY_HINT,
            )
        return tokenizer.decode(body.tokens, skip_special_tokens=False)

    def _sampling_options(self, body: GenerationBody) -> dict[str, Any]:
        options = {**self.sampling_defaults, **body.sampling_options()}
        _check_bias(body.logit_bias)
        if body.stream_options is not None and not body.stream:
            raise ApiError(
                400,
                "stream_options needs stream: true\nhint: add it, or leave out both",
                param="stream_options",
            )
        if body.stream and body.prompt_logprobs is not None:
            raise ApiError(
                400, "prompt_logprobs cannot be streamed\nhint: use stream: false", param="prompt_logprobs"
            )
        stops = options.get("stop")
        if isinstance(stops, list) and len(stops) > self.max_stop_strings:
            raise ApiError(
                400,
                f"stop has {len(stops)} entries, but must have at most {self.max_stop_strings}\n"
                "hint: the limit is the server option max_stop_strings",
                param="stop",
            )
        return options

    def _token_ids(
        self,
        prompt: str | list[int],
        body: CompletionBody | EmbeddingBody | TokenizeBody,
        context_len: int | None = None,
    ) -> list[int]:
        """Of a client's own, the builder looks whether the model has them."""
        if not isinstance(prompt, str):
            token_ids = whole_numbers(prompt)
            if not set(map(type, token_ids)) <= {int}:
                wrong = next(item for item in token_ids if type(item) is not int)
                raise RequestError(
                    f"the prompt contains {shown(wrong)}, which is not a token id", hint=IDS_HINT
                )
            return token_ids
        return self._need_tokenizer(f"send {body.PROMPT_NAME} as a list of token ids").encode(
            prompt,
            add_special_tokens=body.add_special_tokens is not False,
            parse_special_tokens=body.parse_special_tokens is not False,
            context_len=context_len,
        )

    def _options(self, body: RequestBody, call: Call, place: int) -> Mapping[str, Any]:
        priority = body.priority if body.priority is not None else call.priority
        return {
            "request_id": f"{call.call_id}-{place}",
            "priority": 0 if priority is None else priority,
            "cache_salt": _joined_salt(call.salt, body.cache_salt),
            "arrival_time": call.arrival_time,
        }

    def _prompts(self, name: str, value: Any) -> list[str | list[int]]:
        """The prompts in a parameter: text, ids, or a list of either."""
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list):
            raise ApiError(
                400,
                f"{name} must be a string, token ids, or a list of either, not {shown(value)}\n"
                "hint: write a text in quotes",
                param=name,
            )
        if not any(isinstance(item, str | list) for item in value):
            return [value]  # the token ids of one prompt
        for item in value:
            if isinstance(item, int) and not isinstance(item, bool):
                raise ApiError(
                    400, f"{name} mixes token ids with prompts\nhint: put the ids into a list", param=name
                )
            if not isinstance(item, str | list):
                raise ApiError(
                    400,
                    f"{name} holds {shown(item)}, but must hold strings or lists of token ids\n"
                    "hint: write each text in quotes",
                    param=name,
                )
        if len(value) > self.max_prompts:
            raise ApiError(
                400,
                f"there are {len(value)} prompts, but at most {self.max_prompts} are allowed\n"
                "hint: the limit is the server option max_prompts",
                param=name,
            )
        return value

    def _need_tokenizer(self, hint: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer", hint=hint)
        return self.tokenizer


@contextmanager
def _naming_prompt(name: str, place: int, num_prompts: int) -> Iterator[None]:
    """Has errors say which of a call's prompts is wrong."""
    try:
        yield
    except RequestError as error:
        what, found, fault = error.message.partition("the prompt ")
        if num_prompts == 1 or what or not found:
            raise
        raise type(error)(f"{name}[{place}] {fault}", hint=error.hint) from None


@contextmanager
def _renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Has errors call sampling parameters what the client calls them."""

    def renamed(text: str) -> str:
        # What is quoted is the client's.
        return re.sub(r"'[^']*'|\"[^\"]*\"|\w+", lambda word: names.get(word[0], word[0]), text)

    try:
        yield
    except RequestError as error:
        hint = None if error.hint is None else renamed(error.hint)
        raise type(error)(renamed(error.message), hint=hint) from None


def _with_text(prepared: PreparedRequest, prompt: str | list[int]) -> PreparedRequest:
    """The same, with the prompt as the client wrote it."""
    return PreparedRequest(prepared.request, prompt if isinstance(prompt, str) else None)


def _check_bias(bias: Any) -> None:
    """Raises RequestError for wrong types, in the words of JSON. SamplingParams looks at the rest."""
    if bias is None:
        return
    if not isinstance(bias, dict):
        raise RequestError(f"logit_bias is {shown(bias)}, but must map token ids to numbers", hint=USE_BIAS)
    for token_id, value in bias.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestError(
                f"logit_bias[{printable(token_id)}] is {shown(value)}, but must be a number",
                hint=USE_BIAS,
            )


def _check_lists(request: Request, num_prompts: int) -> None:
    """Raises ApiError if a call's prompts together carry too many copies of its lists of token ids."""
    sampling = request.sampling
    lists = (sampling.stop_token_ids, sampling.allowed_token_ids, sampling.logit_bias)
    num_entries = sum(len(ids) for ids in (*lists, *request.bad_words_token_ids) if ids is not None)
    if num_prompts > 1 and num_prompts * num_entries > MAX_LIST_ENTRIES:
        raise ApiError(
            400,
            f"lists of {num_entries} token ids for each of {num_prompts} prompts are more than "
            f"{MAX_LIST_ENTRIES} in all\nhint: send fewer prompts at once",
            param="prompt",
        )


def _joined_salt(tenant: str | None, request: str | None) -> str | None:
    """One salt out of two, such that no tenant can come up with another's."""
    if tenant is None:
        return request
    return f"{tenant}:{request or ''}"


def tenant_salt(api_key: str) -> str:
    """A salt that stands for a key without giving it away."""
    return hashlib.sha256(b"tenant" + api_key.encode()).hexdigest()


def is_long(*prompts: Any) -> bool:
    """Whether prompts or conversations have so many characters and ids that tokenising them takes long."""
    amount, waiting = 0, list(prompts)
    while waiting:
        item = waiting.pop()
        if not isinstance(item, str | list | dict):
            continue
        amount += len(item)
        if amount > LONG_TEXT:
            return True
        if not isinstance(item, str):
            waiting.extend(item.values() if isinstance(item, dict) else item)
    return False
