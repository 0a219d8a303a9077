"""What the formats of answers share: shape, heading, usage, and the joining of what a slow reader missed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tiny_vllm.outputs import ChoiceDelta, RequestOutput
from tiny_vllm.serving.generation import PromptUpdate
from tiny_vllm.serving.schemas import GenerationBody


class Format(Protocol):
    """How one endpoint shows its answers."""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer to a call that is not streamed."""
        ...


class StreamFormat(Format, Protocol):
    """How an endpoint that can stream shows them."""

    @property
    def is_plain(self) -> bool:
        """Whether chunks that bring a choice's text differ in nothing but that text."""
        ...

    def opening(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """Chunks sent before there is any news."""
        ...

    def chunks(
        self, outputs: Sequence[RequestOutput], updates: Sequence[PromptUpdate]
    ) -> list[dict[str, Any]]:
        """Chunks for everything that has come since the last call."""
        ...

    def closing(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """Chunks sent after the last news."""
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


def is_plain(body: GenerationBody) -> bool:
    """Whether none of the options that endpoints share makes each chunk another, but for its text."""
    counts = body.stream_options is not None and body.stream_options.continuous_usage_stats
    return not (counts or body.return_token_ids)


def with_usage(
    chunk: dict[str, Any], body: GenerationBody, outputs: Sequence[RequestOutput]
) -> dict[str, Any]:
    """Streams that end with the usage say null before, unless the client wants it all the time."""
    options = body.stream_options
    if options is not None and (options.include_usage or options.continuous_usage_stats):
        chunk["usage"] = usage(outputs) if options.continuous_usage_stats else None
    return chunk


def usage_chunks(
    chunk: dict[str, Any], body: GenerationBody, outputs: Sequence[RequestOutput]
) -> list[dict[str, Any]]:
    """What a stream ends with: a chunk without choices that carries the usage, if the client wants it."""
    options = body.stream_options
    if options is None or not options.include_usage:
        return []
    return [{**chunk, "usage": usage(outputs)}]


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
