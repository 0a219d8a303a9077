"""benchmarks/gpu_trace.py: its figures and picture from traces made up here, and all of it on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_trace import TimedStepper, plan_spans
from benchmarks.trace_events import Span, excerpt, host_figures, idle_figures, own_time, parse_trace
from tests.cli.test_bench_decode import CONFIG
from tests.helpers.scripts import run_script


def event(category: str, name: str, start: float, duration: float, launch: int = 0) -> dict[str, Any]:
    args = {"correlation": launch}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": args}


def trace_of(num_steps: int) -> dict[str, Any]:
    """Steps of 100 us: a graph of two kernels 2 us apart, a copy beside the second, 10 us of nothing.
    The host submits for 20 us and waits for 60."""
    events = [{"ph": "M", "name": "process_name"}]
    for step in range(num_steps):
        at = 1000.0 + 100 * step
        events += [
            event("user_annotation", "step", at, 95),
            event("user_annotation", "submit", at + 5, 20),
            event("user_annotation", "wait", at + 30, 60),
            event("cpu_op", "aten::copy_", at + 6, 3),
            event("gpu_user_annotation", "step", at, 95),
            event("kernel", "first", at + 50, 48, launch=step + 1),
            event("kernel", "second", at + 100, 40, launch=step + 1),
            event("gpu_memcpy", "Memcpy DtoH", at + 110, 5, launch=900 + step),
        ]
    return {"traceEvents": events}


def test_only_what_the_host_noted_and_the_gpu_did_is_read() -> None:
    host, gpu = parse_trace(trace_of(2))
    assert [(span.name, span.start) for span in host] == [
        *(("step", 1000.0), ("submit", 1005.0), ("wait", 1030.0)),
        *(("step", 1100.0), ("submit", 1105.0), ("wait", 1130.0)),
    ]
    assert [(span.name, span.end - span.start) for span in gpu[:3]] == [
        ("kernel", 48.0),
        ("kernel", 40.0),
        ("copy", 5.0),
    ]


def test_gaps_within_a_graph_are_told_from_gaps_between_launches() -> None:
    _, gpu = parse_trace(trace_of(3))
    figures = idle_figures(gpu)
    assert figures["traced_us"] == 290
    # 2 us in each of three graphs, 10 between them; the copy runs beside a kernel and hides nothing.
    assert figures["idle_share"] == pytest.approx((3 * 2 + 2 * 10) / 290)
    assert figures["idle_between_share"] == pytest.approx(2 * 10 / 290)
    assert figures["num_launches"] == 6


def test_kernels_without_a_launch_number_count_as_launched_apart() -> None:
    figures = idle_figures([Span("kernel", 0, 4), Span("kernel", 6, 10)])
    assert figures["idle_share"] == figures["idle_between_share"] == pytest.approx(0.2)


def test_a_kernel_that_outlasts_its_successors_leaves_no_gap() -> None:
    gpu = [Span("kernel", 0, 10, 1), Span("copy", 2, 3, 2), Span("kernel", 9, 12, 3)]
    assert idle_figures(gpu)["idle_share"] == 0


def test_the_host_works_when_it_does_not_wait() -> None:
    host, _ = parse_trace(trace_of(3))
    assert own_time(host, "step", ["wait"]) == [35, 35, 35]
    figures = host_figures(host)
    assert figures == {"us_per_step": 100, "host_us": 35, "submit_us": 20, "wait_us": 60}
    assert [(span.start, span.end) for span in plan_spans(host[:3])] == [
        *((1000.0, 1005.0), (1025.0, 1030.0), (1090.0, 1095.0)),
    ]


def test_the_picture_shows_the_steps_in_the_middle() -> None:
    host, gpu = parse_trace(trace_of(5))
    shown = excerpt(host, gpu, 3)
    assert shown["host"][0] == ["submit", 5.0, 25.0]
    assert len([name for name, *_ in shown["host"] if name == "submit"]) == 3
    # The graph of the step before reaches into the first one.
    assert shown["gpu"][0] == ["kernel", 0.0, 40.0]
    assert max(end for _, _, end in shown["gpu"]) == 295.0
    assert excerpt([], [], 3) == {"host": [], "gpu": []}


def test_events_stand_round_the_kernels_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    order: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("event")

    class Stepper:
        max_rows = 4

        def draw(self, slots: Any, max_context_len: int, tokens: Any) -> None:
            order.append(tokens)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    stepper = TimedStepper(Stepper())
    stepper.draw(None, 8, "kernels")
    assert not stepper.pairs
    stepper.is_on = True
    stepper.draw(None, 8, "kernels")
    assert stepper.max_rows == 4
    assert order == ["kernels", "event", "kernels", "event"] and len(stepper.pairs) == 1


def test_a_report_becomes_a_picture(tmp_path: Path) -> None:
    host, gpu = parse_trace(trace_of(6))
    row = {"batch_size": 64, **host_figures(host), **idle_figures(gpu), "trace": excerpt(host, gpu, 4)}
    report, picture = tmp_path / "trace.json", tmp_path / "images" / "trace.png"
    report.write_text(json.dumps({"rows": [row, {"batch_size": 256, "skipped": "120 s are over"}]}))
    run = run_script("gpu_trace.py", "draw", str(report), str(picture))
    assert run.returncode == 0, run.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_cpu_gets_its_host_figures_and_no_picture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    report = tmp_path / "trace.json"
    options = ["--device", "cpu", "--model", str(tmp_path), "--batch-sizes", "1,3", "--input-len", "20"]
    options += ["--num-steps", "6", "--traced-steps", "5", "--num-pages", "64", "--json", str(report)]
    run = run_script("gpu_trace.py", "measure", *options)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(report.read_text())["rows"]
    assert [row["batch_size"] for row in rows] == [1, 3]
    for row in rows:
        assert 0 < row["submit_us"] < row["host_us"]
        assert row["host_us"] < 2 * row["us_per_step"]
        assert [name for name, *_ in row["trace"]["host"]].count("submit") == 4
        assert row["note"] == "the profiler saw nothing of a GPU"
    run = run_script("gpu_trace.py", "draw", str(report), str(tmp_path / "trace.png"))
    assert run.returncode == 2 and "has no trace of a GPU" in run.stderr
