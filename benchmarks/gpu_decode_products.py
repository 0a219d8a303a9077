"""Which way of computing the products of a decode step of 9 to 256 rows is fastest?

    PYTHONPATH=. python3 benchmarks/gpu_decode_products.py --json products.json [--models 1b] [--rows 65,256]

Shapes of Llama-3.2-1B (`1b`), Llama-3.1-8B (`8b`) or Qwen3-0.6B (`qwen3-0.6b`) in BF16. us of cuBLAS, of
Triton's tiles, of the kernel for prompts (gate and up) and of variants of hopper_linear/decode_product.cu:
those that `estimate_cycles` likes best. Each is checked against FP32, and then timed as a chain over weights
that push each other out of the cache, with programmatic dependent launch.
Output and down are also timed with the kernel behind them, which adds the parts. A variant that fails, or
ends the process's use of the GPU, is reported, and the next one is tried in another process. When --seconds
are over, what is left is not measured. At the end: the sum of a layer's products without the kernel, with the
chosen variants and with the best.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_timing import Report, rotate, time_graph
from tiny_vllm.kernels.finish_rows import finish_rows
from tiny_vllm.kernels.gated_activation import gated_activation, gated_activation_ref
from tiny_vllm.kernels.hopper_linear.decode_launch import (
    Variant,
    candidates,
    choose_variant,
    compile_product,
    estimate_cycles,
    launch_product,
    load_product,
)
from tiny_vllm.kernels.hopper_linear.launch import multiply_gated
from tiny_vllm.kernels.tiled_linear import choose_split_tiles, split_linear, tiled_linear

# Rows of W (gated: of gate), terms.
Matrix = tuple[int, int]
MODELS: dict[str, dict[str, Matrix]] = {
    "1b": {"qkv": (3072, 2048), "output": (2048, 2048), "gate_up": (8192, 2048), "down": (2048, 8192)},
    "8b": {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (14336, 4096), "down": (4096, 14336)},
    "qwen3-0.6b": {
        "qkv": (4096, 1024), "output": (1024, 2048), "gate_up": (3072, 1024), "down": (1024, 3072),
    },
}  # fmt: skip
ROWS = (256, 128, 192, 96, 65)
WITH_NEXT = ("output", "down")  # a kernel follows that adds the parts
EPS = 1e-5
# Of the norm of the answer: BF16 rounds each value, FP32 parts only their sums.
MAX_ERROR, MAX_ERROR_OF_PARTS = 2**-8, 1e-4
BEST_ESTIMATES = 24
DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class Case:
    """One way of one product. how: cublas, triton, prompts or ours, which has a variant."""

    model: str
    product: str
    rows: int
    how: str
    variant: Variant | None = None

    @property
    def gated(self) -> bool:
        return self.product == "gate_up"

    @property
    def matrix(self) -> Matrix:
        return MODELS[self.model][self.product]

    def describe(self) -> dict[str, Any]:
        row: dict[str, Any] = dict(model=self.model, product=self.product, rows=self.rows, how=self.how)
        if (v := self.variant) is not None:
            width, terms = self.matrix
            cycles = estimate_cycles(v, self.rows, width, terms, self.gated)
            row["variant"] = (
                f"{v.rows}x{v.columns} splits={v.splits} row_blocks={v.row_blocks} stages={v.stages}"
            )
            row["blocks"] = v.count_blocks(width, self.gated)
            row["estimate_kcycles"] = round(cycles / 1000, 1)
            row["chosen"] = v == choose_variant(self.rows, width, terms, self.gated)
        return row


def variants(rows: int, width: int, terms: int, gated: bool) -> list[Variant]:
    """The best by estimate."""

    def cycles(variant: Variant) -> float:
        return estimate_cycles(variant, rows, width, terms, gated)

    return sorted(candidates(rows, width, terms, gated), key=cycles)[:BEST_ESTIMATES]


def make_cases(models: list[str], rows: list[int], products: list[str]) -> Iterator[Case]:
    for model in models:
        for count in rows:
            for product in products:
                yield Case(model, product, count, "cublas")
                if product == "gate_up" or choose_split_tiles(count) is not None:
                    yield Case(model, product, count, "triton")
                if product == "gate_up" and count > 128:
                    yield Case(model, product, count, "prompts")
                for variant in variants(count, *MODELS[model][product], product == "gate_up"):
                    yield Case(model, product, count, "ours", variant)


def compile_case(case: Case) -> str | None:
    """What went wrong; the binary goes to the cache on disk."""
    assert case.variant is not None
    try:
        compile_product(torch.bfloat16, case.variant.kernel, case.gated)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


class Bench:
    """Inputs on the GPU, made once, and the timing of cases over them."""

    def __init__(self) -> None:
        self.weights = cache(self._weights)
        self.inputs = cache(self._inputs)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)

    def _weights(self, matrix: Matrix, gated: bool) -> list[Tensor]:
        width, terms = matrix
        return rotate(lambda: self.random(width * (2 if gated else 1), terms).mul_(terms**-0.5))

    def _inputs(self, rows: int, matrix: Matrix, gated: bool) -> tuple[Tensor, Tensor]:
        """x, and the FP32 answer for the first weights."""
        x = self.random(rows, matrix[1])
        y = F.linear(x.float(), self.weights(matrix, gated)[0].float())
        return x, gated_activation_ref(y, "silu") if gated else y

    def multiply(self, case: Case) -> Callable[[Tensor, Tensor], Tensor]:
        """x, weight -> parts; gated: the result."""
        gated = case.gated
        if case.how == "cublas":
            return _cublas_gated if gated else _cublas
        if case.how == "triton":
            return partial(tiled_linear, gated=True, pdl=True) if gated else partial(split_linear, pdl=True)
        if case.how == "prompts":
            return _prompts
        assert case.variant is not None
        kernel = load_product(torch.bfloat16, case.variant.kernel, gated, DEVICE)
        return partial(launch_product, kernel, variant=case.variant, gated=gated, pdl=True)

    def run(self, case: Case) -> dict[str, Any]:
        weights = self.weights(case.matrix, case.gated)
        x, expected = self.inputs(case.rows, case.matrix, case.gated)
        multiply = self.multiply(case)
        actual = multiply(x, weights[0])
        is_exact = actual.dtype == torch.float32
        actual = actual.float() if case.gated else actual.float().sum(0)
        error = float((actual - expected).norm() / expected.norm())
        if not error < (MAX_ERROR_OF_PARTS if is_exact else MAX_ERROR):
            raise AssertionError(f"wrong: relative error {error:.3g}")
        seconds = time_graph(lambda: [multiply(x, w) for w in weights], rounds=5, replays=4) / len(weights)
        row: dict[str, Any] = dict(us=seconds * 1e6, tbps=weights[0].nbytes / seconds / 1e12, error=error)
        if case.product in WITH_NEXT:
            width = case.matrix[0]
            norm, residual = torch.ones(width, device=DEVICE), self.random(case.rows, width)

            def chain() -> list[tuple[Tensor, Tensor]]:
                return [finish_rows(multiply(x, w), residual, norm, EPS, pdl=True) for w in weights]

            row["us_with_next"] = time_graph(chain, rounds=5, replays=4) / len(weights) * 1e6
        return row


def _cublas(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight).unsqueeze(0)


def _cublas_gated(x: Tensor, weight: Tensor) -> Tensor:
    return gated_activation(F.linear(x, weight), "silu")


def _prompts(x: Tensor, weight: Tensor) -> Tensor:
    y = multiply_gated(x, weight)
    assert y is not None, "the kernel does not compile"
    return y


@torch.inference_mode()
def measure(cases: list[Case], answers: Connection) -> None:
    """In a process of its own: an answer to each case in order. Ends it when the GPU is lost."""
    bench = Bench()
    for case in cases:
        try:
            answers.send(bench.run(case))
        except Exception as error:
            answer: dict[str, Any] = dict(failed=f"{type(error).__name__}: {str(error)[:200]}")
            try:
                torch.cuda.synchronize()
            except Exception:
                answers.send(answer | dict(gpu="lost"))
                os._exit(1)
            answers.send(answer)


def measure_all(cases: list[Case], report: Report, deadline: float) -> None:
    context = get_context("spawn")
    while cases and time.monotonic() < deadline:
        here, there = context.Pipe()
        worker = context.Process(target=measure, args=(cases, there), daemon=True)
        worker.start()
        there.close()
        try:
            while cases and here.poll(max(deadline - time.monotonic(), 0)):
                answer = here.recv()
                report.add(**cases[0].describe(), **answer)
                cases = cases[1:]
                if "gpu" in answer:
                    break
        except EOFError:
            report.add(**cases[0].describe(), failed="the process ended")
            cases = cases[1:]
        worker.terminate()
        worker.join()
        report.write()
    if cases:
        print(f"out of time: {len(cases)} cases are not measured, from here on: {cases[0].describe()}")


def add_sums(report: Report) -> None:
    """us of a layer's products, output and down with the kernels behind them: as on other GPUs (by Triton, or
    by cuBLAS where it has no tiles), by cuBLAS, with the chosen variants, with the best ones."""
    rows = [row for row in report.rows if "us" in row]
    for model, count in dict.fromkeys((row["model"], row["rows"]) for row in rows):
        sums = dict.fromkeys(("others", "cublas", "chosen", "best"), 0.0)
        names: dict[str, str] = {}
        for product in MODELS[model]:
            key = "us_with_next" if product in WITH_NEXT else "us"
            own = [
                r
                for r in rows
                if (r["model"], r["rows"], r["product"]) == (model, count, product) and key in r
            ]
            times = {r["how"]: r[key] for r in own if r["how"] != "ours"}
            ours = [r for r in own if r["how"] == "ours"]
            if "cublas" not in times or not ours:
                break
            best = min(ours, key=lambda row: row[key])
            sums["others"] += times.get("triton", times["cublas"])
            sums["cublas"] += times["cublas"]
            sums["chosen"] += next((r[key] for r in ours if r["chosen"]), float("nan"))
            sums["best"] += best[key]
            names[product] = f"{best['variant']}: {best[key]:.1f}"
        else:
            report.add(model=model, rows=count, product="sum", **sums, variants=names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", default="1b")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--products", default="qkv,output,down,gate_up")
    parser.add_argument("--seconds", type=float, default=55, help="of all, from the start of the process on")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds - 2
    models, products = arguments.models.split(","), arguments.products.split(",")
    cases = list(make_cases(models, [int(rows) for rows in arguments.rows.split(",")], products))
    kernels = {(c.variant.kernel, c.gated): c for c in cases if c.variant is not None}
    # Copies of this process, while it has not touched the GPU.
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        problems = dict(zip(kernels, pool.map(compile_case, kernels.values()), strict=True))
    report = Report(arguments.json)
    kept = []
    for case in cases:
        key = None if case.variant is None else (case.variant.kernel, case.gated)
        problem = None if key is None else problems[key]
        if problem is None:
            kept.append(case)
        else:
            report.add(**case.describe(), failed=problem)
    print(f"{len(kept)} cases, {len(kernels)} kernels, {deadline - time.monotonic():.0f} s left", flush=True)
    measure_all(kept, report, deadline)
    add_sums(report)
    report.write()


if __name__ == "__main__":
    main()
