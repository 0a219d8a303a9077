"""What does a step cost the host without the model? Scheduling, batch building and commit of running decodes.

    python benchmarks/step_overhead.py [--sequences 256] [--steps 400] [--json FILE]

The model and the sampler are replaced by tokens drawn in advance; everything else is the engine's own code.
Prints the median and the 99th percentile of milliseconds per step, and the share of each part.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from tiny_vllm.config import EngineConfig
from tiny_vllm.engine.batch import build_batch
from tiny_vllm.engine.engine import Engine
from tiny_vllm.engine.plan import StepPlan, StepResult
from tiny_vllm.engine.slot_table import SlotTable
from tiny_vllm.types import Request, SamplingParams

T = TypeVar("T")
PAGE_SIZE = 16
PROMPT_LEN = 128


class TimedExecutor:
    """Builds the batch as the runner does and answers with random tokens."""

    def __init__(self, num_slots: int) -> None:
        self.table = SlotTable(num_slots, 1024 // PAGE_SIZE, torch.device("cpu"))
        self.build_seconds = 0.0
        self.random = random.Random(0)

    def execute(self, plan: StepPlan) -> StepResult:
        start = time.perf_counter()
        for admission in plan.admissions:
            self.table.admit(admission)
        self.table.edit_pages(plan.page_edits)
        build_batch(plan, self.table, PAGE_SIZE)
        if plan.decode_slots:
            self.table.computed_len[torch.tensor(plan.decode_slots)] += 1
        for chunk in plan.chunks:
            self.table.computed_len[chunk.slot] = chunk.start + len(chunk.token_ids)
        self.build_seconds = time.perf_counter() - start
        count = len(plan.decode_slots) + sum(chunk.samples for chunk in plan.chunks)
        return StepResult(token_ids=[self.random.randrange(1000, 30000) for _ in range(count)])


def timed(call: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def measure(num_sequences: int, num_steps: int) -> dict[str, object]:
    executor = TimedExecutor(num_sequences)
    config = EngineConfig(
        max_num_seqs=num_sequences,
        max_num_batched_tokens=8192,
        max_model_len=1024,
        num_pages=num_sequences * 1024 // PAGE_SIZE,
        prefill_policy="mixed",
        page_size=PAGE_SIZE,
    )
    engine = Engine(config, executor, eos_token_ids=(2,))
    for number in range(num_sequences):
        prompt = tuple(executor.random.randrange(1000, 30000) for _ in range(PROMPT_LEN))
        engine.add(Request(str(number), prompt, SamplingParams(max_tokens=None, seed=1), engine.clock()))
    while len(engine.scheduler.decoding) < num_sequences:
        engine.step()
    parts: dict[str, list[float]] = {"schedule": [], "build": [], "commit": [], "step": []}
    for _ in range(num_steps):
        plan, schedule = timed(lambda: engine.scheduler.schedule(engine.clock()))
        assert len(plan.decode_slots) == num_sequences
        result = executor.execute(plan)

        def commit(plan: StepPlan = plan, result: StepResult = result) -> int:
            engine.scheduler.commit(plan, result)
            return len(engine.scheduler.take_events())

        count, commit_seconds = timed(commit)
        assert count == num_sequences
        for name, seconds in (
            ("schedule", schedule),
            ("build", executor.build_seconds),
            ("commit", commit_seconds),
            ("step", schedule + executor.build_seconds + commit_seconds),
        ):
            parts[name].append(seconds * 1e3)
    return {
        "sequences": num_sequences,
        "steps": num_steps,
        **{
            f"{name}_ms": {
                "median": round(statistics.median(values), 3),
                "p99": round(statistics.quantiles(values, n=100)[98], 3),
            }
            for name, values in parts.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = measure(args.sequences, args.steps)
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
