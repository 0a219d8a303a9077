"""Token events to outputs: text, stop strings, log-probabilities and metrics of every running request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tiny_vllm.outputs import (
    ChoiceDelta,
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    RequestUpdate,
)
from tiny_vllm.text.detokenizer import Detokenizer
from tiny_vllm.text.stop_strings import StopMatcher, StopStrings
from tiny_vllm.text.tokenizer import Tokenizer
from tiny_vllm.types import FinishReason, PromptInfo, Request, TokenEvent, TokenLogprobs


@dataclass(slots=True)
class Progress:
    """Result of one call to `process`.

    updates: one per request that moved. stops: (request_id, index) of choices that a stop string has ended;
    the engine does not know yet.
    """

    updates: list[RequestUpdate] = field(default_factory=list)
    stops: list[tuple[str, int]] = field(default_factory=list)


class OutputProcessor:
    """Follows the running requests. tokenizer: None for a model without one; texts are then empty."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _RunningRequest] = {}
        self._last_stops: tuple[tuple[str, ...], StopStrings | None] = ((), None)

    def __len__(self) -> int:
        """Requests that have not finished."""
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request: Request, prompt: str | None = None) -> RequestOutput:
        """Start following a request. prompt: its text, shown in the output, which is returned still empty."""
        assert request.request_id not in self._requests, f"request {request.request_id} is already running"
        stops = self._stops(request.sampling.stop_strings)
        running = _RunningRequest(request, prompt, self._tokenizer, stops)
        self._requests[request.request_id] = running
        return running.output

    def _stops(self, stop_strings: tuple[str, ...]) -> StopStrings | None:
        """All prompts of a call share one automaton: it may be a thousand times larger than its texts."""
        if self._last_stops[0] != stop_strings:
            self._last_stops = stop_strings, StopStrings(stop_strings) if stop_strings else None
        return self._last_stops[1]

    def remove(self, request_id: str) -> None:
        """Forget a request whose outcome nobody wants any more."""
        self._requests.pop(request_id, None)

    def process(self, events: Iterable[TokenEvent], now: float) -> Progress:
        """Take in the events of an engine step.

        now: seconds on the clock of Request.arrival_time. Each request has exactly one update whose output is
        finished: its last. Events of choices that have ended, and of requests unknown here, are ignored.
        """
        progress = Progress()
        moved: dict[str, RequestUpdate] = {}
        find_running, find_update = self._requests.get, moved.get
        for event in events:
            request_id = event.request_id
            running = find_running(request_id)
            if running is None:
                continue
            choice = running.choices[event.index]
            if choice.output.finish_reason is not None:
                continue
            update = find_update(request_id)
            if update is None:
                update = moved[request_id] = RequestUpdate(running.output)
                progress.updates.append(update)
            if event.prompt is not None:
                running.take_prompt_info(event.prompt)
            if event.token_id is not None:
                running.count_token(now)
            if choice.take(event, _delta_of(update, event.index)):
                if event.finish_reason is None:
                    progress.stops.append((request_id, event.index))
                running.num_unfinished -= 1
                if running.num_unfinished == 0:
                    running.output.metrics.finished_time = now
                    update.finished = True
                    del self._requests[request_id]
        return progress


def _delta_of(update: RequestUpdate, index: int) -> ChoiceDelta:
    for delta in update.deltas:
        if delta.index == index:
            return delta
    delta = ChoiceDelta(index)
    update.deltas.append(delta)
    return delta


class _RunningRequest:
    """A request, its growing output and what its choices need to grow."""

    __slots__ = ("_texts", "choices", "num_unfinished", "output")

    def __init__(
        self, request: Request, prompt: str | None, tokenizer: Tokenizer | None, stops: StopStrings | None
    ) -> None:
        sampling = request.sampling
        if not sampling.detokenize:
            tokenizer = None
        self._texts = tokenizer
        self.choices = [_Choice(index, request, tokenizer, stops) for index in range(sampling.n)]
        self.num_unfinished = sampling.n
        self.output = RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[choice.output for choice in self.choices],
            metrics=RequestMetrics(arrival_time=request.arrival_time),
        )

    def take_prompt_info(self, info: PromptInfo) -> None:
        """Only the first choice to start tells about the prompt: the others share its pages."""
        output, metrics = self.output, self.output.metrics
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = info.scheduled_time
            metrics.num_cached_tokens = info.num_cached_tokens
        if info.pooled is not None:
            output.pooled = info.pooled
        if info.prompt_logprobs is not None and output.prompt_logprobs is None:
            output.prompt_logprobs = [
                None if position is None else _logprobs(position, self._texts)
                for position in info.prompt_logprobs
            ]

    def count_token(self, now: float) -> None:
        metrics = self.output.metrics
        metrics.num_generated_tokens += 1
        metrics.last_token_time = now
        if metrics.first_token_time is None:
            metrics.first_token_time = now


class _Choice:
    """One choice: its output, its detokenizer and its stop strings."""

    __slots__ = (
        *("_detokenizer", "_include_stop", "_matcher", "_min_tokens", "_only_adds", "_tokenizer"),
        "output",
    )

    def __init__(
        self, index: int, request: Request, tokenizer: Tokenizer | None, stops: StopStrings | None
    ) -> None:
        sampling = request.sampling
        self.output = CompletionOutput(index=index)
        if sampling.logprobs is not None:
            self.output.logprobs = []
            self.output.cumulative_logprob = 0.0
        self._tokenizer = tokenizer
        self._min_tokens = sampling.min_tokens
        self._include_stop = sampling.include_stop_str_in_output
        self._matcher = StopMatcher(stops, include=self._include_stop) if stops else None
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = tokenizer.detokenizer(
                skip_special_tokens=sampling.skip_special_tokens,
                continues=_has_text(request.prompt_token_ids, tokenizer),
            )
        self._only_adds = self._detokenizer is not None and not stops and sampling.logprobs is None

    def take(self, event: TokenEvent, delta: ChoiceDelta) -> bool:
        """Add one event to the output and to the delta. Returns whether it was the choice's last."""
        output = self.output
        token_id, finish_reason = event.token_id, event.finish_reason
        if self._only_adds and token_id is not None and finish_reason is None:
            # Most tokens: text that nothing looks at.
            assert self._detokenizer is not None
            output.token_ids.append(token_id)
            delta.token_ids.append(token_id)
            text = self._detokenizer.add(token_id)
            if text:
                output.text += text
                delta.text += text
            return False
        if token_id is not None:
            output.token_ids.append(token_id)
            delta.token_ids.append(token_id)
            if output.logprobs is not None and event.logprobs is not None:
                self._take_logprobs(event.logprobs, delta)
        if self._detokenizer is not None:
            # A token that ends the sequence is known to have been generated, but is not part of the text.
            ends = finish_reason is FinishReason.STOP and not self._include_stop
            text = "" if token_id is None or ends else self._detokenizer.add(token_id)
            if finish_reason is not None:
                text += self._detokenizer.flush()
            if self._matcher is not None:
                text = self._match(self._matcher, text, finish_reason is not None)
            if text:
                output.text += text
                delta.text += text
        if output.finish_reason is None and finish_reason is not None:
            output.finish_reason = finish_reason.value
            output.stop_reason = event.stop_reason
        delta.finish_reason = output.finish_reason
        delta.stop_reason = output.stop_reason
        return output.finish_reason is not None

    def _match(self, matcher: StopMatcher, text: str, is_last: bool) -> str:
        """The part of the text that may be shown. Ends the choice if a stop string is complete."""
        text = matcher.add(text, armed=len(self.output.token_ids) > self._min_tokens)
        if matcher.matched is not None:
            self.output.finish_reason = FinishReason.STOP.value
            self.output.stop_reason = matcher.matched
            return text
        return text + matcher.flush() if is_last else text

    def _take_logprobs(self, logprobs: TokenLogprobs, delta: ChoiceDelta) -> None:
        output = self.output
        assert output.logprobs is not None and output.cumulative_logprob is not None
        entry = _logprobs(logprobs, self._tokenizer)
        output.logprobs.append(entry)
        output.cumulative_logprob += logprobs.logprobs[0]
        if delta.logprobs is None:
            delta.logprobs = []
        delta.logprobs.append(entry)


def _logprobs(position: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Token id to log-probability, the token itself first."""
    entries: dict[int, Logprob] = {}
    for token_id, logprob, rank in zip(position.token_ids, position.logprobs, position.ranks, strict=True):
        text = None if tokenizer is None else tokenizer.token_text(token_id)
        entries.setdefault(token_id, Logprob(logprob, rank, text))
    return entries


def _has_text(prompt_token_ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    return any(token_id not in tokenizer.special_token_ids for token_id in reversed(prompt_token_ids))
