"""Does the GPU ever wait for the host between two decode steps?

    PYTHONPATH=. python3 benchmarks/gpu_trace.py measure --json trace.json
    PYTHONPATH=. python3 benchmarks/gpu_trace.py draw trace.json docs/images/gpu-trace.png

Runs the engine at a steady batch, three times per batch size:

1. As it is. us_per_step; host_us: what the host did of it, and wait_us: how long it waited for the GPU.
2. With a pair of CUDA events around the kernels of each step. event_gap_us: from the end of one step's to the
   start of the next one's, event_gap_share: of the time. Copies of tokens and edits of tables count as gap.
3. Under torch's profiler, which slows the launches: idle_share, idle_between_share (`trace_events.py`). Where
   there is no CUPTI, the trace shows nothing of the GPU, and the second pass has to do.

exposed_host_us, what the host adds to a step outside the GPU's shadow, is the gap by events.
`draw` needs matplotlib, `measure` does not.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.trace_events import Span, draw, excerpt, host_figures, idle_figures, own_time, parse_trace
from tiny_vllm.cli.bench_rows import RowReport, check_report_options, positive_numbers

ROOT = Path(__file__).resolve().parents[1]
SHOWN_STEPS = 4
SETTLING_STEPS = 24
"""Steps before the clock: kernels are compiled, graphs captured, pages of the next block taken."""


class HostSpans:
    """Notes what the host does, and tells torch's profiler if it runs."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.is_traced = False

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        import torch

        start = time.perf_counter()
        with torch.profiler.record_function(name) if self.is_traced else nullcontext():
            yield
        self.spans.append(Span(name, start * 1e6, time.perf_counter() * 1e6))


class NotedStep:
    """A step on its way; see `SubmittedStep`."""

    def __init__(self, step: Any, notes: HostSpans) -> None:
        self._step = step
        self._notes = notes

    @property
    def is_synchronous(self) -> bool:
        return bool(self._step.is_synchronous)

    def result(self) -> Any:
        with self._notes.span("wait"):
            return self._step.result()


class NotedExecutor:
    """An executor whose steps are noted."""

    def __init__(self, executor: Any, notes: HostSpans) -> None:
        self._executor = executor
        self._notes = notes

    def submit(self, plan: Any) -> NotedStep:
        with self._notes.span("submit"):
            return NotedStep(self._executor.submit(plan), self._notes)


class TimedStepper:
    """A decode stepper with events around its kernels. pairs: one per step while is_on."""

    def __init__(self, stepper: Any) -> None:
        self._stepper = stepper
        self.is_on = False
        self.pairs: list[tuple[Any, Any]] = []

    @property
    def max_rows(self) -> int:
        return int(self._stepper.max_rows)

    def draw(self, slots: Any, max_context_len: int, tokens: Any) -> None:
        import torch

        if not self.is_on:
            self._stepper.draw(slots, max_context_len, tokens)
            return
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self._stepper.draw(slots, max_context_len, tokens)
        end.record()
        self.pairs.append((start, end))

    def logits(self, slots: Any, max_context_len: int) -> Any:
        return self._stepper.logits(slots, max_context_len)


