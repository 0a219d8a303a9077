"""What power do decode steps and prompts take on this card, and what do they reach while it lasts?

    PYTHONPATH=. python3 benchmarks/gpu_power.py --json power.json [--models 1b] [--rows 64,128]

A card that is at its power limit lowers its clock, so what a kernel reaches in a short run it does not reach
in a long one. Each part runs for SECONDS: reading alone (read_probe), a whole decode step with contexts of
800, its attention, each of its products, and the products of prompts of 16,384 tokens. us of one run (of
all layers), what nvidia-smi says of power and clock meanwhile, the bytes and operations that must be per
second, and joules of one run.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_decode_chain import DEVICE, Workload, count_weight_bytes, make_spec, make_weights
from benchmarks.gpu_timing import Report
from tiny_vllm.kernels.cuda import read_probe
from tiny_vllm.kernels.hopper_linear import decode_launch
from tiny_vllm.kernels.hopper_linear.launch import multiply_gated
from tiny_vllm.models.rope import rope_table
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.models.weights import ModelWeights

CONTEXT, TEMPERATURE, PROMPT_TOKENS = 800, 0.6, 16384
# Of a part; power and clock are those of its later half.
SECONDS = 0.8
REPLAYS = 8
MATRICES = "qkv", "output", "gate_up", "down"


class Meter:
    """Power [W] and clock [MHz], about every 50 ms."""

    def __init__(self) -> None:
        self.readings: list[tuple[float, float, float]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        command = [
            "nvidia-smi", "--query-gpu=power.draw.instant,clocks.sm", "--format=csv,noheader,nounits",
            "-lms", "50",
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            thread = threading.Thread(target=self._read, args=(process.stdout,))
            thread.start()
            try:
                yield
            finally:
                process.terminate()
                thread.join()

    def _read(self, lines: Iterator[str]) -> None:
        for line in lines:
            watts, mhz = map(float, line.split(","))
            self.readings.append((time.monotonic(), watts, mhz))

    def since(self, start: float) -> tuple[float, float]:
        _, watts, mhz = zip(*(reading for reading in self.readings if reading[0] >= start), strict=True)
        return statistics.mean(watts), statistics.mean(mhz)


def capture(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    return graph, kept


def measure(
    report: Report, meter: Meter, run: Callable[[], Any], *, before: Callable[[], None] = lambda: None,
    num_bytes: float = 0, operations: float = 0, **what: Any,
) -> None:  # fmt: skip
    """num_bytes, operations: of one run, if they are to be told."""
    graph, kept = capture(run)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    runs, milliseconds, start = 0, 0.0, time.monotonic()
    while time.monotonic() < start + SECONDS:
        before()
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        runs += REPLAYS
        milliseconds += begin.elapsed_time(end)
    watts, mhz = meter.since(start + SECONDS / 2)
    seconds = milliseconds / runs / 1e3
    if num_bytes:
        what["tb_per_s"] = num_bytes / seconds / 1e12
    if operations:
        what["tflops"] = operations / seconds / 1e12
    report.add(**what, us=seconds * 1e6, watts=watts, mhz=mhz, joules=watts * seconds)
    del kept


def measure_reading(report: Report, meter: Meter) -> None:
    chunks = 2_500_000_000 // read_probe.CHUNK_BYTES
    buffer = torch.empty(chunks * read_probe.CHUNK_BYTES // 4, dtype=torch.int32, device=DEVICE).random_()
    first_words = torch.empty(report.machine["multiprocessors"], dtype=torch.int32, device=DEVICE)
    for window in read_probe.WINDOWS:
        probe = read_probe.load_probe(window, DEVICE)
        read = partial(read_probe.read_once, probe, buffer, window, first_words)
        measure(report, meter, read, num_bytes=buffer.nbytes, part="reading", window=window)


def multiply_all(weights: ModelWeights, name: str, x: Tensor) -> Tensor | None:
    y = None
    for layer in weights.layers:
        matrix = getattr(layer, name)
        if len(x) > decode_launch.MAX_ROWS:
            y = multiply_gated(x, matrix) if name == "gate_up" else F.linear(x, matrix)
        elif name == "gate_up":
            y = decode_launch.gated_product(x, matrix, True)
        else:
            y = decode_launch.split_product(x, matrix, True)
    return y


@torch.inference_mode()
def measure_products(report: Report, meter: Meter, weights: ModelWeights, rows: int, **what: Any) -> None:
    for name in MATRICES:
        matrix = getattr(weights.layers[0], name)
        x = torch.randn(rows, matrix.shape[1], device=DEVICE).bfloat16()
        values = matrix.numel() * len(weights.layers)
        run = partial(multiply_all, weights, name, x)
        measure(
            report, meter, run, num_bytes=2 * values, operations=2 * rows * values, rows=rows, part=name,
            **what,
        )  # fmt: skip


@torch.inference_mode()
def measure_step(report: Report, meter: Meter, work: Workload, model: str) -> None:
    rows, chain = len(work.slots), work.chain
    cached = 2 * work.spec.kv_values_per_token * rows * CONTEXT
    num_bytes = cached + count_weight_bytes(work.weights)
    measure(
        report, meter, work.step, before=work.rewind, num_bytes=num_bytes, model=model, rows=rows, part="step"
    )
    work.rewind()
    inputs = chain._read(work.state, work.slots)
    parts = torch.randn(1, rows, work.spec.qkv_size, device=DEVICE)

    def attend() -> list[Tensor]:
        return [
            chain._rope_and_attend(parts, layer, *caches, inputs, work.state.page_table, work.longest)
            for layer, caches in chain._layers_with_caches()
        ]

    measure(report, meter, attend, num_bytes=cached, model=model, rows=rows, part="attention")


def measure_model(report: Report, meter: Meter, spec: ModelSpec, model: str, all_rows: list[int]) -> None:
    with torch.inference_mode():
        weights, cos_sin = make_weights(spec), rope_table(spec.rope, max_len=8192).to(DEVICE)
    for rows in all_rows:
        work = Workload(spec, weights, cos_sin, rows, CONTEXT, True)
        work.temperature.fill_(TEMPERATURE)
        report.section(f"{model}, {rows} rows", partial(measure_step, report, meter, work, model))
        del work
        products = partial(measure_products, report, meter, weights, model=model)
        report.section(f"{model}, products of {rows} rows", partial(products, rows=rows))
    report.section(f"{model}, products of prompts", partial(products, rows=PROMPT_TOKENS))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--models", default="8b,1b,qwen3-0.6b")
    parser.add_argument("--rows", default="64,128,256")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report, meter = Report(arguments.json), Meter()
    with meter.running():
        report.section("reading", partial(measure_reading, report, meter))
        for model in arguments.models.split(","):
            rows = list(map(int, arguments.rows.split(",")))
            measure_model(report, meter, make_spec(model), model, rows)
            torch.cuda.empty_cache()
    print(f"failed: {report.failures or 'nothing'}")


if __name__ == "__main__":
    main()
