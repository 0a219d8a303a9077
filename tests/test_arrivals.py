"""benchmarks/arrivals.py from end to end, with a tiny model on the CPU, and its figures one by one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import arrivals
from benchmarks.arrivals import (
    LONG,
    arriving_items,
    make_items,
    parse_case,
    stalls_during_long_prompts,
    table,
    warm_up_arrivals,
    warm_up_batches,
)
from tests.cli.test_bench_decode import CONFIG
from tests.helpers.engines import FakeEngine
from tests.helpers.scripts import run_script
from tiny_vllm.cli.bench_load import LoadResult, RequestTimes
from tiny_vllm.cli.bench_workloads import WorkItem

SMALL = (
    *("--device", "cpu", "--max-num-seqs", "8", "--length-scale", "0.05", "--seconds", "0.3"),
    *("--long-prompt-len", "100", "--long-every", "0.1", "--capacity-requests", "20"),
)


def run(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 4096}))
    report = tmp_path / "report.json"
    done = run_script("arrivals.py", "--model", str(tmp_path), "--json", str(report), *SMALL, *options)
    content: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
    return done.returncode, content, done.stdout + done.stderr


def test_every_case_meets_every_share_of_the_capacity(tmp_path: Path) -> None:
    options = (
        "--cases",
        "mixed:32",
        "exclusive:32:16",
        "--shares",
        "0.25",
        "0.9",
        "--stall-bound-ms",
        "0.001",
    )
    code, report, output = run(tmp_path, *options)
    assert code == 0, output
    capacity, *rows = report["rows"]
    assert report["command"].startswith("arrivals.py") and report["machine"]["device"] == "cpu"
    assert [(row["case"], row["share_of_capacity"]) for row in rows] == [
        (case, share) for case in ("mixed:32", "exclusive:32:16") for share in (0.25, 0.9)
    ]
    for row in rows:
        assert row["request_rate"] == pytest.approx(row["share_of_capacity"] * capacity["requests_per_s"])
        assert row["num_long_prompts"] == 3 and 0 <= row["share_beyond_bound"] <= 1
        assert row["first_token_p50_ms"] <= row["first_token_p99_ms"]
        # Long prompts come until 0.25 seconds after the start, at the highest share and at the lowest.
        assert row["seconds_of_warmup"] > 2 * 0.25
        assert row["gc_seconds"] >= 0
    assert len({row["seconds_of_warmup"] for row in rows}) == 2
    assert output.count("| 90% | ") == 2 and "stall p50" in output


class Loads:
    """What run_load was given: the items and the salt of each load."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[list[WorkItem], str]] = []

        def note(engine: Any, items: list[WorkItem], *, temperature: float, salt: str) -> LoadResult:
            self.seen.append((items, salt))
            return LoadResult(1.0, [], [], 0)

        monkeypatch.setattr(arrivals, "run_load", note)


def arguments(**options: Any) -> argparse.Namespace:
    lengths = {"length_scale": 0.05, "long_prompt_len": 100}
    return argparse.Namespace(
        **lengths, **{"seconds": 4.0, "long_every": 1.5, "max_num_seqs": 8, "seed": 0, **options}
    )


def test_every_batch_is_met_before_the_capacity_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = Loads(monkeypatch)
    assert warm_up_batches(FakeEngine().engine, arguments(), 100) == 3
    short, whole, alone = (items for items, _ in loads.seen)
    assert len(short) == 8 and all(item.output_len <= number for number, item in enumerate(short, 1))
    # All slots are full, and a long prompt waits for one of them.
    assert len(whole) == 9 and {item.arrival for item in whole} == {0}
    assert (whole[-1].priority, len(whole[-1].prompt_token_ids)) == (LONG, 100)
    assert [len(item.prompt_token_ids) for item in alone] == [100]


def test_the_highest_share_and_the_lowest_warm_up_their_case(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = Loads(monkeypatch)
    args = arguments(shares=[0.25, 0.5, 0.9])
    engine = FakeEngine().engine
    assert warm_up_arrivals(engine, 100.0, args, 100) == 2
    assert [items for items, _ in loads.seen] == [
        arriving_items(rate, args, 100) for rate in (0.9 * 100.0, 25.0)
    ]
    assert len({salt for _, salt in loads.seen}) == 2


def test_one_share_warms_up_once_and_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = Loads(monkeypatch)
    assert warm_up_arrivals(FakeEngine().engine, 10.0, arguments(shares=[0.5], seconds=1e4), 100) == 1
    ((items, _),) = loads.seen
    assert items == arriving_items(5.0, arguments(seconds=arrivals.WARM_UP_SECONDS), 100)


def test_a_capacity_that_is_given_is_not_measured(tmp_path: Path) -> None:
    code, report, output = run(tmp_path, "--cases", "mixed:32", "--shares", "0.5", "--capacity", "40")
    assert code == 0, output
    capacity, row = report["rows"]
    assert (capacity["requests_per_s"], row["request_rate"]) == (40, 20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--cases", "other:32"), "invalid POLICY:BUDGET[:LIMIT] value: 'other:32'"),
        (("--seconds", "0"), "--seconds is 0.0"),
        (("--shares", "0.5", "-1"), "--shares"),
    ],
)
def test_what_cannot_run_is_refused(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    code, report, output = run(tmp_path, *options)
    assert code == 2 and report == {}
    assert message in output


def test_a_case_is_engine_options() -> None:
    assert parse_case("mixed:64") == {"prefill_policy": "mixed", "max_num_batched_tokens": 64}
    assert parse_case("exclusive:64:8")["max_prefill_tokens_per_decode"] == 8


def test_one_request_in_ten_is_urgent() -> None:
    urgent = sum(item.priority == 0 for item in make_items(2000, 100, 0.1, seed=0))
    # Four standard deviations of a binomial of 2,000 and 0.1.
    assert abs(urgent - 200) < 4 * (2000 * 0.1 * 0.9) ** 0.5


def test_a_long_prompt_answers_for_stalls_in_its_own_time_alone() -> None:
    others = RequestTimes(WorkItem((1,), 5), token_times=[0.0, 1.0, 1.5, 4.5, 5.0])
    early = RequestTimes(WorkItem((1,), 1, LONG, arrival=0.2), token_times=[1.2])
    late = RequestTimes(WorkItem((1,), 1, LONG, arrival=4.0), token_times=[4.6])
    alone = RequestTimes(WorkItem((1,), 1, LONG, arrival=6.0), token_times=[7.0])
    result = LoadResult(7.0, [others, early, late, alone], [], 0)
    assert stalls_during_long_prompts(result) == [1.0, 3.0, 0.0]


def test_the_table_groups_the_cases_of_a_share() -> None:
    rows = [
        {"case": case, "share_of_capacity": share, "output_tokens_per_s": 1234.5}
        for case in ("a", "b")
        for share in (0.25, 0.5)
    ]
    cells = [line.split(" | ")[:3] for line in table(rows).splitlines()[2:]]
    assert [(share.strip("| "), case) for share, case, _ in cells] == [
        *[("25%", "a"), ("25%", "b")],
        *[("50%", "a"), ("50%", "b")],
    ]
