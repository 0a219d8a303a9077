"""What does a step cost the host? Scheduling, submitting, reading and committing decodes, without a model.

    PYTHONPATH=. python benchmarks/step_overhead.py [--sequences 1 8 64 256] [--steps 400] [--repeats 5]
        [--device cuda] [--json FILE]

The kernels of a decode step are replaced by tokens drawn in advance; everything else is the engine's own,
planning one step ahead. Prints microseconds per step: the median of each repeat's steps, and of these the
smallest, because other programs on the machine only ever add. On a GPU, `submit` contains the copies to and
from the device, and nothing waits for them.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiny_vllm.config import EngineConfig
from tiny_vllm.engine.engine import Engine
from tiny_vllm.engine.runner import Runner
from tiny_vllm.engine.sampler import Sampler
from tiny_vllm.engine.slot_table import SlotTable
from tiny_vllm.engine.transfers import transfers_to
from tiny_vllm.models.batch import ForwardBatch
from tiny_vllm.types import Request, SamplingParams

PAGE_SIZE = 16
PROMPT_LEN = 128
VOCAB = 1000
MAX_MODEL_LEN = 8192
PARTS = ("schedule", "submit", "read", "commit")


class NoDecoder:
    """Prompts are answered with noise."""

    fused_decode = None

    def forward(self, batch: ForwardBatch, kv_cache: object) -> Tensor:
        return torch.zeros(len(batch.token_ids), 1, device=batch.token_ids.device)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.randn(len(hidden), VOCAB, device=hidden.device)


class NoKernels:
    """A `DecodeStepper` that leaves everything as it is."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.max_rows = num_slots
        self._tokens = torch.randint(10, VOCAB, (num_slots,), device=device)

    def draw(self, slots: Tensor, max_context_len: int) -> Tensor:
        return self._tokens[: slots.shape[0]]

    def logits(self, slots: Tensor, max_context_len: int) -> Tensor:
        raise NotImplementedError


class Stopwatch:
    """Seconds of every call of functions, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in PARTS}

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            self.seconds[name].append(time.perf_counter() - start)
            return result

        return timed


def make_engine(num_sequences: int, device: torch.device) -> Engine:
    """All sequences running, planning ahead."""
    config = EngineConfig(
        max_num_seqs=num_sequences,
        max_num_batched_tokens=8192,
        max_model_len=MAX_MODEL_LEN,
        num_pages=num_sequences * MAX_MODEL_LEN // PAGE_SIZE,
        prefill_policy="mixed",
        page_size=PAGE_SIZE,
        async_scheduling=True,
    )
    decoder: Any = NoDecoder()
    kv_cache: Any = None
    runner = Runner(
        decoder,
        kv_cache,
        Sampler(num_sequences, VOCAB, device),
        SlotTable(num_sequences, MAX_MODEL_LEN // PAGE_SIZE, device),
        transfers_to(device),
        page_size=PAGE_SIZE,
        steppers=(NoKernels(num_sequences, device),),
    )
    engine = Engine(config, runner, eos_token_ids=(2,))
    rng = random.Random(0)
    for number in range(num_sequences):
        prompt = tuple(rng.randrange(10, VOCAB) for _ in range(PROMPT_LEN + number % PAGE_SIZE))
        engine.add(Request(str(number), prompt, SamplingParams(max_tokens=None, seed=1), engine.clock()))
    while len(engine.scheduler.decoding) < num_sequences:
        engine.step()
    for _ in range(5):
        engine.step()
    return engine


def measure(num_sequences: int, num_steps: int, device: torch.device) -> dict[str, float]:
    """Median microseconds of a whole step and of its parts, of one run each."""
    engine = make_engine(num_sequences, device)
    steps = []
    gc.collect()
    for _ in range(num_steps):
        start = time.perf_counter()
        events = engine.step()
        steps.append(time.perf_counter() - start)
        assert len(events) == num_sequences
    watch = Stopwatch()
    scheduler, runner = engine.scheduler, engine._executor
    for owner, method, name in (
        (scheduler, "schedule", "schedule"),
        (scheduler, "commit", "commit"),
        (runner, "submit", "submit"),
        (engine, "_read_oldest", "read"),
    ):
        setattr(owner, method, watch.around(name, getattr(owner, method)))
    for _ in range(num_steps):
        engine.step()
    # Reading the oldest step contains its commit.
    watch.seconds["read"] = [
        whole - commit for whole, commit in zip(watch.seconds["read"], watch.seconds["commit"], strict=True)
    ]
    parts = {name: statistics.median(seconds) * 1e6 for name, seconds in watch.seconds.items()}
    return {"step": statistics.median(steps) * 1e6, **parts}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = []
    for num_sequences in args.sequences:
        runs = [measure(num_sequences, args.steps, torch.device(args.device)) for _ in range(args.repeats)]
        best = {f"{name}_us": round(min(run[name] for run in runs), 1) for name in ("step", *PARTS)}
        report.append({"sequences": num_sequences, "device": args.device, **best})
        print(json.dumps(report[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
