"""From outputs to OpenAI's JSON: whole answers, chunks of a stream, log-probabilities in both formats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tiny_vllm.outputs import ChoiceDelta, CompletionOutput, Logprob, RequestOutput
from tiny_vllm.serving.generation import PromptUpdate
from tiny_vllm.serving.schemas import ChatBody, CompletionBody
from tiny_vllm.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have (OpenAI's choice)."""

Entries = Sequence[tuple[int, Mapping[int, Logprob] | None]]
"""Token ids with the log-probabilities at their positions."""


class Format(Protocol):
    """How one endpoint shows its answers."""

    def opening(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """Chunks sent before there is any news."""
        ...

    def chunks(
        self, outputs: Sequence[RequestOutput], updates: Sequence[PromptUpdate]
    ) -> list[dict[str, Any]]:
        """Chunks for everything that has come since the last call."""
        ...

    def usage_chunk(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The chunk after the last."""
        ...

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer to a call that is not streamed."""
        ...


@dataclass(frozen=True, slots=True)
class Heading:
    """What every part of an answer repeats. created: seconds since 1970."""

    id: str
    created: int
    model: str

    def of(self, kind: str, **values: Any) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, **values}


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Tokens of a call. A prompt counts once, however many choices it has."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_generated = sum(output.metrics.num_generated_tokens for output in outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


def merge(updates: Sequence[PromptUpdate]) -> Iterator[tuple[int, ChoiceDelta]]:
    """One delta for each choice that moved: whoever reads slowly gets fewer, longer pieces."""
    if len(updates) == 1:
        place, update = updates[0]
        yield from ((place, delta) for delta in update.deltas)
        return
    merged: dict[tuple[int, int], ChoiceDelta] = {}
    for place, update in updates:
        for delta in update.deltas:
            whole = merged.get((place, delta.index))
            if whole is None:
                merged[place, delta.index] = delta
            else:
                _append(whole, delta)
    yield from ((place, delta) for (place, _), delta in merged.items())


def _append(whole: ChoiceDelta, delta: ChoiceDelta) -> None:
    whole.text += delta.text
    whole.token_ids += delta.token_ids
    if delta.logprobs is not None:
        whole.logprobs = [*(whole.logprobs or ()), *delta.logprobs]
    whole.finish_reason = delta.finish_reason
    whole.stop_reason = delta.stop_reason


@dataclass(slots=True)
class CompletionFormat:
    """/v1/completions. text_lens: characters of the token texts reported so far, by prompt and choice."""

    body: CompletionBody
    heading: Heading
    tokenizer: Tokenizer | None
    text_lens: dict[tuple[int, int], int] = field(default_factory=dict)

    def opening(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        return []

    def chunks(
        self, outputs: Sequence[RequestOutput], updates: Sequence[PromptUpdate]
    ) -> list[dict[str, Any]]:
        chunks = []
        for place, delta in merge(updates):
            output = outputs[place]
            key = (place, delta.index)
            text, entries = delta.text, _entries(delta.token_ids, delta.logprobs)
            is_first = key not in self.text_lens
            if is_first:
                self.text_lens[key] = 0
                if self.body.echo:
                    text = self._prompt_text(output) + text
                    entries = [*self._prompt_entries(output), *entries]
            if not (text or entries or delta.finish_reason or self._shows_ids(delta)):
                continue
            choice = self._choice(place, output, delta.index, text, entries, delta.finish_reason)
            choice["stop_reason"] = delta.stop_reason
            if self.body.return_token_ids:
                choice["token_ids"] = delta.token_ids
                if is_first:
                    choice["prompt_token_ids"] = output.prompt_token_ids
            chunks.append(self._chunk([choice], outputs))
        return chunks

    def usage_chunk(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return self.heading.of("text_completion", choices=[], usage=usage(outputs))

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [
            self._whole_choice(place, output, choice)
            for place, output in enumerate(outputs)
            for choice in output.outputs
        ]
        return self.heading.of("text_completion", choices=choices, usage=usage(outputs))

    def _whole_choice(self, place: int, output: RequestOutput, made: CompletionOutput) -> dict[str, Any]:
        text, entries = made.text, _entries(made.token_ids, made.logprobs)
        if self.body.echo:
            text = self._prompt_text(output) + text
            entries = [*self._prompt_entries(output), *entries]
        choice = self._choice(place, output, made.index, text, entries, made.finish_reason)
        choice["stop_reason"] = made.stop_reason
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = _prompt_logprobs(output)
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
            choice["token_ids"] = made.token_ids
        return choice

    def _choice(
        self,
        place: int,
        output: RequestOutput,
        index: int,
        text: str,
        entries: Entries,
        finish_reason: str | None,
    ) -> dict[str, Any]:
        logprobs = None
        if self.body.logprobs is not None:
            logprobs = self._logprobs(entries, (place, index))
        return {
            "index": place * len(output.outputs) + index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _shows_ids(self, delta: ChoiceDelta) -> bool:
        return bool(self.body.return_token_ids and delta.token_ids)

    def _chunk(self, choices: list[dict[str, Any]], outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        chunk = self.heading.of("text_completion", choices=choices)
        return _with_usage(chunk, self.body, outputs)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return "" if self.tokenizer is None else self.tokenizer.decode(output.prompt_token_ids)

    def _prompt_entries(self, output: RequestOutput) -> Entries:
        if output.prompt_logprobs is None:
            return []
        return list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))

    def _logprobs(self, entries: Entries, key: tuple[int, int]) -> dict[str, Any]:
        """OpenAI's older format: parallel lists; text_offset counts the characters of the tokens before."""
        number = self.body.logprobs or 0
        as_ids = bool(self.body.return_tokens_as_token_ids)
        offset = self.text_lens.get(key, 0)
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, position in entries:
            text = self.tokenizer.token_text(token_id) if self.tokenizer is not None else None
            tokens.append(_name(token_id, text, as_ids))
            offsets.append(offset)
            offset += len(text or "")
            if position is None:
                values.append(None)
                tops.append(None)
                continue
            values.append(_finite(position[token_id].logprob))
            top: dict[str, float] = {}
            for other_id, entry in position.items():
                if other_id == token_id or _is_asked_for(entry, number):
                    top.setdefault(_name(other_id, entry.decoded_token, as_ids), _finite(entry.logprob))
            tops.append(top)
        self.text_lens[key] = offset
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """/v1/chat/completions."""

    body: ChatBody
    heading: Heading
    tokenizer: Tokenizer | None

    def opening(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """Who speaks, for each choice."""
        (output,) = outputs
        chunks = []
        for made in output.outputs:
            delta = {"role": "assistant", "content": ""}
            choice: dict[str, Any] = {
                "index": made.index,
                "delta": delta,
                "logprobs": None,
                "finish_reason": None,
            }
            if self.body.return_token_ids:
                choice["prompt_token_ids"] = output.prompt_token_ids
            chunks.append(self._chunk([choice], outputs))
        return chunks

    def chunks(
        self, outputs: Sequence[RequestOutput], updates: Sequence[PromptUpdate]
    ) -> list[dict[str, Any]]:
        chunks = []
        for _, delta in merge(updates):
            shows_ids = self.body.return_token_ids and delta.token_ids
            if not (delta.text or delta.logprobs or delta.finish_reason or shows_ids):
                continue
            choice: dict[str, Any] = {
                "index": delta.index,
                "delta": {"content": delta.text} if delta.text else {},
                "logprobs": self._logprobs(delta.token_ids, delta.logprobs),
                "finish_reason": delta.finish_reason,
            }
            if delta.finish_reason is not None:
                choice["stop_reason"] = delta.stop_reason
            if self.body.return_token_ids:
                choice["token_ids"] = delta.token_ids
            chunks.append(self._chunk([choice], outputs))
        return chunks

    def usage_chunk(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return self.heading.of("chat.completion.chunk", choices=[], usage=usage(outputs))

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        choices = []
        for made in output.outputs:
            message = {"role": "assistant", "content": made.text, "refusal": None}
            choice: dict[str, Any] = {
                "index": made.index,
                "message": message,
                "logprobs": self._logprobs(made.token_ids, made.logprobs),
                "finish_reason": made.finish_reason,
                "stop_reason": made.stop_reason,
            }
            if self.body.return_token_ids:
                choice["token_ids"] = made.token_ids
            choices.append(choice)
        answer = self.heading.of("chat.completion", choices=choices, usage=usage(outputs))
        if self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = _prompt_logprobs(output)
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        return answer

    def _chunk(self, choices: list[dict[str, Any]], outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return _with_usage(self.heading.of("chat.completion.chunk", choices=choices), self.body, outputs)

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]] | None
    ) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        content = []
        for token_id, position in _entries(token_ids, logprobs):
            assert position is not None
            tops = sorted(position.items(), key=lambda item: item[1].rank)
            content.append(
                {
                    **self._token(token_id, position[token_id]),
                    "top_logprobs": [
                        self._token(other_id, entry)
                        for other_id, entry in tops
                        if _is_asked_for(entry, self.body.top_logprobs or 0)
                    ],
                }
            )
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, entry: Logprob) -> dict[str, Any]:
        name = _name(token_id, entry.decoded_token, bool(self.body.return_tokens_as_token_ids))
        bytes_ = [] if self.tokenizer is None else list(self.tokenizer.token_bytes(token_id))
        return {"token": name, "logprob": _finite(entry.logprob), "bytes": bytes_}


def _with_usage(
    chunk: dict[str, Any], body: CompletionBody | ChatBody, outputs: Sequence[RequestOutput]
) -> dict[str, Any]:
    """Streams that end with the usage say null before, unless the client wants it all the time."""
    options = body.stream_options
    if options is not None and (options.include_usage or options.continuous_usage_stats):
        chunk["usage"] = usage(outputs) if options.continuous_usage_stats else None
    return chunk


def _is_asked_for(entry: Logprob, number: int) -> bool:
    """Whether an entry is among the `number` most likely ones; -1 means all of them."""
    return number < 0 or entry.rank <= number


def _entries(token_ids: Sequence[int], logprobs: Iterable[Mapping[int, Logprob]] | None) -> Entries:
    return [] if logprobs is None else list(zip(token_ids, logprobs, strict=True))


def _prompt_logprobs(output: RequestOutput) -> list[dict[str, Any] | None] | None:
    """vLLM's format: for each prompt token but the first, token id to its entry."""
    if output.prompt_logprobs is None:
        return None
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": _finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in position.items()
        }
        for position in output.prompt_logprobs
    ]


def _name(token_id: int, text: str | None, as_id: bool) -> str:
    return f"token_id:{token_id}" if as_id or text is None else text


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB) if math.isfinite(logprob) else LOWEST_LOGPROB
