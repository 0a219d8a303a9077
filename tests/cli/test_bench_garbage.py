from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest

from tiny_vllm.cli.bench_garbage import GarbageClock


@pytest.fixture(autouse=True)
def only_forced_collections() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    yield
    if was_enabled:
        gc.enable()


def test_a_collection_inside_is_counted_and_one_outside_is_not() -> None:
    callbacks = list(gc.callbacks)
    clock = GarbageClock()
    gc.collect()
    with clock:
        assert clock.columns() == {"gc_seconds": 0.0, "gc_longest_ms": 0.0}
        start = time.perf_counter()
        gc.collect()
        elapsed = time.perf_counter() - start
    counted = clock.columns()
    assert 0 < counted["gc_seconds"] <= elapsed
    assert counted["gc_longest_ms"] == pytest.approx(counted["gc_seconds"] * 1e3)
    gc.collect()
    assert clock.columns() == counted
    assert gc.callbacks == callbacks


def test_collections_add_up_and_the_longest_stands_alone() -> None:
    with GarbageClock() as clock:
        gc.collect(0)
        first = clock.columns()
        gc.collect()
        both = clock.columns()
    assert both["gc_seconds"] > first["gc_seconds"] > 0
    assert both["gc_longest_ms"] == pytest.approx(
        max(first["gc_longest_ms"], (both["gc_seconds"] - first["gc_seconds"]) * 1e3)
    )


def test_entered_again_it_counts_on() -> None:
    clock = GarbageClock()
    with clock:
        gc.collect()
    once = clock.columns()
    gc.collect()
    with clock:
        assert clock.columns() == once
        gc.collect()
    assert clock.columns()["gc_seconds"] > once["gc_seconds"]


def test_it_stops_counting_after_an_error() -> None:
    callbacks = list(gc.callbacks)
    with pytest.raises(KeyError), GarbageClock():
        raise KeyError
    assert gc.callbacks == callbacks


def test_the_end_of_a_collection_that_began_before_is_not_counted() -> None:
    with GarbageClock() as clock:
        gc.callbacks[-1]("stop", {})
    assert clock.columns()["gc_seconds"] == 0
