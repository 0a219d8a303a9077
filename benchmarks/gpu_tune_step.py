"""Which tiles make a whole decode step fastest, by number of rows?

    PYTHONPATH=. python3 benchmarks/gpu_tune_step.py --output step.json [--rows 1,8,64] [--seconds 150]

Llama-3.2-1B's shape in BF16. Kernels of a chain overlap and push each other out of the caches, so one
that is fastest alone need not be fastest in a step: here every variant of a kernel is timed within the whole
step, everything else as the launch tables have it, and in the end the best variants together. Each variant's
logits are compared with the tables' before it is timed. Worker processes compile ahead.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import gpu_decode_chain
from benchmarks.gpu_decode_chain import Workload, make_spec, make_weights, relative_error
from benchmarks.gpu_timing import Report, time_replays
from tests.helpers.kernel_compiler import compiling
from tiny_vllm.kernels import finish_rows, norm_linear, paged_decode_attention, qkv_rope_and_cache
from tiny_vllm.kernels.paged_decode_attention import AttentionTiles
from tiny_vllm.kernels.tiled_linear import (
    Tiles,
    launch_tiled_product,
    split_linear,
    split_linear_ref,
    tiled_linear,
    tiled_linear_ref,
)
from tiny_vllm.kernels.triton_support import has_pdl
from tiny_vllm.models import decode_chain
from tiny_vllm.models.rope import rope_table

MATRICES = {
    "qkv": (3072, 2048),
    "output": (2048, 2048),
    "gate_up": (16384, 2048),
    "down": (2048, 8192),
    "lm_head": (128256, 2048),
}
# Two orders of summation in BF16 differ by about what BF16 costs against FP32.
MAX_DIFFERENCE = 0.06
# What a variant must gain to be taken: twice the spread of repeated measurements.
MIN_GAIN = 0.002
REPLAYS = 20


@dataclass(frozen=True)
class Variant:
    """group: what varies, at most one of a group at a time; value: how, see `applied`."""

    group: str
    value: Any

    def __str__(self) -> str:
        return f"{self.group} {self.value}"


# Tiled products: rows of W, values of K, stages, columns ahead, warps, most rows of x; splits of K.
SPLIT_CHOICES = {
    "qkv": (
        (64, 128, 4, 128, 4, 128, 4), (64, 64, 5, 128, 4, 128, 4), (64, 64, 5, 128, 4, 128, 2),
        (64, 128, 4, 512, 4, 128, 2), (128, 64, 4, 128, 8, 128, 8), (64, 128, 3, 256, 4, 128, 2),
    ),
    "output": (
        (64, 128, 4, 512, 4, 128, 4), (64, 64, 5, 256, 4, 128, 4), (64, 64, 4, 128, 4, 128, 8),
        (128, 64, 4, 128, 4, 128, 8), (64, 128, 3, 256, 4, 128, 4), (64, 128, 4, 256, 4, 128, 2),
    ),
    "down": (
        (64, 128, 4, 512, 4, 128, 4), (64, 128, 4, 0, 4, 128, 4), (64, 128, 4, 128, 4, 128, 8),
        (64, 64, 6, 128, 4, 128, 8), (64, 64, 4, 256, 4, 128, 4), (128, 64, 5, 128, 4, 128, 8),
        (128, 128, 3, 128, 8, 128, 8),
    ),
    "gate_up": (
        (64, 128, 4, 512, 4, 128, 1), (64, 128, 4, 256, 4, 128, 1), (64, 128, 4, 0, 4, 128, 1),
        (64, 128, 3, 128, 4, 128, 1), (64, 64, 6, 256, 4, 128, 1), (64, 64, 4, 256, 4, 128, 1),
        (64, 64, 5, 128, 8, 128, 1), (128, 64, 4, 128, 8, 128, 1),
    ),
    "lm_head": (
        (64, 64, 5, 128, 4, 128, 1), (128, 64, 4, 128, 4, 128, 1), (128, 128, 3, 128, 8, 128, 1),
        (128, 64, 5, 128, 8, 128, 1), (256, 64, 3, 0, 8, 128, 1),
    ),
}  # fmt: skip
# More than 128 rows of x in one tile, so that the matrix is read once.
WIDE_CHOICES = {
    "qkv": (
        (64, 64, 4, 128, 4, 256, 2), (64, 64, 4, 128, 4, 256, 4), (64, 64, 4, 128, 8, 256, 2),
        (128, 64, 4, 128, 8, 256, 4),
    ),
    "output": (
        (64, 64, 4, 128, 4, 256, 4), (64, 64, 4, 128, 8, 256, 4), (64, 64, 4, 128, 4, 256, 2),
        (128, 64, 4, 128, 8, 256, 4),
    ),
    "down": (
        (64, 64, 4, 128, 4, 256, 4), (64, 64, 4, 128, 8, 256, 4), (64, 64, 4, 128, 8, 256, 2),
        (128, 64, 4, 128, 8, 256, 8), (128, 64, 4, 128, 8, 256, 4),
    ),
    "gate_up": ((64, 64, 4, 0, 8, 256, 1), (64, 64, 4, 128, 8, 256, 1), (64, 32, 6, 128, 8, 256, 1)),
    "lm_head": ((128, 64, 4, 0, 8, 256, 1), (64, 64, 4, 0, 4, 256, 1), (256, 64, 4, 0, 8, 128, 1)),
}  # fmt: skip
# Products of few rows: rows of W, values of K, tiles ahead, warps.
ONE_ROW_CHOICES = {
    "qkv": ((4, 2048, 1, 4), (8, 2048, 1, 8), (8, 2048, 1, 4)),
    "output": ((4, 2048, 1, 4), (2, 2048, 1, 2), (8, 2048, 1, 4)),
    "gate_up": ((8, 2048, 1, 8), (8, 2048, 1, 4), (4, 2048, 1, 4), (2, 2048, 1, 2)),
    "down": ((4, 8192, 1, 16), (2, 8192, 1, 4), (4, 8192, 1, 8), (8, 2048, 2, 4)),
    "lm_head": ((8, 2048, 1, 4), (16, 2048, 1, 4), (8, 2048, 1, 8)),
}
DIRECT_CHOICES = {
    "qkv": ((16, 512, 3, 4), (16, 512, 2, 4), (16, 1024, 2, 8)),
    "output": ((16, 512, 3, 4), (16, 512, 2, 4), (16, 1024, 2, 8)),
    "gate_up": ((32, 512, 2, 4), (32, 256, 4, 4), (16, 512, 2, 4), (32, 256, 2, 4), (16, 256, 4, 4)),
    "down": ((16, 512, 4, 8), (16, 1024, 2, 8), (16, 512, 4, 4)),
    "lm_head": ((32, 256, 4, 4), (16, 512, 4, 4), (16, 256, 4, 4)),
}
# keys per tile, parts, warps, stages
ATTENTION_CHOICES = {
    1: ((32, 8, 4, 2), (64, 4, 4, 2), (64, 8, 4, 2), (128, 8, 4, 2)),
    8: ((64, 4, 4, 2), (64, 16, 4, 2), (128, 8, 8, 2), (128, 4, 4, 2)),
    16: ((64, 2, 4, 2), (64, 8, 4, 2), (128, 4, 4, 2), (64, 4, 4, 3)),
    32: ((64, 1, 4, 2), (64, 4, 4, 2), (128, 2, 4, 2), (64, 2, 4, 3)),
    64: ((64, 1, 4, 3), (64, 2, 4, 2), (128, 1, 4, 2), (64, 1, 2, 3)),
    128: ((64, 1, 4, 3), (32, 1, 2, 4), (128, 1, 4, 2), (64, 1, 2, 3)),
    256: ((64, 1, 4, 3), (32, 1, 2, 4), (128, 1, 4, 3), (64, 1, 2, 3)),
}


def make_variants(rows: int) -> Iterator[Variant]:
    if rows <= 16:
        yield Variant("MAX_SMALL_ROWS", 0 if rows <= norm_linear.MAX_SMALL_ROWS else 16)
    if rows <= norm_linear.MAX_SMALL_ROWS:
        for name, choices in (ONE_ROW_CHOICES if rows == 1 else DIRECT_CHOICES).items():
            for choice in choices:
                yield Variant(name, choice)
    else:
        for warps in (2, 8, 16):
            yield Variant("finish_rows", warps)
        for name, choices in SPLIT_CHOICES.items():
            for tiles in (*choices, *(WIDE_CHOICES[name] if rows > 128 else ()), "cublas"):
                yield Variant(name, tiles)
    nearest = max(batch for batch in ATTENTION_CHOICES if batch <= rows)
    for tiles in ATTENTION_CHOICES[nearest]:
        yield Variant("attention", tiles)


def _product(choices: dict[tuple[int, int], Any], op: Any, reference: Any) -> Any:
    """`split_linear` or `tiled_linear`, with the matrices of `choices` computed as those say."""

    def compute(x: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
        choice = choices.get(tuple(weight.shape))
        if choice is None:
            return op(x, weight, *args, **options)
        if choice == "cublas":
            return reference(x, weight, *args, **options)
        *tiles, splits = choice
        if op is split_linear:
            return launch_tiled_product(
                x, weight, Tiles(*tiles), splits=splits, out_dtype=torch.float32, pdl=args[0]
            )
        return launch_tiled_product(x, weight, Tiles(*tiles), *args, **options).squeeze(0)

    return compute


def _few_rows_tiles(choices: dict[tuple[int, int], Any]) -> Any:
    choose = norm_linear.choose_tiles

    def chosen(num_rows: int, num_weight_rows: int, K: int) -> dict[str, int]:
        choice = choices.get((num_weight_rows, K))
        if choice is None:
            return choose(num_rows, num_weight_rows, K)
        block_n, block_k, depth, num_warps = choice
        block_m = 1 if num_rows == 1 else 8
        splits = 1 if num_rows == 1 else num_warps
        return dict(
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, DEPTH=depth, NUM_SPLITS=splits,
            num_warps=num_warps,
        )  # fmt: skip

    return chosen


@contextmanager
def applied(variants: list[Variant]) -> Iterator[None]:
    """Inside, a step runs with the variants."""
    values = {variant.group: variant.value for variant in variants}
    products = {shape: values[name] for name, shape in MATRICES.items() if name in values}
    with ExitStack() as stack:

        def patch(module: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(module, name, value))

        if any(len(value) == 4 for value in products.values()):
            chosen = _few_rows_tiles(products)
            patch(norm_linear, "choose_tiles", chosen)
            patch(qkv_rope_and_cache, "choose_tiles", chosen)
        else:
            patch(decode_chain, "split_linear", _product(products, split_linear, split_linear_ref))
            patch(decode_chain, "tiled_linear", _product(products, tiled_linear, tiled_linear_ref))
        if "finish_rows" in values:
            patch(finish_rows, "NUM_WARPS", values["finish_rows"])
        if "MAX_SMALL_ROWS" in values:
            patch(decode_chain, "MAX_SMALL_ROWS", values["MAX_SMALL_ROWS"])
        if "attention" in values:
            tiles = AttentionTiles(*values["attention"])
            patch(paged_decode_attention, "choose_tiles", lambda *_: tiles)
        yield


def compile_step(rows: int, context: int, variants: list[Variant], pdl: bool) -> list[str]:
    """In a worker process, without the GPU: fills Triton's cache; says which kernels spill."""
    with mock.patch.object(gpu_decode_chain, "DEVICE", torch.device("meta")):
        spec = make_spec("1b")
        cos_sin = torch.empty(8192, spec.head_dim, device="meta")
        work = Workload(spec, make_weights(spec), cos_sin, rows, context, pdl)
        with applied(variants), compiling() as kernels:
            work.step()
    return [f"{kernel.name} {kernel.stack_bytes}" for kernel in kernels if kernel.stack_bytes]


