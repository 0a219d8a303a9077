"""What do steps with short prompts cost, as CUDA graphs and kernel by kernel?

    PYTHONPATH=. python3 benchmarks/gpu_small_prefill.py --json small-prefill.json

An engine computes one prompt per step, of each of --input-lens tokens, alone and beside --num-decodes running
sequences, with the steps' graphs and (is_eager) without them. Seconds are of the wall clock:

    step_us     from handing a prompt in to its first token, nothing else under way: what a request waits for
    host_us     of these, submitting: until all is launched
    beside_us   of a step with a prompt and the decodes, and decode_us without the prompt, both with steps
                following each other as they do in a server

Last come the shapes recorded, the mean time a recording took, and the memory all of them hold.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tiny_vllm.cli.bench_rows import RowReport, check_report_options, positive_numbers

ROOT = Path(__file__).resolve().parents[1]
DECODE_LEN = 200
"""Tokens of a running sequence's prompt."""
WARM_UPS = 8
"""Of each case: a shape is recorded when it comes for the fourth time."""


class TimedRecorder:
    """A recorder of graphs, watched."""

    def __init__(self, record: Any) -> None:
        self._record = record
        self.seconds: list[float] = []

    def __call__(self, run: Callable[[], None]) -> Any:
        start = time.perf_counter()
        replay = self._record(run)
        self.seconds.append(time.perf_counter() - start)
        return replay


class TimedExecutor:
    """An executor whose `submit` is timed."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.seconds: list[float] = []

    def submit(self, plan: Any) -> Any:
        start = time.perf_counter()
        step = self._executor.submit(plan)
        self.seconds.append(time.perf_counter() - start)
        return step


class Bench:
    """One engine, whose graphs can be switched off."""

    def __init__(self, args: argparse.Namespace) -> None:
        from tiny_vllm.config import EngineConfig
        from tiny_vllm.engine.build import build_engine, plan_engine

        self.args = args
        config = EngineConfig(
            model=str(args.model),
            load_format="dummy",
            device=args.device,
            max_num_seqs=args.num_decodes + 8,
            num_pages=args.num_pages,
            enable_prefix_caching=False,
        )
        self.plan = plan_engine(config)
        self.report = RowReport(
            "small prefill",
            args.json,
            spec=self.plan.checkpoint.spec,
            config=self.plan.config,
            options={name: getattr(args, name) for name in ("input_lens", "num_decodes", "num_steps")},
            program="gpu_small_prefill.py",
        )
        self.engine = build_engine(self.plan)
        # The engine has no seam for this, and needs none for anything else.
        self.runner: Any = self.engine._executor
        self.graphs = self.runner._graphs
        self.recorder: TimedRecorder | None = None
        if self.graphs is not None:
            self.recorder = self.graphs._record = TimedRecorder(self.graphs._record)
        self.executor = TimedExecutor(self.runner)
        self.engine._executor = self.executor
        self.random = random.Random(0)
        self.num_requests = 0

    def add(self, length: int, max_tokens: int) -> str:
        from tiny_vllm.types import Request, SamplingParams

        name = str(self.num_requests)
        self.num_requests += 1
        prompt = tuple(self.random.choices(range(self.plan.checkpoint.spec.vocab_size), k=length))
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self.engine.add(Request(name, prompt, params, self.engine.clock()))
        return name

    def run(self, length: int, num_decodes: int, is_eager: bool) -> None:
        """One row."""
        self.runner._graphs = None if is_eager else self.graphs
        row: dict[str, Any] = {
            "measure": "a prompt",
            "input_len": length,
            "num_decodes": num_decodes,
            "is_eager": is_eager,
        }
        row |= self._beside(length, num_decodes) if num_decodes else self._alone(length)
        self.report.add(**row)

    def _alone(self, length: int) -> dict[str, float]:
        steps, submits = [], []
        for _ in range(WARM_UPS + self.args.num_steps):
            self.executor.seconds.clear()
            self.add(length, 1)
            start = time.perf_counter()
            while self.engine.has_work:
                self.engine.step()
            steps.append(time.perf_counter() - start)
            submits.append(sum(self.executor.seconds))
        return {
            "step_us": 1e6 * statistics.median(steps[WARM_UPS:]),
            "host_us": 1e6 * statistics.median(submits[WARM_UPS:]),
        }

    def _beside(self, length: int, num_decodes: int) -> dict[str, float]:
        """Steps with a prompt, and steps without one, are timed in runs of their own."""
        count = self.args.num_steps
        names = [self.add(DECODE_LEN, 10**6) for _ in range(num_decodes)]
        while len(self.engine.scheduler.decoding) < num_decodes:
            self.engine.step()
        for _ in range(WARM_UPS):
            self.add(length, 1)
            self.engine.step()
        mixed = self._time_steps(count, partial(self.add, length, 1))
        for _ in range(WARM_UPS):
            self.engine.step()
        plain = self._time_steps(count, lambda: None)
        for name in names:
            self.engine.abort(name)
        while self.engine.has_work:
            self.engine.step()
        return {"beside_us": mixed, "decode_us": plain}

    def _time_steps(self, count: int, before: Callable[[], object]) -> float:
        """Mean microseconds of a step; the first and the last end with a token on the host."""
        before()
        self.engine.step()
        start = time.perf_counter()
        for _ in range(count):
            before()
            self.engine.step()
        return 1e6 * (time.perf_counter() - start) / count

    def tell_of_recording(self) -> None:
        import torch

        if self.recorder is None or not self.recorder.seconds:
            return
        shares = [
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if segment.get("segment_pool_id", (0, 0)) != (0, 0)
        ]
        self.report.add(
            measure="recording",
            num_shapes=len(self.recorder.seconds),
            mean_ms=1e3 * statistics.fmean(self.recorder.seconds),
            graph_pools_mib=sum(shares) / 2**20,
            shapes={str(shape): True for shape in self.graphs._replays},
        )


def measure(args: argparse.Namespace) -> int:
    check_report_options(args)
    start = time.perf_counter()
    bench = Bench(args)
    for is_eager in (False, True):
        for num_decodes in (0, args.num_decodes):
            for length in args.input_lens:
                line = {"input_len": length, "num_decodes": num_decodes, "is_eager": is_eager}
                if time.perf_counter() - start > args.max_time:
                    bench.report.skip(f"{args.max_time:.0f} s are over", measure="a prompt", **line)
                    continue
                run = partial(bench.run, **{**line, "length": length})
                run.keywords.pop("input_len")
                bench.report.attempt(run, measure="a prompt", **line)
    bench.report.attempt(bench.tell_of_recording, measure="recording")
    return bench.report.finish()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", help="where the results go")
    parser.add_argument("--model", type=Path, default=ROOT / "benchmarks" / "shapes" / "llama-3.2-1b")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--input-lens", type=positive_numbers, default=(32, 128, 256, 512, 1024))
    parser.add_argument("--num-decodes", type=int, default=32)
    parser.add_argument("--num-steps", type=int, default=40, help="timed steps of a case (default: 40)")
    parser.add_argument("--num-pages", type=int, default=16384)
    parser.add_argument("--max-time", type=float, default=40, help="seconds; later cases are left out")
    return measure(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
