"""What does a step cost the host? Scheduling, submitting, reading and committing, without a model.

    PYTHONPATH=. python benchmarks/step_overhead.py [--sequences 1 8 64 256] [--steps 400] [--repeats 5]
        [--device cuda] [--json FILE]
    PYTHONPATH=. python benchmarks/step_overhead.py prompts [--prompts 64] [--length 100 1024] [--repeats 5]

The kernels of a decode step are replaced by tokens drawn in advance; everything else is the engine's own,
planning one step ahead. Prints microseconds per step: the median of each repeat's steps, and of these the
smallest, because other programs on the machine only ever add. On a GPU, `submit` contains the copies to and
from the device, and nothing waits for them.

`prompts` calls `LLM.generate` for prompts of token ids, one new token each, with a layer of random weights
that never runs. In milliseconds of the thread's processor time, because its turns are shorter than this takes
where others want the core; the smallest of the repeats. first: from the call to the first step's forward
pass, when a GPU would begin; per_step: from one forward pass to the next, and its parts; last: from the last
one to the outputs. Every repeat has prompts of its own. Run it with PYTHONPATH at another commit for the
figures before a change.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import tempfile
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
from tiny_vllm.llm import LLM
from tiny_vllm.models.batch import ForwardBatch
from tiny_vllm.types import Request, SamplingParams
from tiny_vllm.weights.bundled import bundled_model_path

PAGE_SIZE = 16
PROMPT_LEN = 128
VOCAB = 1000
MAX_MODEL_LEN = 8192
PARTS = ("schedule", "submit", "read", "commit")
PROMPT_VOCAB = 49152
SMALL_MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": PROMPT_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
}


class NoDecoder:
    """Prompts are answered with noise."""

    fused_decode = None

    def __init__(self) -> None:
        self.begun: list[float] = []
        """The thread's processor time at the beginning of each forward pass, in seconds."""

    def forward(self, batch: ForwardBatch, kv_cache: object) -> Tensor:
        self.begun.append(time.thread_time())
        num_rows = batch.num_decodes + batch.num_prefills if batch.ends_only else len(batch.token_ids)
        return torch.zeros(num_rows, 1, device=batch.token_ids.device)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.randn(len(hidden), VOCAB, device=hidden.device)


class NoKernels:
    """A `DecodeStepper` that leaves everything as it is."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.max_rows = num_slots
        self._tokens = torch.randint(10, VOCAB, (num_slots,), device=device)

    def draw(self, slots: Tensor, max_context_len: int, tokens: Tensor) -> None:
        tokens.copy_(self._tokens[: slots.shape[0]], non_blocking=True)

    def logits(self, slots: Tensor, max_context_len: int) -> Tensor:
        raise NotImplementedError


class Stopwatch:
    """Seconds of every call of an engine's parts, by name, from now on."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: dict[str, list[float]] = {name: [] for name in PARTS}
        for owner, method, name in (
            (engine.scheduler, "schedule", "schedule"),
            (engine.scheduler, "commit", "commit"),
            (engine._executor, "submit", "submit"),
            (engine, "_read_oldest", "read"),
        ):
            setattr(owner, method, self.around(name, getattr(owner, method)))

    def medians(self) -> dict[str, float]:
        """Seconds of each part, and no call any more. Reading the oldest step contains its commit."""
        reads = zip(self.seconds["read"], self.seconds["commit"], strict=True)
        self.seconds["read"] = [whole - commit for whole, commit in reads]
        medians = {name: statistics.median(seconds) for name, seconds in self.seconds.items()}
        self.seconds.update({name: [] for name in PARTS})
        return medians

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = self._clock()
            result = function(*args)
            self.seconds[name].append(self._clock() - start)
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
    watch = Stopwatch(engine)
    for _ in range(num_steps):
        engine.step()
    parts = {name: seconds * 1e6 for name, seconds in watch.medians().items()}
    return {"step": statistics.median(steps) * 1e6, **parts}


def measure_prompts(num_prompts: int, lengths: list[int], num_repeats: int) -> dict[str, Any]:
    """Milliseconds of the host for prompts of random lengths from the first to the last of `lengths`."""
    torch.set_num_threads(1)  # what stands in for launches has no use for more, and threads wait for cores
    rng = random.Random(0)
    runs: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SMALL_MODEL), encoding="utf-8")
        llm = LLM(
            folder,
            load_format="dummy",
            tokenizer=str(bundled_model_path()),
            dtype="bfloat16",
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            max_model_len=MAX_MODEL_LEN,
            num_pages=num_prompts * (lengths[-1] // PAGE_SIZE + 2),
            page_size=PAGE_SIZE,
            async_scheduling=True,
            fused_cpu_decode=False,
        )
    engine = llm._live_engine()
    runner: Any = engine._executor
    watch = Stopwatch(engine, time.thread_time)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    with llm:
        for _ in range(num_repeats):
            prompts = [
                [rng.randrange(10, PROMPT_VOCAB) for _ in range(rng.randint(lengths[0], lengths[-1]))]
                for _ in range(num_prompts)
            ]
            decoder = runner._decoder = NoDecoder()
            gc.collect()
            start = time.thread_time()
            llm.generate(prompts, params, use_tqdm=False)
            end = time.thread_time()
            begun = decoder.begun
            steps = [after - before for before, after in itertools.pairwise(begun)]
            times = {"first": begun[0] - start, "per_step": statistics.median(steps), "last": end - begun[-1]}
            runs.append({**times, **watch.medians(), "all": end - start})
    best = {f"{name}_ms": round(min(run[name] for run in runs) * 1e3, 2) for name in runs[0]}
    return {"prompts": num_prompts, "lengths": lengths, "steps": len(begun), **best}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("decodes", "prompts"), default="decodes")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, nargs="+", default=[2048], help="one, or shortest and longest")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = []
    if args.what == "prompts":
        report.append(measure_prompts(args.prompts, args.length, args.repeats))
        print(json.dumps(report[-1]), flush=True)
    for num_sequences in args.sequences if args.what == "decodes" else ():
        runs = [measure(num_sequences, args.steps, torch.device(args.device)) for _ in range(args.repeats)]
        best = {f"{name}_us": round(min(run[name] for run in runs), 1) for name in ("step", *PARTS)}
        report.append({"sequences": num_sequences, "device": args.device, **best})
        print(json.dumps(report[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