class Bench:
    """One number of rows; expected: the tables' own logits."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.expected: Tensor | None = None

    @torch.inference_mode()
    def measure(self, variants: list[Variant]) -> dict[str, float]:
        """us of a step and its difference from the tables' logits."""
        work = self.work
        work.rewind()
        with applied(variants):
            work.step()
            work.rewind()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = work.step()
        graph.replay()
        torch.cuda.synchronize()
        if self.expected is None:
            self.expected = result.logits.clone()
        difference = relative_error(result.logits, self.expected)
        if not difference < MAX_DIFFERENCE:
            return dict(difference=difference)
        seconds = time_replays(graph, rounds=5, replays=REPLAYS, before_round=work.rewind, keep=result)
        return dict(us=seconds * 1e6, difference=difference)


def tune(
    report: Report, bench: Bench, rows: int, futures: dict[Variant | None, Future[list[str]]], deadline: float
) -> None:
    futures[None].result(timeout=max(deadline - time.monotonic(), 1))
    base = bench.measure([])["us"]
    report.add(rows=rows, variant="as the tables have it", us=base)
    best: dict[str, tuple[float, Variant]] = {}
    for variant, future in futures.items():
        if variant is None:
            continue
        if time.monotonic() > deadline:
            print("time is up", flush=True)
            break
        line: dict[str, Any] = dict(rows=rows, variant=str(variant))
        try:
            spills = future.result(timeout=max(deadline - time.monotonic(), 1))
            line |= bench.measure([variant]) | (dict(spills=spills) if spills else {})
        except Exception as error:
            torch.cuda.synchronize()
            line["error"] = f"{type(error).__name__}: {str(error)[:120]}"
        if "us" in line:
            line["gain"] = base - line["us"]
            best[variant.group] = min(
                best.get(variant.group, (base * (1 - MIN_GAIN), variant)), (line["us"], variant),
                key=lambda pair: pair[0],
            )  # fmt: skip
        report.add(**line)
    again = bench.measure([])["us"]
    chosen = [variant for us, variant in best.values() if us < base * (1 - MIN_GAIN)]
    together = bench.measure(chosen)
    report.add(
        rows=rows,
        variant="best together: " + "; ".join(map(str, chosen)),
        us=together.get("us"),
        tables=again,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rows", default="64,16,32,128,256,1,8")
    parser.add_argument("--context", type=int, default=384)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--workers", type=int, default=max((os.cpu_count() or 2) - 1, 1))
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    sizes = [int(rows) for rows in arguments.rows.split(",")]
    pdl = torch.cuda.device_count() > 0 and torch.cuda.get_device_capability(0)[0] >= 9
    # Workers are forked by a server that has never touched the GPU.
    context = get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.gpu_tune_step"])
    with ProcessPoolExecutor(arguments.workers, mp_context=context) as pool:
        futures: dict[int, dict[Variant | None, Future[list[str]]]] = {
            rows: {None: pool.submit(compile_step, rows, arguments.context, [], pdl)} for rows in sizes
        }
        for rows in sizes:
            for variant in make_variants(rows):
                futures[rows][variant] = pool.submit(compile_step, rows, arguments.context, [variant], pdl)
        torch.manual_seed(0)
        report = Report(arguments.output)
        assert has_pdl(gpu_decode_chain.DEVICE) == pdl
        spec = make_spec("1b")
        weights = make_weights(spec)
        cos_sin = rope_table(spec.rope, max_len=8192).to(gpu_decode_chain.DEVICE)
        try:
            for rows in sizes:
                if time.monotonic() < deadline:
                    work = Workload(spec, weights, cos_sin, rows, arguments.context, pdl)
                    report.section(
                        f"rows {rows}",
                        lambda work=work, rows=rows: tune(  # type: ignore[misc]
                            report, Bench(work), rows, futures[rows], deadline
                        ),
                    )
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    print("failed sections:", report.failures or "none", flush=True)


if __name__ == "__main__":
    main()
