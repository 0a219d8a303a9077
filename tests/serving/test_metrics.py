"""Metrics without a server around them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as Reference

from tiny_vllm.outputs import ChoiceDelta, CompletionOutput, RequestMetrics, RequestOutput, RequestUpdate
from tiny_vllm.serving.histogram import Histogram
from tiny_vllm.serving.metrics import Metrics

BOUNDS = (0.001, 0.25, 1, 10)


def samples(page: bytes) -> list[str]:
    """Lines of values, without the time of a metric's creation."""
    lines = page.decode().splitlines()
    return [line for line in lines if not line.startswith("#") and "_created" not in line]


def test_a_histogram_is_prometheus_clients() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("x:seconds", "Text.", "some model", BOUNDS)
    ours.register(histogram)
    reference = Reference("x:seconds", "Text.", ["model_name"], registry=theirs, buckets=BOUNDS)
    labelled = reference.labels("some model")
    assert samples(generate_latest(ours)) == samples(generate_latest(theirs))
    for value in (0.0, 0.001, 0.0011, 0.25, 1.0, 9.5, 10.0, 11.0, 1e9):
        histogram.observe(value)
        labelled.observe(value)
    histogram.observe(0.5, 3)
    for _ in range(3):
        labelled.observe(0.5)
    assert samples(generate_latest(ours)) == samples(generate_latest(theirs))


def test_tokens_that_came_together_count_one_by_one() -> None:
    metrics = Metrics("m", lambda: None, lambda: 0)
    output = RequestOutput("r", None, [5, 6], [CompletionOutput(0)], RequestMetrics(arrival_time=1.0))
    output.metrics.first_token_time = 2.0
    for now, token_ids in ((2.0, [1]), (2.25, [2, 3, 4]), (2.5, []), (2.75, [5])):
        metrics.observe([RequestUpdate(output, [ChoiceDelta(0, "", token_ids)])], now)
    lines = samples(metrics.text())
    name = 'vllm:inter_token_latency_seconds_{}{{model_name="m"}} {}'
    assert name.format("count", 4.0) in lines and name.format("sum", 0.75) in lines
    assert 'vllm:inter_token_latency_seconds_bucket{le="0.001",model_name="m"} 2.0' in lines
    assert 'vllm:generation_tokens_total{model_name="m"} 5.0' in lines
