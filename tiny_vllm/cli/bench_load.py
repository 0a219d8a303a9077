"""Requests handed to an engine as they arrive, and what each of them and each step saw."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tiny_vllm.cli.bench_garbage import GarbageClock
from tiny_vllm.cli.bench_workloads import WorkItem
from tiny_vllm.engine.garbage import without_full_collections
from tiny_vllm.types import Request, SamplingParams, TokenEvent

if TYPE_CHECKING:
    from tiny_vllm.engine.engine import Engine

IDLE_SECONDS = 0.0005
"""How long to sleep while nothing runs and the next request is still to come."""


@dataclass(slots=True)
class RequestTimes:
    """Seconds since the start of the run. token_times: when the host had each token."""

    item: WorkItem
    scheduled: float | None = None
    num_cached_tokens: int = 0
    token_times: list[float] = field(default_factory=list)

    @property
    def time_to_first_token(self) -> float:
        return self.token_times[0] - self.item.arrival

    @property
    def end_to_end(self) -> float:
        return self.token_times[-1] - self.item.arrival

    @property
    def gaps(self) -> list[float]:
        """Between tokens."""
        return [
            later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)
        ]


@dataclass(frozen=True, slots=True)
class StepSample:
    """One engine step. end_s: since the start of the run. num_tokens: read after it. num_running,
    num_waiting: sequences; num_used_pages: held by sequences; all after it."""

    end_s: float
    seconds: float
    num_tokens: int
    num_running: int
    num_waiting: int
    num_used_pages: int


STEP_COLUMNS = tuple(StepSample.__dataclass_fields__)


@dataclass(slots=True)
class LoadResult:
    """seconds: from the start to the last token. requests: in the order of the items. garbage: its collection
    while the requests ran."""

    seconds: float
    requests: list[RequestTimes]
    steps: list[StepSample]
    num_preemptions: int
    garbage: GarbageClock = field(default_factory=GarbageClock)

    def stalls(self) -> list[tuple[float, float]]:
        """Stretches, from and to, between two moments at which running requests got further tokens: how long
        everybody who is past the first token waited for the next one."""
        # +1 a request may get further tokens from now on, 0 one got some, -1 one has got all.
        moments: dict[float, tuple[int, bool]] = {}
        for request in self.requests:
            times = request.token_times
            if len(times) < 2:
                continue
            for index, moment in enumerate(times):
                change, has_token = moments.get(moment, (0, False))
                change += (index == 0) - (index == len(times) - 1)
                moments[moment] = (change, has_token or index > 0)
        stalls = []
        num_decoding, start = 0, 0.0
        for moment in sorted(moments):
            change, has_token = moments[moment]
            if num_decoding and has_token:
                stalls.append((start, moment))
            if has_token or not num_decoding:
                start = moment
            num_decoding += change
        return stalls


def run_load(
    engine: Engine, items: Sequence[WorkItem], *, temperature: float, salt: str | None = None
) -> LoadResult:
    """Run items, sorted by arrival, to their end; each generates exactly its output_len tokens.

    A request counts as waiting from its arrival on, also while a step keeps it from being seen.
    salt: runs with different salts share no pages.
    """
    sampling = [
        SamplingParams(temperature=temperature, max_tokens=item.output_len, ignore_eos=True) for item in items
    ]
    steps: list[StepSample] = []
    log: list[tuple[float, list[TokenEvent]]] = []
    scheduler = engine.scheduler
    num_preemptions = scheduler.num_preemptions
    num_added = 0
    start = before = engine.clock()
    requests = [
        Request(f"{salt} {number}", item.prompt_token_ids, params, start + item.arrival, item.priority, salt)
        for number, (item, params) in enumerate(zip(items, sampling, strict=True))
    ]
    # The log keeps every event, whose number alone would make Python look through the whole process.
    with without_full_collections(), GarbageClock() as garbage:
        while num_added < len(requests) or engine.has_work:
            now = engine.clock()
            while num_added < len(requests) and requests[num_added].arrival_time <= now:
                engine.add(requests[num_added])
                num_added += 1
            if not engine.has_work:
                time.sleep(min(IDLE_SECONDS, requests[num_added].arrival_time - now))
                before = engine.clock()
                continue
            events = engine.step()
            now = engine.clock()
            log.append((now, events))
            steps.append(
                StepSample(
                    now - start,
                    now - before,
                    len(events),
                    scheduler.num_running,
                    len(scheduler.waiting),
                    scheduler.pool.num_pages - scheduler.pool.num_available,
                )
            )
            before = now
    times = {request.request_id: RequestTimes(item) for request, item in zip(requests, items, strict=True)}
    for moment, events in log:
        for event in events:
            entry = times[event.request_id]
            if event.prompt is not None:
                entry.scheduled = event.prompt.scheduled_time - start
                entry.num_cached_tokens = event.prompt.num_cached_tokens
            if event.token_id is not None:
                entry.token_times.append(moment - start)
    return LoadResult(
        max((entry.token_times[-1] for entry in times.values()), default=0.0),
        list(times.values()),
        steps,
        scheduler.num_preemptions - num_preemptions,
        garbage,
    )


def staggered(items: Sequence[WorkItem], most: int = 64) -> list[WorkItem]:
    """All requests at once, short and ending one after another: every batch size is met on the way down, so
    that what is compiled or captured for it is there when the clock runs."""
    return [
        replace(item, arrival=0.0, output_len=min(item.output_len, 1 + index % most))
        for index, item in enumerate(items)
    ]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * share) - 1, 0)]


def spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """p50, p95, p99 and the largest, in milliseconds, as columns of a row. Nothing of nothing."""
    if not seconds:
        return {}
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {f"{name}_{label}_ms": percentile(seconds, share) * 1e3 for label, share in shares.items()}


def latencies(requests: Sequence[RequestTimes]) -> dict[str, float]:
    """Time to first token, between tokens, and from arrival to the last token, over requests."""
    return {
        **spread("first_token", [request.time_to_first_token for request in requests]),
        **spread("inter_token", [gap for request in requests for gap in request.gaps]),
        **spread("end_to_end", [request.end_to_end for request in requests]),
    }


def summarize(result: LoadResult) -> dict[str, Any]:
    """One row: rates, latencies, the cache's share of the prompts, how full the engine was, and garbage."""
    requests = result.requests
    num_prompt = sum(len(request.item.prompt_token_ids) for request in requests)
    num_output = sum(len(request.token_times) for request in requests)
    return {
        "seconds": result.seconds,
        "requests_per_s": len(requests) / result.seconds,
        "output_tokens_per_s": num_output / result.seconds,
        "total_tokens_per_s": (num_prompt + num_output) / result.seconds,
        **latencies(requests),
        "cached_share": sum(request.num_cached_tokens for request in requests) / num_prompt,
        "mean_running": statistics.fmean(step.num_running for step in result.steps),
        "max_waiting": max(step.num_waiting for step in result.steps),
        "num_steps": len(result.steps),
        "num_preemptions": result.num_preemptions,
        **result.garbage.columns(),
    }


def step_columns(steps: Sequence[StepSample]) -> dict[str, list[float]]:
    """The steps as lists of equal length, rounded to microseconds, for JSON and for the plot."""
    return {name: [round(getattr(step, name), 6) for step in steps] for name in STEP_COLUMNS}