class Bench:
    """An engine that can be run at a steady batch."""

    def __init__(self, args: argparse.Namespace) -> None:
        from tiny_vllm.config import EngineConfig
        from tiny_vllm.engine.build import build_engine, plan_engine

        self.args = args
        self.plan = plan_engine(
            EngineConfig(
                model=str(args.model),
                load_format="dummy",
                device=args.device,
                max_num_seqs=max(args.batch_sizes),
                num_pages=args.num_pages,
            )
        )
        self.report = RowReport(
            "gpu trace",
            args.json,
            spec=self.plan.checkpoint.spec,
            config=self.plan.config,
            options={name: getattr(args, name) for name in ("batch_sizes", "input_len", "num_steps")},
            program="gpu_trace.py",
        )
        self.engine = build_engine(self.plan)
        self.notes = HostSpans()
        runner = self.engine._executor
        # The engine has no seam for this, and needs none for anything else.
        self.steppers = [TimedStepper(stepper) for stepper in runner._steppers]  # type: ignore[attr-defined]
        runner._steppers = self.steppers  # type: ignore[attr-defined]
        self.engine._executor = NotedExecutor(runner, self.notes)

    def run_batch(self, batch_size: int) -> None:
        """One row."""
        with self._steady(batch_size):
            row: dict[str, Any] = {"measure": "steady steps", "batch_size": batch_size}
            self._steps(self.args.num_steps)
            row |= host_figures(self.notes.spans)
            row["is_ahead"] = self.engine.num_steps_ahead > 0
            if self.steppers and self.plan.config.device == "cuda":
                row |= self._time_gaps()
            row |= self._trace()
        self.report.add(**row)

    @contextmanager
    def _steady(self, batch_size: int) -> Iterator[None]:
        """batch_size sequences that decode, and will until the end."""
        from tiny_vllm.types import Request, SamplingParams

        engine = self.engine
        params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, detokenize=False)
        generator = random.Random(batch_size)
        names = [f"{batch_size}: {number}" for number in range(batch_size)]
        vocab_size = self.plan.checkpoint.spec.vocab_size
        for name in names:
            prompt = tuple(generator.choices(range(vocab_size), k=self.args.input_len))
            engine.add(Request(name, prompt, params, engine.clock()))
        num_decoding = 0
        while num_decoding < batch_size:
            engine.step()
            num_decoding = sum(status.known_len > status.prompt_len for status in engine.slots())
        try:
            self._steps(SETTLING_STEPS)
            yield
        finally:
            for name in names:
                engine.abort(name)
            while engine.has_work:
                engine.step()

    def _steps(self, count: int) -> None:
        self.notes.spans.clear()
        for _ in range(count):
            with self.notes.span("step"):
                self.engine.step()

    def _time_gaps(self) -> dict[str, float]:
        import torch

        for stepper in self.steppers:
            stepper.is_on = True
            stepper.pairs.clear()
        self._steps(self.args.num_steps)
        torch.cuda.synchronize()
        for stepper in self.steppers:
            stepper.is_on = False
        # All steps of one batch size take the same stepper.
        pairs = [pair for stepper in self.steppers for pair in stepper.pairs]
        if len(pairs) < 2:
            return {}
        busy = [start.elapsed_time(end) * 1e3 for start, end in pairs]
        gaps = [max(earlier.elapsed_time(later) * 1e3, 0.0) for (_, earlier), (later, _) in pairwise(pairs)]
        return {
            "kernels_us": statistics.median(busy),
            "event_gap_us": statistics.median(gaps),
            "event_gap_share": sum(gaps) / (sum(gaps) + sum(busy)),
            "exposed_host_us": statistics.fmean(gaps),
        }

    def _trace(self) -> dict[str, Any]:
        """Figures of the GPU if the profiler sees one, and a few steps for the picture."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        on_gpu = self.plan.config.device == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self.notes.is_traced = True
        try:
            with profile(activities=activities, acc_events=True) as profiler:
                self._steps(self.args.traced_steps)
                if on_gpu:
                    torch.cuda.synchronize()
        finally:
            self.notes.is_traced = False
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            host, gpu = parse_trace(json.loads(path.read_text(encoding="utf-8")))
        host += plan_spans(host)
        row: dict[str, Any] = {"trace": excerpt(host, gpu, SHOWN_STEPS)}
        row["traced_host_us"] = statistics.median(own_time(host, "step", ["wait"]))
        if gpu:
            row |= idle_figures(gpu)
        else:
            row["note"] = "the profiler saw nothing of a GPU"
        return row


def plan_spans(host: list[Span]) -> list[Span]:
    """Of every step, what is neither submitting nor waiting."""
    spans = []
    for step in (span for span in host if span.name == "step"):
        now = step.start
        for part in host:
            if part.name in ("submit", "wait") and step.start <= part.start and part.end <= step.end:
                spans.append(Span("plan and commit", now, part.start))
                now = part.end
        spans.append(Span("plan and commit", now, step.end))
    return spans


def measure(args: argparse.Namespace) -> int:
    check_report_options(args)
    start = time.perf_counter()
    bench = Bench(args)
    for batch_size in args.batch_sizes:
        line = {"measure": "steady steps", "batch_size": batch_size}
        if time.perf_counter() - start > args.max_time:
            bench.report.skip(f"{args.max_time:.0f} s are over", **line)
            continue
        bench.report.attempt(partial(bench.run_batch, batch_size), **line)
    return bench.report.finish()


def draw_report(args: argparse.Namespace) -> int:
    rows = json.loads(args.report.read_text(encoding="utf-8"))["rows"]
    shown = [row for row in rows if row.get("trace", {}).get("gpu")]
    if not shown:
        print(f"error: {args.report} has no trace of a GPU", file=sys.stderr)
        return 2
    args.picture.parent.mkdir(parents=True, exist_ok=True)
    draw(args.picture, shown)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", allow_abbrev=False)
    measuring.add_argument("--json", help="where the results go")
    measuring.add_argument("--model", type=Path, default=ROOT / "benchmarks" / "shapes" / "llama-3.2-1b")
    measuring.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    measuring.add_argument("--batch-sizes", type=positive_numbers, default=(1, 64, 256))
    measuring.add_argument("--input-len", type=int, default=128)
    measuring.add_argument("--num-steps", type=int, default=200, help="timed steps (default: 200)")
    measuring.add_argument(
        "--traced-steps", type=int, default=20, help="steps under the profiler (default: 20)"
    )
    measuring.add_argument("--num-pages", type=int, help="instead of what memory allows")
    measuring.add_argument("--max-time", type=float, default=120, help="seconds; later batches are left out")
    measuring.set_defaults(run=measure)
    drawing = commands.add_parser("draw", allow_abbrev=False)
    drawing.add_argument("report", type=Path)
    drawing.add_argument("picture", type=Path)
    drawing.set_defaults(run=draw_report)
    args = parser.parse_args()
    code: int = args.run(args)
    return code


if __name__ == "__main__":
    sys.exit(main())
