"""How long does it take from the start of a process to the first token, with caches cold and warm?

    PYTHONPATH=. python3 benchmarks/startup.py --json results.json

Every start is a process of its own. The first finds empty folders where Triton, torch, the CUDA driver, numba
and this engine keep what they have compiled (cold); --repeats more find what it left there (warm). What the
system holds of files in memory is not emptied. The clock runs from the creation of the process to the line
that it prints when it has a token.

The parts of a start, in seconds: `imports` (the interpreter, torch, this engine); `device` (the GPU's
context); `weights`; `engine` (pages, tables, the weight tape with its kernel); `first_token` (a prompt; with
look-ahead the first decode step is submitted, and its kernels prepared, before this token is read);
`second_token`. What of them were compilations, by the clock of each: compile_triton_s, compile_cuda_s;
record_graph_s contains those within it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CACHE_VARIABLES = (
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "NUMBA_CACHE_DIR",
    "TINY_VLLM_CACHE",
)
PARTS = ("imports", "device", "weights", "engine", "first_token", "second_token")
NEW_TOKENS = 3


class Clock:
    """What took how long, by name; parts that happen several times are added up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.counts[name] = self.counts.get(name, 0) + 1

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            with self.part(name):
                return function(*args, **options)

        return run


def watch_compilers(clock: Clock) -> None:
    """Note what compiling and capturing takes from now on."""
    from tiny_vllm.engine.decode_graphs import DecodeGraphs
    from tiny_vllm.kernels.cuda import nvrtc
    from tiny_vllm.kernels.triton_support import HAS_TRITON

    nvrtc._compile = clock.timed("compile_cuda", nvrtc._compile)
    DecodeGraphs._record = clock.timed("record_graph", DecodeGraphs._record)  # type: ignore[method-assign]
    if HAS_TRITON:
        import triton

        def note(*, times: Any, cache_hit: bool, **_: Any) -> None:
            clock.add("load_triton" if cache_hit else "compile_triton", times.total / 1e6)

        triton.knobs.compilation.listener = note


def start(options: dict[str, Any], input_len: int, spawned: float) -> None:
    """In the new process: load, generate, say how long each part took. spawned: its creation, time.time()."""
    clock = Clock()
    clock.add("imports", time.time() - spawned)
    with clock.part("imports"):
        import torch

        from tiny_vllm.engine import build
        from tiny_vllm.types import Request, SamplingParams
    config = build.EngineConfig(**options)
    with clock.part("device"):
        if torch.cuda.is_available() and config.device != "cpu":
            torch.zeros(1, device="cuda").item()
    watch_compilers(clock)
    build.load_weights = clock.timed("weights", build.load_weights)
    with clock.part("engine"):
        plan = build.plan_engine(config)
        engine = build.build_engine(plan)
    clock.seconds["engine"] -= clock.seconds["weights"]
    generator = random.Random(0)
    prompt = tuple(generator.choices(range(plan.checkpoint.spec.vocab_size), k=input_len))
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    engine.add(Request("first", prompt, params, engine.clock()))
    names = iter(("first_token", "second_token", "third_token"))
    before = time.perf_counter()
    while engine.has_work:
        for event in engine.step():
            print(f"token {event.token_id}", flush=True)
            now = time.perf_counter()
            clock.add(next(names), now - before)
            before = now
    print(json.dumps({"seconds": clock.seconds, "counts": clock.counts, "engine": asdict(plan.config)}))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One start with the caches in folder."""
    environment = {**os.environ, **{name: str(folder / name.lower()) for name in CACHE_VARIABLES}}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    options = {"model": str(args.model) if args.model else None, "load_format": args.load_format}
    options |= {"device": args.device, **json.loads(args.engine)}
    job = json.dumps({"options": options, "input_len": args.input_len, "spawned": time.time()})
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, __file__, "--start", job], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    moments = []
    last = ""
    for line in process.stdout:
        if line.startswith("token "):
            moments.append(time.perf_counter() - begin)
        last = line
    if process.wait() != 0 or not moments:
        raise RuntimeError(f"the process ended with {process.returncode} after {len(moments)} tokens")
    said = json.loads(last)
    row = {"seconds_to_first_token": moments[0], "seconds_to_second_token": moments[1]}
    row |= {name: said["seconds"][name] for name in PARTS}
    for name in ("compile_triton", "load_triton", "compile_cuda", "record_graph"):
        row[f"{name}_s"] = said["seconds"].get(name, 0.0)
        row[f"num_{name}"] = said["counts"].get(name, 0)
    return {**row, "engine_options": said["engine"]}


def show(row: dict[str, Any]) -> None:
    cells = (
        f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
    )
    print("  ".join(cells), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--model", type=Path, default=ROOT / "benchmarks" / "shapes" / "llama-3.2-1b")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--engine", default="{}", help="more engine options, as JSON")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2, help="starts with warm caches (default: 2)")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start:
        start(**json.loads(args.start))
        return 0
    content: dict[str, Any] = {
        "benchmark": "startup",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "python": sys.version.split()[0],
        "load_average": os.getloadavg()[0],
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as name:
        for number in range(1 + args.repeats):
            row = measure(args, Path(name))
            content["engine"] = row.pop("engine_options")
            row = {"caches": "warm" if number else "cold", **row}
            show(row)
            content["rows"].append(row)
            if args.json is not None:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
