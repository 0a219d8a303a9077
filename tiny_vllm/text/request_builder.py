"""From what a client sends to a Request: everything about it that needs the model is checked here, once."""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

import numpy as np

from tiny_vllm.errors import PromptTooLong, RequestError, shown
from tiny_vllm.text.chat_template import Message
from tiny_vllm.text.tokenizer import Tokenizer
from tiny_vllm.types import VOCABULARY_HINT, Pooling, Request, SamplingParams

Prompt = str | Sequence[SupportsIndex]

MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
IDS_HINT = "token ids are whole numbers; text comes as one string"
TEXT_HINT = "leave it out, or give some text"
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LEN = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_LEN = 1024
MAX_BAD_WORDS_LEN = 16_384
"""Characters of all bad words: their tokens are looked for after every token."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request for the engine, and its prompt as text where the client gave text or messages."""

    request: Request
    prompt: str | None


class RequestBuilder:
    """Tokenises and validates prompts for one model.

    tokenizer: None for a model without one; it takes token ids only. vocab_size: rows of the model's
    embedding. max_model_len: most tokens of prompt plus output. max_logprobs: most logprobs per token, -1
    for no limit. max_n: most choices. ids_hint: how its callers give ids where a model has no tokenizer.
    Every method raises RequestError for what cannot be done.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        max_logprobs: int = 20,
        max_n: int = 128,
        ids_hint: str = "give token ids",
    ) -> None:
        self._tokenizer = tokenizer
        self._ids_hint = ids_hint
        self._vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._max_logprobs = max_logprobs
        self._max_n = max_n
        self._numbers = itertools.count()
        self._last_bad_words: tuple[Sequence[str], tuple[tuple[int, ...], ...]] = ((), ())

    def build(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
        parse_special_tokens: bool = True,
    ) -> PreparedRequest:
        """A request for a prompt given as text or as token ids.

        Text gets the tokenizer's special tokens (see Tokenizer.encode); token ids are taken as they are. An
        empty prompt stands for the BOS token, if the tokenizer adds one. max_tokens is lowered to what fits
        the context. request_id: made up if None. arrival_time: seconds on the monotonic clock, now if None.
        """
        token_ids: Sequence[int]
        if isinstance(prompt, str):
            tokenizer = self._need_tokenizer("a prompt of text", self._ids_hint)
            token_ids = tokenizer.encode(
                prompt, parse_special_tokens=parse_special_tokens, context_len=self.max_model_len
            )
        else:
            token_ids = self._check_prompt_ids(prompt)
        text = prompt if isinstance(prompt, str) else None
        return self._finish(token_ids, text, sampling, request_id, priority, cache_salt, arrival_time)

    def build_chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
        parse_special_tokens: bool = False,
    ) -> PreparedRequest:
        """A request for a conversation, rendered by the model's chat template (see ChatTemplate.render).

        parse_special_tokens: see Tokenizer.encode_messages.
        """
        tokenizer = self._need_tokenizer("a conversation", self._ids_hint)
        text, token_ids = tokenizer.encode_messages(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables=template_variables,
            parse_special_tokens=parse_special_tokens,
            context_len=self.max_model_len,
        )
        return self._finish(token_ids, text, sampling, request_id, priority, cache_salt, arrival_time)

    def build_embedding(self, prompt: Prompt, pooling: Pooling, **options: Any) -> PreparedRequest:
        """A request for a prompt's pooled hidden state. options: as for `build`."""
        prepared = self.build(prompt, SamplingParams(max_tokens=0, detokenize=False), **options)
        return PreparedRequest(replace(prepared.request, pooling=pooling), prepared.prompt)

    def _finish(
        self,
        token_ids: Sequence[int],
        text: str | None,
        sampling: SamplingParams,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
        arrival_time: float | None,
    ) -> PreparedRequest:
        _check_options(request_id, priority, cache_salt)
        if not isinstance(sampling, SamplingParams):
            raise RequestError(
                f"sampling parameters are of type {type(sampling).__name__}, but must be SamplingParams",
                hint="write SamplingParams(temperature=0), with what you want to set",
            )
        self._check_sampling(sampling)
        if not token_ids:
            raise RequestError(
                "the prompt is empty, and this model's tokenizer adds no BOS token", hint="send some text"
            )
        self._check_range("the prompt", token_ids)
        request = Request(
            request_id=f"request-{next(self._numbers)}" if request_id is None else request_id,
            prompt_token_ids=tuple(token_ids),
            sampling=self._fit_context(sampling, len(token_ids)),
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            priority=priority,
            cache_salt=cache_salt,
            bad_words_token_ids=self._resolve_bad_words(sampling.bad_words or ()),
        )
        return PreparedRequest(request, text)

    def _check_prompt_ids(self, prompt: object) -> tuple[int, ...]:
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()  # numpy arrays and torch tensors
        if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
            raise RequestError(
                f"the prompt is of type {type(prompt).__name__}, but must be text or a list of token ids",
                hint=IDS_HINT,
            )
        ids = tuple(prompt)
        if not set(map(type, ids)) <= {int}:  # told without looking at each id in Python
            ids = tuple([_token_id(value) for value in ids])
        tokenizer = self._tokenizer
        if not ids and tokenizer is not None and tokenizer.adds_bos and tokenizer.bos_token_id is not None:
            return (tokenizer.bos_token_id,)
        return ids

    def _check_range(self, what: str, token_ids: Collection[int]) -> None:
        """Raises RequestError naming the first id that the model does not have."""
        if self._are_in_vocabulary(token_ids):
            return
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < self._vocab_size)
        raise RequestError(
            f"{what} has token id {shown(wrong)}, but this model's ids are 0 to {self._vocab_size - 1}",
            hint=VOCABULARY_HINT,
        )

    def _are_in_vocabulary(self, token_ids: Collection[int]) -> bool:
        try:
            values = np.fromiter(token_ids, np.int64, len(token_ids))
        except OverflowError:
            return False
        return not len(values) or bool(values.min() >= 0 and values.max() < self._vocab_size)

    def _check_sampling(self, sampling: SamplingParams) -> None:
        if sampling.n > self._max_n:
            raise RequestError(
                f"n is {sampling.n}, but must be at most {self._max_n}",
                hint="the limit is the engine option max_n",
            )
        self._check_num_logprobs("logprobs", sampling.logprobs)
        self._check_num_logprobs("prompt_logprobs", sampling.prompt_logprobs)
        if sampling.stop_strings:
            self._need_tokenizer("a stop string", "use stop_token_ids")
        _check_texts("stop", sampling.stop_strings, MAX_STOP_STRINGS, MAX_STOP_STRING_LEN)
        bad_words = sampling.bad_words or ()
        _check_texts("bad_words", bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_LEN)
        num_characters = sum(map(len, bad_words))
        if num_characters > MAX_BAD_WORDS_LEN:
            raise RequestError(
                f"bad_words has {num_characters} characters in all, but the limit is {MAX_BAD_WORDS_LEN}",
                hint="send fewer or shorter words",
            )
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            token_ids = getattr(sampling, name) or ()
            if len(token_ids) > self._vocab_size:
                raise RequestError(
                    f"{name} has {len(token_ids)} entries, more than the vocabulary ({self._vocab_size})",
                    hint="name each token once",
                )
            self._check_range(name, token_ids)

    def _check_num_logprobs(self, name: str, number: int | None) -> None:
        if number is None:
            return
        limit = self._max_logprobs
        if number == -1 and limit != -1:
            raise RequestError(
                f"{name} is -1, the whole vocabulary, but at most {limit} are allowed",
                hint="the limit is the engine option max_logprobs",
            )
        if limit == -1 or limit > self._vocab_size:
            limit = self._vocab_size
        if number > limit:
            raise RequestError(
                f"{name} is {number}, but must be at most {limit}",
                hint="the limits are the engine option max_logprobs and the vocabulary",
            )

    def _fit_context(self, sampling: SamplingParams, prompt_len: int) -> SamplingParams:
        """The same parameters with max_tokens set to at most what the context leaves."""
        limit = self.max_model_len
        room = limit - prompt_len
        if room <= 0:
            raise PromptTooLong.for_context(f"{prompt_len} tokens", limit)
        max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        if sampling.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens is {sampling.min_tokens}, but {prompt_len} prompt tokens leave room for {room}",
                hint="lower min_tokens or shorten the prompt",
            )
        return sampling if max_tokens == sampling.max_tokens else replace(sampling, max_tokens=max_tokens)

    def _resolve_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of each word, as the start of a word and as the continuation of one."""
        if not words:
            return ()
        known_words, known = self._last_bad_words  # read once: threads share this
        if known_words == words:  # as all prompts of a call have them
            return known
        tokenizer = self._need_tokenizer("bad_words", "use logit_bias")
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            for token_ids in tokenizer.encode_word(word.lstrip()):
                if not token_ids:
                    raise RequestError(
                        f"bad_words contains {shown(word)}, which this tokenizer cannot express",
                        hint="remove it: no token could complete it",
                    )
                self._check_range(f"bad word {shown(word)}", token_ids)
                sequences[tuple(token_ids)] = None
        found = tuple(sequences)
        self._last_bad_words = words, found
        return found

    def _need_tokenizer(self, what: str, hint: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(f"{what} needs a tokenizer, and this model has none", hint=hint)
        return self._tokenizer


def _check_options(request_id: object, priority: object, cache_salt: object) -> None:
    if request_id is not None and (not isinstance(request_id, str) or not request_id):
        raise RequestError(
            f"request_id is {shown(request_id)}, but must be a string with text", hint=TEXT_HINT
        )
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestError(
            f"priority is {shown(priority)}, but must be an integer", hint="smaller is more urgent"
        )
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise RequestError(
            f"priority is {shown(priority)}, but must be between {MIN_PRIORITY} and {MAX_PRIORITY}",
            hint="smaller is more urgent",
        )
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        raise RequestError(
            f"cache_salt is {shown(cache_salt)}, but must be a string with text", hint=TEXT_HINT
        )


def _token_id(value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise RequestError(
            f"the prompt contains {shown(value)}, which is not a token id", hint=IDS_HINT
        ) from None


def _check_texts(name: str, texts: Sequence[str], max_number: int, max_characters: int) -> None:
    if len(texts) > max_number:
        raise RequestError(
            f"{name} has {len(texts)} entries, but must have at most {max_number}", hint="send fewer"
        )
    for text in texts:
        if len(text) > max_characters:
            raise RequestError(
                f"{name} has an entry of {len(text)} characters, but the limit is {max_characters}",
                hint="shorten it",
            )
