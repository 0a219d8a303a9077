"""The nouns that travel between the layers: what a client asks, and what the engine answers.

Text never enters the engine. A `Request` holds token ids; a `TokenEvent` hands them back one at a time.
"""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Literal

from tiny_vllm.errors import SWITCH, RequestError, shown

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: dividing logits by them would overflow without changing the choice."""

MAX_BIAS = 100.0
MAX_SEED = 2**64 - 1
MAX_INTEGER = 2**63 - 1
WHOLE_NUMBER = re.compile(r"-?[0-9]{1,77}")
"""Text that stands for an integer, of as many digits as a message would show."""

VOCABULARY_HINT = "take ids from this model's own tokenizer"
LOGPROBS_HINT = "-1 is the whole vocabulary"
TEXTS_HINT = "write each text in quotes, and several in a list"
BIAS_HINT = "100 allows such tokens alone, -100 forbids them"

Pooling = Literal["mean", "last"]
"""How the final hidden states of a prompt become one vector: those of all tokens, or of the last one."""


class FinishReason(StrEnum):
    """Why a sequence ended. The first two are OpenAI's; `error` means the model gave no usable logits."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to turn logits into tokens and when to stop. Names and defaults are vLLM's.

    n: choices generated for one prompt. Each has its own random stream.
    max_tokens: most tokens to generate; None means up to the context limit; 0 only evaluates the prompt.
    min_tokens: EOS, stop tokens and stop strings have no effect before this many tokens.
    temperature: 0 (or anything under 1e-5) is greedy.
    top_p: keep the smallest set of tokens with this probability mass; 1 keeps all. The filters apply after
        temperature, in the order top_k, top_p, min_p; the most likely token always stays.
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    min_p: keep tokens with at least min_p times the highest probability; 0 keeps all.
    presence_penalty: subtracted from the logit of every token generated so far.
    frequency_penalty: subtracted once per occurrence among the generated tokens.
    repetition_penalty: divides positive and multiplies negative logits of prompt and generated tokens.
    seed: same seed, same tokens, whatever else runs. Exact in float32, and for decodes of the fused CPU step;
        elsewhere in 16-bit types the batch or a recomputation can change a logit's last bit, and with it a
        token now and then. None draws a fresh one.
    stop: string or strings that end the text. stop_token_ids: tokens that end it.
    include_stop_str_in_output: keep the stop string, or the stop token's text, in the output.
    ignore_eos: go on past the model's end-of-sequence tokens.
    bad_words: texts whose tokens may not be completed. allowed_token_ids: the only tokens permitted.
    logit_bias: token id -> value added to its logit; 100 allows such tokens alone, -100 forbids them.
    logprobs: number of most likely tokens reported per generated token beside the chosen one (None: off,
        -1: the whole vocabulary). They are those of the model, before temperature, penalties and filters.
    prompt_logprobs: the same for every prompt token but the first.
    detokenize: produce text. skip_special_tokens: leave control tokens out of it.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __new__(cls, *arguments: object, **options: object) -> SamplingParams:
        """Refuse unknown keywords as every other mistake in a request is refused."""
        for name in options:
            if name not in cls.__slots__:
                close = difflib.get_close_matches(name, cls.__slots__, n=1)
                hint = f"did you mean {close[0]}?" if close else "known: " + ", ".join(cls.__slots__)
                raise RequestError(f"unknown sampling parameter {name!r}", hint=hint)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lists()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def uses_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    def _check_numbers(self) -> None:
        _integer("n", self.n, low=1, hint="it is the number of answers to a prompt")
        _integer("max_tokens", self.max_tokens, low=0, optional=True, hint="0 only computes the prompt")
        _integer("min_tokens", self.min_tokens, low=0, hint="0 is no minimum")
        _integer("top_k", self.top_k, low=-1, hint="0 or -1 keeps every token")
        _integer(
            "seed", self.seed, low=-(2**63), high=MAX_SEED, optional=True, hint="without one, each is fresh"
        )
        _integer("logprobs", self.logprobs, low=-1, optional=True, hint=LOGPROBS_HINT)
        _integer("prompt_logprobs", self.prompt_logprobs, low=-1, optional=True, hint=LOGPROBS_HINT)
        _set(self, "temperature", _number("temperature", self.temperature, low=0.0, hint="0 is greedy"))
        _set(self, "top_p", _number("top_p", self.top_p, low=0.0, high=1.0, hint="1 keeps every token"))
        _set(self, "min_p", _number("min_p", self.min_p, low=0.0, high=1.0, hint="0 keeps every token"))
        for name in ("presence_penalty", "frequency_penalty"):
            _set(self, name, _number(name, getattr(self, name), low=-2.0, high=2.0, hint="0 is off"))
        _set(
            self,
            "repetition_penalty",
            _number("repetition_penalty", self.repetition_penalty, low=0.0, is_above=True, hint="1 is off"),
        )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens ({self.max_tokens})",
                hint="lower min_tokens or raise max_tokens",
            )
        for name in ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(
                    f"{name} is {shown(getattr(self, name))}, but must be true or false", hint=SWITCH
                )

    def _check_lists(self) -> None:
        """Normalise the collections to tuples, so that a frozen value really is one."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        _set(self, "stop", _texts("stop", stop))
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True", hint="use stop_token_ids instead")
        _set(self, "bad_words", _texts("bad_words", self.bad_words, reject_blank=True))
        _set(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        _set(self, "allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty, so no token could be chosen", hint="leave it out")
        if self.logit_bias is not None:
            _set(self, "logit_bias", _bias(self.logit_bias))


def _set(params: SamplingParams, name: str, value: object) -> None:
    object.__setattr__(params, name, value)


def _integer(
    name: str,
    value: object,
    *,
    low: int,
    high: int = MAX_INTEGER,
    optional: bool = False,
    hint: str,
) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {shown(value)}, but must be an integer", hint=hint)
    if not low <= value <= high:
        limit = f"at least {low}" if value < low and high == MAX_INTEGER else f"from {low} to {high}"
        raise RequestError(f"{name} is {shown(value)}, but must be {limit}", hint=hint)


def _number(
    name: str,
    value: object,
    *,
    low: float,
    high: float = math.inf,
    is_above: bool = False,
    hint: str,
) -> float:
    """The value as a float: an integer may be too large for a tensor's element. is_above: not low itself."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} is {shown(value)}, but must be a number", hint=hint)
    # Integers too large for a float are only ever too large; NaN fails the comparison.
    if not low <= value <= min(high, sys.float_info.max) or (is_above and value == low):
        least = f"above {low:g}" if is_above else f"of at least {low:g}"
        limit = f"a finite number {least}" if high == math.inf else f"from {low:g} to {high:g}"
        raise RequestError(f"{name} is {shown(value)}, but must be {limit}", hint=hint)
    return float(value)


