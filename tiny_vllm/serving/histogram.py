"""A histogram for what is observed at every token: prometheus_client's takes several microseconds a value."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Histogram(Collector):
    """Counts of values up to each bound, and their sum. For one thread.

    bounds: in ascending order; the one for all other values is added. model_name: its only label.
    """

    def __init__(self, name: str, text: str, model_name: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._model_name = name, text, model_name
        self._bounds = [*map(float, bounds), float("inf")]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def describe(self) -> Iterable[Metric]:
        return [HistogramMetricFamily(self._name, self._text, labels=["model_name"])]

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        counts = accumulate(self._counts)
        buckets = [(floatToGoString(bound), count) for bound, count in zip(self._bounds, counts, strict=True)]
        family.add_metric([self._model_name], buckets, self._sum)
        return [family]
