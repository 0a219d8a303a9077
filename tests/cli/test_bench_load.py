from __future__ import annotations

import gc

import pytest

from tests.helpers.engines import FakeEngine
from tiny_vllm.cli.bench_load import (
    LoadResult,
    RequestTimes,
    percentile,
    run_load,
    staggered,
    step_columns,
    summarize,
)
from tiny_vllm.cli.bench_workloads import WorkItem
from tiny_vllm.types import TokenEvent

ITEM = WorkItem((1, 2, 3), 4)


def ticking_engine(**options: object) -> FakeEngine:
    """An engine whose clock moves by a millisecond whenever it is read."""
    fake = FakeEngine(**options)  # type: ignore[arg-type]

    def tick() -> float:
        fake.clock.now += 0.001
        return fake.clock.now

    fake.engine.clock = tick
    return fake


def test_every_request_gets_its_tokens_after_its_arrival() -> None:
    fake = ticking_engine(max_num_seqs=2)
    items = [WorkItem((1, 2, 3), 4), WorkItem((4,), 1, arrival=0.5), WorkItem((5, 6), 7, arrival=0.5)]
    result = run_load(fake.engine, items, temperature=0.0)
    assert [len(request.token_times) for request in result.requests] == [4, 1, 7]
    for request in result.requests:
        assert 0 < request.time_to_first_token <= request.end_to_end < 0.1
        assert request.scheduled is not None and request.scheduled >= request.item.arrival
    assert result.seconds == result.requests[2].token_times[-1]
    assert [step.num_running for step in result.steps][-1] == 0
    assert sum(step.num_tokens for step in result.steps) == 12
    fake.engine.scheduler.check()


def test_a_queue_and_preemptions_are_seen() -> None:
    fake = ticking_engine(max_num_seqs=2, num_pages=7)
    urgent = WorkItem(tuple(range(9)), 4, priority=-1, arrival=0.02)
    result = run_load(fake.engine, [WorkItem((7,) * 8, 12)] * 3 + [urgent], temperature=0.0, salt="a")
    row = summarize(result)
    assert row["max_waiting"] >= 1 and row["num_preemptions"] >= 1
    assert all(step.num_used_pages <= 7 for step in result.steps)
    assert row["output_tokens_per_s"] == pytest.approx(40 / result.seconds)
    assert row["total_tokens_per_s"] == pytest.approx((40 + 33) / result.seconds)


def test_runs_with_different_salts_share_no_pages() -> None:
    fake = ticking_engine()
    items = [WorkItem(tuple(range(17)), 2)] * 2
    shares = [
        summarize(run_load(fake.engine, items, temperature=0.0, salt=salt))["cached_share"]
        for salt in ("a", "a ", "a")
    ]
    # Of two equal prompts the second finds 16 tokens; run again, both do.
    assert shares == [pytest.approx(8 / 17), pytest.approx(8 / 17), pytest.approx(16 / 17)]


def test_a_collection_of_garbage_during_a_run_is_seen() -> None:
    fake = ticking_engine()
    step = fake.engine.step

    def step_and_collect() -> list[TokenEvent]:
        gc.collect()
        return step()

    fake.engine.step = step_and_collect  # type: ignore[method-assign]
    row = summarize(run_load(fake.engine, [ITEM], temperature=0.0))
    assert row["gc_seconds"] * 1e3 >= row["gc_longest_ms"] > 0


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.95, 0.99, 1.0)] == [1, 50, 95, 99, 100]
    assert percentile([3.0], 0.5) == 3.0


def result_of(*token_times: list[float]) -> LoadResult:
    return LoadResult(9.0, [RequestTimes(ITEM, token_times=times) for times in token_times], [], 0)


def test_a_stall_is_a_time_in_which_nobody_got_a_further_token() -> None:
    assert result_of([1.0, 2.0, 5.0]).stalls() == [(1.0, 2.0), (2.0, 5.0)]
    # Another's further tokens are no stall, another's first token changes nothing.
    assert result_of([1.0, 5.0], [2.0, 3.0, 4.0]).stalls() == [(1.0, 3.0), (3.0, 4.0), (4.0, 5.0)]
    # Nobody waits between the end of one and the start of the next, or for a single token.
    assert result_of([1.0, 2.0], [6.0, 7.0], [3.0]).stalls() == [(1.0, 2.0), (6.0, 7.0)]


def test_staggered_requests_end_one_after_another() -> None:
    short = staggered([WorkItem((1,), 3, arrival=2.0)] * 2 + [WorkItem((1,), 100)] * 2)
    assert [(item.output_len, item.arrival) for item in short] == [(1, 0.0), (2, 0.0), (3, 0.0), (4, 0.0)]


def test_steps_become_columns() -> None:
    fake = ticking_engine()
    result = run_load(fake.engine, [ITEM], temperature=0.0)
    columns = step_columns(result.steps)
    assert columns["num_tokens"] == [1] * 4
    assert columns["end_s"] == sorted(columns["end_s"]) and len(columns["seconds"]) == 4