def _texts(name: str, values: object, *, reject_blank: bool = False) -> tuple[str, ...] | None:
    if values is None:
        return None
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise RequestError(f"{name} is {shown(values)}, but must be a list of strings", hint=TEXTS_HINT)
    for value in values:
        if not isinstance(value, str):
            raise RequestError(f"{name} contains {shown(value)}, which is not a string", hint=TEXTS_HINT)
        if not value or (reject_blank and not value.strip()):
            raise RequestError(f"{name} contains {shown(value)}, which has no text", hint="remove it")
    return tuple(values)


def _token_ids(name: str, values: object) -> tuple[int, ...] | None:
    if values is None:
        return None
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise RequestError(
            f"{name} is {shown(values)}, but must be a list of token ids", hint=VOCABULARY_HINT
        )
    for value in values:
        _integer(f"a token id in {name}", value, low=0, hint=VOCABULARY_HINT)
    return tuple(values)


def _bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias is {shown(bias)}, but must map token ids to numbers", hint=BIAS_HINT)
    checked: dict[int, float] = {}
    for key, value in bias.items():
        # JSON objects have string keys, so "42" is how a token id arrives over HTTP.
        if isinstance(key, str) and WHOLE_NUMBER.fullmatch(key):
            key = int(key)
        _integer("a token id in logit_bias", key, low=0, hint="its keys are this model's token ids")
        if key in checked:
            raise RequestError(f"logit_bias has token id {key} twice", hint="remove one")
        checked[key] = _number(f"logit_bias[{key}]", value, low=-MAX_BIAS, high=MAX_BIAS, hint=BIAS_HINT)
    return checked


SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class Request:
    """One validated prompt on its way into the engine.

    bad_words_token_ids: the token sequences `sampling.bad_words` stands for; text layers fill it.
    priority: smaller is more urgent. cache_salt: prompts share pages only with the same salt.
    arrival_time: seconds on the engine's clock. pooling: also report the prompt's pooled hidden state; such a
    request has max_tokens=0 and n=1.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw log-probabilities at one position: the token itself first, then the most likely ones.

    ranks[i] is 1 for the most likely token of the vocabulary.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """What is known once a prompt has been computed; sent with a sequence's first event.

    prompt_logprobs: one entry per prompt token, None for the first; None if not asked for.
    pooled: hidden state after the final norm, pooled as asked: FP32 [hidden] as it lies in memory.
    """

    scheduled_time: float
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    pooled: bytes | None = None


@dataclass(slots=True)
class TokenEvent:
    """One step of one choice. Exactly one event per choice has a `finish_reason`: its last.

    token_id is None when a sequence ends without a token (abort, max_tokens=0, outgrown pool).
    stop_reason is the token of `stop_token_ids` that ended it, None for EOS.
    """

    request_id: str
    index: int
    token_id: int | None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt: PromptInfo | None = None
