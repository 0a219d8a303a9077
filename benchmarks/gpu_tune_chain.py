"""Which tiles are fastest for the products and the attention of a decode step, each by itself?

    PYTHONPATH=. python3 benchmarks/gpu_tune_chain.py --output tune.json [--seconds 190] [--only direct,tiled]

Llama-3.2-1B's shape in BF16. Every variant is compiled by worker processes, checked against FP32 and then
timed as a chain over weights that push each other out of the cache, with programmatic dependent launch where
the GPU has it; cuBLAS beside it. gpu_tune_step.py varies the same within a step. Variants that run out of
resources are reported as such. Results are written as they come, and when the time is up, the best so far are
printed.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_timing import Report, measure_read_rate, rotate, time_graph
from tests.helpers.kernel_compiler import compiling, meta
from tiny_vllm.kernels import norm_linear, paged_decode_attention
from tiny_vllm.kernels.draw_tokens import draw_tokens
from tiny_vllm.kernels.finish_rows import finish_rows
from tiny_vllm.kernels.norm_linear import _launch_norm_linear
from tiny_vllm.kernels.paged_decode_attention import AttentionTiles, attend_pages, paged_decode_attention_ref
from tiny_vllm.kernels.slot_inputs import SlotState, read_slots
from tiny_vllm.kernels.tiled_linear import Tiles, launch_tiled_product
from tiny_vllm.kernels.triton_support import has_pdl, next_power_of_2

EPS = 1e-5
MAX_SHARED_BYTES = 232448
# Relative error of a product against FP32: BF16 rounds x once and the result once, 2**-9 each.
MAX_ERROR = 2**-7
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 64, 16


@dataclass(frozen=True)
class Matrix:
    """rows x columns; gated: two of them, gate and up."""

    rows: int
    columns: int
    has_norm: bool = False
    gated: bool = False
    out_dtype: torch.dtype | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows * (2 if self.gated else 1), self.columns


MATRICES = {
    "qkv": Matrix(3072, 2048, has_norm=True),
    "output": Matrix(2048, 2048),
    "gate_up": Matrix(8192, 2048, has_norm=True, gated=True),
    "down": Matrix(2048, 8192),
    "lm_head": Matrix(128256, 2048, has_norm=True, out_dtype=torch.float32),
}


@dataclass(frozen=True)
class Case:
    """One variant. kind: one_row, direct, tiled or attention; name: matrix or context; tiles: constants."""

    kind: str
    name: str
    rows: int
    tiles: tuple[tuple[str, Any], ...]

    @property
    def compile_key(self) -> tuple[Any, ...]:
        """Cases of equal keys share their kernel: numbers of rows that Triton specialises alike."""
        if self.kind == "attention":
            return self.kind, self.name, self.rows, self.tiles
        return self.kind, self.name, self.rows == 1, self.rows % 16 == 0, self.tiles

    def describe(self) -> str:
        return " ".join(f"{key.lower()}={int(value)}" for key, value in self.tiles)


def tiles_of(**tiles: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(tiles.items())


# One row: rows of W, values of K, tiles ahead, warps.
ONE_ROW = {
    2048: (
        (8, 2048, 1, 4), (4, 2048, 1, 4), (4, 2048, 1, 2), (2, 2048, 1, 2), (16, 2048, 1, 8), (8, 2048, 1, 8),
        (16, 2048, 1, 4), (32, 2048, 1, 8), (8, 1024, 2, 4), (8, 1024, 2, 2), (16, 1024, 2, 4),
        (32, 1024, 2, 8),        (16, 512, 4, 4), (32, 512, 4, 4),
    ),
    8192: (
        (4, 8192, 1, 8), (2, 8192, 1, 8), (2, 8192, 1, 4), (4, 8192, 1, 16), (8, 8192, 1, 16),
        (4, 4096, 2, 8), (4, 4096, 2, 4), (8, 4096, 2, 8), (8, 2048, 2, 4),
        (8, 2048, 4, 4), (4, 2048, 4, 4), (8, 2048, 4, 8),
        (16, 1024, 4, 4),
    ),
}  # fmt: skip
# Several rows, straight to the tensor cores: rows of W, values of K per tile, tiles ahead, warps.
DIRECT = {
    2048: (
        (16, 512, 2, 4), (16, 512, 3, 4), (16, 512, 4, 4), (16, 256, 4, 4), (16, 256, 2, 2), (16, 256, 4, 2),
        (16, 512, 4, 8), (16, 1024, 2, 8), (32, 256, 2, 4), (32, 256, 4, 4), (32, 512, 2, 4), (32, 512, 2, 8),
        (32, 512, 4, 8), (64, 256, 2, 8), (64, 128, 4, 4),
    ),
    8192: (
        (16, 512, 4, 4), (16, 1024, 2, 8), (16, 1024, 3, 8), (16, 512, 4, 8), (16, 512, 8, 8),
        (16, 2048, 2, 16), (16, 1024, 4, 16), (16, 1024, 2, 16), (32, 512, 2, 8),
        (32, 512, 4, 8), (32, 1024, 2, 16),
        (32, 512, 4, 16),
    ),
}  # fmt: skip
DIRECT_ROWS = (1, 2, 4, 8, 16, 32)
TILED_ROWS = (16, 32, 64, 128, 256)
# Through shared memory: rows of W, values of K, splits of K, stages, warps.
TILED = {
    "qkv": (
        (64, 64, 2, 5, 4), (64, 128, 2, 4, 4), (64, 64, 4, 5, 4), (64, 128, 4, 4, 4), (64, 128, 1, 4, 4),
        (128, 64, 4, 5, 4), (128, 128, 4, 3, 8), (128, 64, 8, 4, 8),
    ),
    "output": (
        (64, 64, 4, 5, 4), (64, 128, 4, 4, 4), (64, 128, 8, 2, 4), (64, 64, 8, 4, 4), (64, 128, 2, 4, 4),
        (128, 64, 8, 4, 4), (128, 128, 8, 2, 8), (128, 64, 4, 5, 8),
    ),
    "gate_up": (
        (64, 64, 1, 4, 4), (64, 64, 1, 6, 4), (64, 128, 1, 3, 4), (64, 128, 1, 4, 4), (64, 64, 1, 5, 8),
        (64, 128, 1, 3, 8), (128, 64, 1, 4, 8),
    ),
    "down": (
        (64, 64, 4, 5, 4), (64, 128, 4, 4, 4), (64, 128, 8, 4, 4), (64, 64, 8, 6, 4), (128, 64, 8, 5, 4),
        (128, 128, 8, 3, 8), (128, 64, 16, 5, 8), (128, 64, 8, 6, 8),
    ),
    "lm_head": (
        (64, 64, 1, 5, 4), (64, 128, 1, 4, 4), (128, 64, 1, 4, 4), (128, 64, 1, 5, 8), (128, 128, 1, 3, 8),
        (256, 64, 1, 4, 8),
    ),
}  # fmt: skip
# (sequences, context): tiles as (keys per tile, parts, warps, stages).
ATTENTION: dict[tuple[int, int], tuple[tuple[int, int, int, int], ...]] = {
    (1, 129): ((64, 4, 4, 2), (64, 4, 8, 2), (128, 2, 8, 2), (128, 2, 4, 2), (32, 8, 2, 2), (32, 8, 4, 2)),
    (1, 640): ((64, 16, 4, 2), (128, 8, 8, 2), (128, 8, 4, 2), (32, 32, 2, 2), (256, 4, 8, 2)),
    (1, 4096): (
        (64, 32, 4, 2), (64, 32, 4, 3), (64, 64, 4, 2), (128, 32, 8, 2),
        (128, 32, 4, 2), (64, 64, 4, 3),
    ),
    (8, 129): ((64, 4, 4, 2), (64, 2, 4, 2), (64, 1, 4, 3), (128, 2, 4, 2), (128, 1, 8, 2)),
    (8, 640): ((64, 4, 4, 2), (64, 4, 4, 3), (64, 8, 4, 2), (64, 16, 4, 2), (128, 4, 4, 2), (128, 8, 8, 2)),
    (8, 4096): (
        (64, 8, 4, 3), (64, 16, 4, 3), (64, 32, 4, 3), (128, 16, 4, 3),
        (128, 16, 8, 3), (64, 16, 4, 4),
    ),
    (16, 640): ((64, 2, 4, 3), (64, 4, 4, 3), (64, 8, 4, 2), (128, 4, 4, 2)),
    (64, 384): (
        (64, 1, 4, 2), (64, 1, 4, 3), (64, 1, 4, 4), (64, 2, 4, 2),
        (64, 2, 4, 3), (64, 4, 4, 2), (128, 1, 4, 2),
        (128, 1, 4, 3), (32, 1, 4, 4), (32, 1, 2, 4), (64, 1, 2, 3), (128, 2, 4, 2), (64, 8, 4, 2),
    ),
    (64, 1100): ((64, 1, 4, 3), (64, 2, 4, 3), (64, 4, 4, 3), (128, 1, 4, 3), (128, 2, 4, 3), (64, 1, 4, 4)),
    (256, 384): (
        (64, 1, 4, 2), (64, 1, 4, 3), (64, 1, 4, 4), (64, 2, 4, 3),
        (128, 1, 4, 3), (32, 1, 2, 4), (64, 8, 4, 2),
    ),
}  # fmt: skip


def make_cases() -> Iterator[Case]:
    for name, matrix in MATRICES.items():
        for n, k, depth, warps in ONE_ROW[matrix.columns]:
            yield Case("one_row", name, 1, tiles_of(
                BLOCK_M=1, BLOCK_N=n, BLOCK_K=k, DEPTH=depth, NUM_SPLITS=1, num_warps=warps))  # fmt: skip
    for rows in (8, 1, 16, 2, 4, 32):
        for name, matrix in MATRICES.items():
            for n, k, depth, warps in DIRECT[matrix.columns]:
                yield Case("direct", name, rows, tiles_of(
                    BLOCK_M=max(next_power_of_2(rows), 8), BLOCK_N=n, BLOCK_K=k, DEPTH=depth,
                    NUM_SPLITS=warps, num_warps=warps))  # fmt: skip
    for (batch, context), choices in ATTENTION.items():
        for tile_len, parts, warps, stages in choices:
            yield Case("attention", str(context), batch, tiles_of(
                tile_len=tile_len, max_parts=parts, num_warps=warps, num_stages=stages))  # fmt: skip
    for rows in (64, 16, 32, 128, 256):
        for name in MATRICES:
            for n, k, splits, stages, warps in TILED[name]:
                for ahead in (0, 128):
                    yield Case("tiled", name, rows, tiles_of(
                        block_n=n, block_k=k,
                        stages=min(stages, 3) if rows >= 128 and k == 128 else stages,
                        ahead=ahead, num_warps=warps, splits=splits))  # fmt: skip


@contextmanager
def tiles_forced(module: Any, tiles: Any) -> Iterator[None]:
    """The module's launcher uses these tiles and no fallback hides that they do not work."""
    with mock.patch.object(module, "choose_tiles", lambda *_: tiles() if callable(tiles) else tiles):
        yield


