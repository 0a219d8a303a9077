"""Prometheus metrics, under vLLM's names where vLLM has the metric."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tiny_vllm.engine.engine import EngineStats
from tiny_vllm.outputs import ChoiceDelta, RequestOutput, RequestUpdate
from tiny_vllm.serving.histogram import Histogram

FAST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
SLOW_SECONDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
NUM_RECENT = 100
TOKENS = tuple(factor * 10**power for power in range(6) for factor in (1, 2, 5))


class Metrics:
    """The metrics of one server, in a registry of their own.

    model_name: the label of every metric of the model. stats: the engine's last numbers, None while there are
    none. num_restarts: how often a new engine process was started.
    num_prompt_tokens, num_generated_tokens: of prompts that have their first token or need none, and in all.
    recent_first_token_seconds: times to the first token of the last requests.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(
        self, model_name: str, stats: Callable[[], EngineStats | None], num_restarts: Callable[[], int]
    ) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._registry.register(_EngineCollector(model_name, stats, num_restarts))
        ProcessCollector(registry=self._registry)  # of the API process
        self._last_times: dict[tuple[str, int], float] = {}
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.recent_first_token_seconds: deque[float] = deque(maxlen=NUM_RECENT)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["model_name"], registry=self._registry).labels(model_name)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(name, text, model_name, buckets)
            self._registry.register(made)
            return made

        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of started requests.")
        self._generation_tokens = counter("vllm:generation_tokens", "Generated tokens.")
        self._successes = Counter(
            "vllm:request_success",
            "Ended choices by reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._first_token = histogram(
            "vllm:time_to_first_token_seconds",
            "From arrival to the first token.",
            (*FAST_SECONDS, 20, 40, 80, 160, 640),
        )
        self._inter_token = histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a choice.", FAST_SECONDS
        )
        self._per_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between tokens of a request.",
            FAST_SECONDS,
        )
        self._end_to_end = histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the end.", SLOW_SECONDS
        )
        self._queue = histogram(
            "vllm:request_queue_time_seconds", "From arrival to the first computation.", SLOW_SECONDS
        )
        self._request_prompt_tokens = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens per request.", TOKENS
        )
        self._request_generation_tokens = histogram(
            "vllm:request_generation_tokens", "Generated tokens per request.", TOKENS
        )
        self._http = Counter(
            "tiny_vllm:http_responses",
            "Responses by path and status.",
            ["path", "status"],
            registry=self._registry,
        )

    def observe(self, updates: Sequence[RequestUpdate], now: float) -> None:
        """Take in what one engine step brought, or several steps that were heard of together."""
        num_tokens = 0
        for update in updates:
            output = update.output
            first_token_time = output.metrics.first_token_time
            if first_token_time == now:
                self._first_token.observe(now - output.metrics.arrival_time)
                self.recent_first_token_seconds.append(now - output.metrics.arrival_time)
            if first_token_time == now or (first_token_time is None and update.finished):
                self.num_prompt_tokens += len(output.prompt_token_ids)
            for delta in update.deltas:
                num_tokens += len(delta.token_ids)
                self._observe_delta((output.request_id, delta.index), delta, now)
            if update.finished:
                self._observe_end(output)
        self.num_generated_tokens += num_tokens
        self._generation_tokens.inc(num_tokens)

    def forget(self, outputs: Iterable[RequestOutput]) -> None:
        """Requests that were given up by their clients."""
        for output in outputs:
            for choice in output.outputs:
                if not choice.finished:
                    self._last_times.pop((output.request_id, choice.index), None)
                    self._successes.labels(self._model_name, "abort").inc()

    def count_response(self, path: str, status: int) -> None:
        self._http.labels(path, str(status)).inc()

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self._registry)

    def _observe_delta(self, choice: tuple[str, int], delta: ChoiceDelta, now: float) -> None:
        num_tokens = len(delta.token_ids)
        if num_tokens:
            last = self._last_times.get(choice)
            if last is not None:
                self._inter_token.observe(now - last)
            if num_tokens > 1:
                self._inter_token.observe(0.0, num_tokens - 1)
            self._last_times[choice] = now
        if delta.finish_reason is not None:
            self._last_times.pop(choice, None)
            self._successes.labels(self._model_name, delta.finish_reason).inc()

    def _observe_end(self, output: RequestOutput) -> None:
        metrics = output.metrics
        self._prompt_tokens.inc(len(output.prompt_token_ids))
        self._request_prompt_tokens.observe(len(output.prompt_token_ids))
        self._request_generation_tokens.observe(metrics.num_generated_tokens)
        if metrics.finished_time is not None:
            self._end_to_end.observe(metrics.finished_time - metrics.arrival_time)
        if metrics.queue_time is not None:
            self._queue.observe(metrics.queue_time)
        if metrics.time_per_output_token is not None:
            self._per_token.observe(metrics.time_per_output_token)


class _EngineCollector:
    """The engine's own numbers, read when the page is asked for."""

    def __init__(
        self, model_name: str, stats: Callable[[], EngineStats | None], num_restarts: Callable[[], int]
    ) -> None:
        self._model_name = model_name
        self._stats = stats
        self._num_restarts = num_restarts

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "tiny_vllm:engine_restarts",
            "Engine processes started because one had died.",
            value=self._num_restarts(),
        )
        stats = self._stats()
        if stats is None:
            return
        used = stats.num_used_pages / stats.num_pages
        gauges = {
            "vllm:num_requests_running": ("Sequences in slots.", stats.num_running),
            "vllm:num_requests_waiting": ("Sequences waiting for a slot.", stats.num_waiting),
            "vllm:kv_cache_usage_perc": ("Share of the pages in use, 0 to 1.", used),
            "tiny_vllm:cached_pages": (
                "Free pages whose content can still be found.",
                stats.num_cached_pages,
            ),
            "tiny_vllm:shared_pages": ("Pages in use by several sequences.", stats.num_shared_pages),
        }
        counters = {
            "vllm:num_preemptions": ("Sequences that gave up their slot.", stats.num_preemptions),
            "vllm:prefix_cache_queries": ("Tokens looked up in the prefix cache.", stats.prefix_query_tokens),
            "vllm:prefix_cache_hits": ("Tokens found in the prefix cache.", stats.prefix_hit_tokens),
            "tiny_vllm:engine_steps": ("Steps computed.", stats.num_steps),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter
