"""What a finished or growing generation looks like to the user (vLLM's names)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Logprob(NamedTuple):
    """logprob: natural logarithm; rank: 1 is the most likely token; decoded_token: its text."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(slots=True)
class CompletionOutput:
    """One choice. `logprobs[i]` maps token ids to their log-probability at generated token i."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Seconds on a monotonic clock; durations are derived.

    num_cached_tokens: prompt tokens whose keys and values came from the prefix cache.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival until the first computation."""
        return _difference(self.first_scheduled_time, self.arrival_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token (TTFT)."""
        return _difference(self.first_token_time, self.arrival_time)

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds between tokens after the first (TPOT), over all choices of the request."""
        elapsed = _difference(self.last_token_time, self.first_token_time)
        if elapsed is None or self.num_generated_tokens < 2:
            return None
        return elapsed / (self.num_generated_tokens - 1)


def _difference(end: float | None, start: float | None) -> float | None:
    return None if end is None or start is None else end - start


@dataclass(slots=True)
class RequestOutput:
    """Everything known about one request; `finished` once every choice has ended.

    pooled: of an embedding request; see PromptInfo.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    pooled: bytes | None = None

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)

    @property
    def num_cached_tokens(self) -> int:
        return self.metrics.num_cached_tokens


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """embedding: as many values as the model's hidden state, or as were asked for."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    metrics: RequestMetrics
    finished: bool = True


@dataclass(slots=True)
class ChoiceDelta:
    """What one step added to one choice.

    logprobs: one entry per new token, None if not asked for. finish_reason, stop_reason: set with the last
    delta.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestUpdate:
    """News of one request.

    output: everything so far; the same object each time, still growing until `output.finished`. It may be
        ahead of an update that is read late. deltas: what is new, one entry per choice that moved.
    finished: whether this is the request's last update.
    """

    output: RequestOutput
    deltas: list[ChoiceDelta] = field(default_factory=list)
    finished: bool = False

    @property
    def text(self) -> str:
        """New text of the first choice."""
        return next((delta.text for delta in self.deltas if delta.index == 0), "")