def launch_product(
    case: Case, x: Tensor, weight: Tensor, norm: Tensor, residual: Tensor, pdl: bool
) -> Tensor:
    matrix = MATRICES[case.name]
    if case.kind == "tiled":
        tiles = dict(case.tiles)
        splits = tiles.pop("splits")
        return launch_tiled_product(
            x, weight, Tiles(**tiles), splits=splits, gated=matrix.gated,
            out_dtype=torch.float32 if splits > 1 else matrix.out_dtype, pdl=pdl,
        )  # fmt: skip
    with tiles_forced(norm_linear, lambda: dict(case.tiles)):
        return _launch_norm_linear.__wrapped__(
            x, weight, norm_weight=norm if matrix.has_norm else None, eps=EPS, gated=matrix.gated,
            residual=residual if case.name in ("output", "down") else None, out_dtype=matrix.out_dtype,
            pdl=pdl,
        )  # fmt: skip


def launch_attention(
    case: Case, q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor, pdl: bool
) -> Tensor:
    with tiles_forced(paged_decode_attention, AttentionTiles(**dict(case.tiles))):
        return attend_pages.__wrapped__(q, k, v, table, lens, HEAD_DIM**-0.5, pdl=pdl)


def compile_case(case: Case, pdl: bool) -> dict[str, Any]:
    """In a worker process, without the GPU: fills Triton's cache and says what the kernel needs."""
    try:
        with compiling() as kernels:
            if case.kind == "attention":
                width = -(-int(case.name) // PAGE_SIZE)
                cache = meta(case.rows * width + 1, KV_HEADS, PAGE_SIZE, HEAD_DIM)
                launch_attention(
                    case, meta(case.rows, HEADS, HEAD_DIM), cache, cache,
                    meta(case.rows, width, dtype=torch.int64), meta(case.rows, dtype=torch.int64), pdl,
                )  # fmt: skip
            else:
                matrix = MATRICES[case.name]
                launch_product(
                    case, meta(case.rows, matrix.columns), meta(*matrix.shape), meta(matrix.columns),
                    meta(case.rows, matrix.rows), pdl,
                )  # fmt: skip
        return dict(
            registers=kernels[0].num_registers, stack=kernels[0].stack_bytes, shared=kernels[0].shared_bytes
        )
    except Exception as error:
        return dict(error=f"{type(error).__name__}: {str(error)[:150]}")


class Bench:
    """Inputs on the GPU, made once, and the timing of cases over them."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.pdl = has_pdl(self.device)
        # A cache each, so that references and weights are made when first needed.
        self.weights = cache(self._weights)
        self.inputs = cache(self._inputs)
        self.pages = cache(self._pages)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).bfloat16()

    def _weights(self, name: str) -> list[Tensor]:
        shape = MATRICES[name].shape
        return rotate(lambda: self.random(*shape).mul_(shape[1] ** -0.5))

    def _inputs(self, name: str, rows: int, with_norm: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, norm weight, residual, and the FP32 answer for the first weights."""
        matrix, weight = MATRICES[name], self.weights(name)[0]
        x, residual = self.random(rows, matrix.columns), self.random(rows, matrix.rows)
        norm = (1 + 0.1 * torch.randn(matrix.columns, device=self.device)).bfloat16()
        wide = x.float()
        if with_norm and matrix.has_norm:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * norm.float()
        y = F.linear(wide, weight.float())
        if matrix.gated:
            gate, up = y.chunk(2, -1)
            y = F.silu(gate) * up
        if with_norm and name in ("output", "down"):
            y = y + residual.float()
        return x, norm, residual, y

    def _pages(
        self, batch: int, context: int
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor, Tensor, Tensor]:
        width = -(-context // PAGE_SIZE)
        shape = (batch * width + 1, KV_HEADS, PAGE_SIZE, HEAD_DIM)
        num_bytes = 4 * batch * context * KV_HEADS * HEAD_DIM
        copies = max(2, min(96, 400_000_000 // num_bytes))
        caches = [(self.random(*shape), self.random(*shape)) for _ in range(copies)]
        table = (torch.randperm(batch * width, device=self.device) + 1).view(batch, width)
        lens = torch.full((batch,), context, device=self.device)
        q = self.random(batch, HEADS, HEAD_DIM)
        wide = [tensor.float() for tensor in (q, *caches[0])]
        return q, caches, table, lens, paged_decode_attention_ref(*wide, table, lens, HEAD_DIM**-0.5)

    def run(self, case: Case) -> dict[str, float]:
        """Seconds per kernel, bytes that it must read, and its error."""
        if case.kind == "attention":
            context = int(case.name)
            q, caches, table, lens, expected = self.pages(case.rows, context)
            actual = launch_attention(case, q, *caches[0], table, lens, self.pdl)
            num_bytes = 4 * case.rows * context * KV_HEADS * HEAD_DIM
            count = len(caches)

            def chain() -> list[Tensor]:
                return [launch_attention(case, q, k, v, table, lens, self.pdl) for k, v in caches]
        else:
            weights = self.weights(case.name)
            x, norm, residual, expected = self.inputs(case.name, case.rows, case.kind != "tiled")
            actual = launch_product(case, x, weights[0], norm, residual, self.pdl)
            actual = actual.sum(0) if case.kind == "tiled" else actual
            num_bytes, count = weights[0].nbytes, len(weights)

            def chain() -> list[Tensor]:
                return [launch_product(case, x, weight, norm, residual, self.pdl) for weight in weights]

        error = float((actual.float() - expected).norm() / expected.norm())
        if not error < MAX_ERROR:
            return dict(error=error)
        return dict(seconds=time_graph(chain, rounds=5, replays=8) / count, bytes=num_bytes, error=error)


def bench_cublas(report: Report, bench: Bench, read_rate: float) -> None:
    for name, matrix in MATRICES.items():
        weights = bench.weights(name)
        for rows in sorted({*DIRECT_ROWS, *TILED_ROWS}):
            x = bench.random(rows, matrix.columns)
            seconds = time_graph(
                partial(lambda x, weights: [F.linear(x, weight) for weight in weights], x, weights),
                rounds=5, replays=8,
            ) / len(weights)  # fmt: skip
            report.rows.append(dict(
                kind="cublas", name=name, rows=rows, us=seconds * 1e6,
                share=weights[0].nbytes / seconds / read_rate))  # fmt: skip


def bench_small_pieces(report: Report, bench: Bench) -> None:
    """What a step needs besides products and attention, each as a chain of itself."""
    table = bench.random(128256, 2048)
    for rows in (1, 8, 16, 64, 256):
        column = torch.arange(rows, device=bench.device)
        state = SlotState(column.repeat(64, 1).T.contiguous() % 2, column * 0, column, column, column)
        logits = [
            torch.randn(rows, 128256, device=bench.device) for _ in range(max(2, min(100, 512 // rows)))
        ]
        keys = torch.randint(-(2**31), 2**31, (rows, 2), device=bench.device).int()
        temperature = torch.zeros(rows, device=bench.device)
        residual, norm = bench.random(rows, 2048), bench.random(2048)
        partials = {splits: torch.randn(splits, rows, 2048, device=bench.device) for splits in (2, 4, 8)}
        pieces: dict[str, Callable[[], Any]] = {
            "read_slots": lambda table=table, state=state, column=column: [
                read_slots(table, state, column, PAGE_SIZE) for _ in range(20)
            ],
            "draw": lambda logits=logits, keys=keys, temperature=temperature: [
                draw_tokens(one, temperature, keys, pdl=bench.pdl) for one in logits
            ],
        }
        for splits, values in partials.items():
            pieces[f"finish_rows {splits}"] = lambda values=values, residual=residual, norm=norm: [
                finish_rows(values, residual, norm, EPS, pdl=bench.pdl) for _ in range(20)
            ]
        for name, launch in pieces.items():
            count = len(launch())
            report.add(
                kind="piece", name=name, rows=rows, us=time_graph(launch, rounds=5, replays=8) / count * 1e6
            )


def print_best(rows: list[dict[str, Any]]) -> None:
    """The three fastest of each kind for every number of rows and matrix, and cuBLAS."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in rows:
        if "us" in row and row.get("kind") != "piece":
            groups.setdefault((row["rows"], row["name"]), []).append(row)
    order = [*MATRICES]
    for (num_rows, name), group in sorted(
        groups.items(), key=lambda item: (item[0][1] not in order, item[0][0], item[0][1])
    ):
        print(f"-- rows {num_rows} {name}")
        for kind in ("one_row", "direct", "tiled", "attention", "cublas"):
            for row in sorted((row for row in group if row["kind"] == kind), key=lambda row: row["us"])[:3]:
                print(
                    f"   {kind:9} {row['us']:8.2f} us  {row['share']:5.0%}  {row.get('tiles', '')}"
                    f"  registers {row.get('registers', '-')}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seconds", type=float, default=190.0, help="stop then and print the best so far")
    parser.add_argument("--only", default="one_row,direct,attention,tiled,cublas,pieces")
    parser.add_argument("--workers", type=int, default=max((os.cpu_count() or 2) - 1, 1))
    parser.add_argument("--limit", type=int, help="time only so many cases, for a try")
    arguments = parser.parse_args()
    start = time.monotonic()
    kinds = arguments.only.split(",")
    cases = [case for case in make_cases() if case.kind in kinds][: arguments.limit]
    pdl = torch.cuda.device_count() > 0 and torch.cuda.get_device_capability(0)[0] >= 9

    # Workers are forked by a server that has never touched the GPU.
    context = get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.gpu_tune_chain"])
    with ProcessPoolExecutor(arguments.workers, mp_context=context) as pool:
        futures: dict[Future[dict[str, Any]], list[Case]] = {}
        by_key: dict[tuple[Any, ...], Future[dict[str, Any]]] = {}
        for case in cases:
            if case.compile_key not in by_key:
                by_key[case.compile_key] = pool.submit(compile_case, case, pdl)
            futures.setdefault(by_key[case.compile_key], []).append(case)
        print(f"{len(cases)} cases, {len(futures)} kernels to compile", flush=True)
        report = Report(arguments.output)
        torch.manual_seed(0)
        rate = measure_read_rate()["sum"]
        report.add(read_gb_per_s=rate / 1e9)
        bench = Bench()
        if "cublas" in kinds:
            bench_cublas(report, bench, rate)
        if "pieces" in kinds:
            bench_small_pieces(report, bench)
        report.write()
        done = 0
        try:
            for future in as_completed(
                futures, timeout=max(arguments.seconds - (time.monotonic() - start), 1)
            ):
                needs = future.result()
                for case in futures[future]:
                    report.rows.append(time_case(bench, case, needs, rate))
                    done += 1
                    if done % 50 == 0:
                        report.write()
                        print(f"{done} of {len(cases)} after {time.monotonic() - start:.0f} s", flush=True)
                if time.monotonic() - start > arguments.seconds:
                    raise TimeoutError
        except TimeoutError:
            print(f"time is up: {done} of {len(cases)}", flush=True)
            for future in futures:
                future.cancel()
            for process in list((pool._processes or {}).values()):
                process.terminate()
        report.add(cases=len(cases), timed=done, seconds=time.monotonic() - start)
        report.write()
        print_best(report.rows)
    print("done", flush=True)


def time_case(bench: Bench, case: Case, needs: dict[str, Any], rate: float) -> dict[str, Any]:
    row = dict(kind=case.kind, name=case.name, rows=case.rows, tiles=case.describe(), **needs)
    if "error" in needs:
        return row
    if needs["shared"] > MAX_SHARED_BYTES:
        return row | dict(error="out of shared memory")
    try:
        result = bench.run(case)
    except Exception as error:
        message = f"{type(error).__name__}: {str(error)[:150]}"
        print(f"  failed: {case.kind} {case.name} rows {case.rows} {case.describe()}: {message}", flush=True)
        return row | dict(error=message)
    if "seconds" not in result:
        print(
            f"  WRONG: {case.kind} {case.name} rows {case.rows} {case.describe()}: {result['error']:.3g}",
            flush=True,
        )
        return row | dict(wrong=result["error"])
    return row | dict(
        us=result["seconds"] * 1e6,
        share=result["bytes"] / result["seconds"] / rate,
        relative_error=result["error"],
    )


if __name__ == "__main__":
    main()
