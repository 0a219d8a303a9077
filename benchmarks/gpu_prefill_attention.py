"""How fast is prefill attention, and which share of FlashAttention-3 is that?

    PYTHONPATH=. python3 benchmarks/gpu_prefill_attention.py --peer build/peers/vllm-0.21.0 --output out.json

The kernel for Hopper and the Triton kernel, with the variants and tiles they could have, beside
FlashAttention-3 from the peer's bundle, in one process and on the same queries, keys and values: causal,
BF16, 32 query heads on 8 KV heads of 64 (Llama-3.2-1B) and of 128 (Llama-3.1-8B), in shuffled pages of 16
tokens. Each is checked against FP32 before it is timed, by replays of a CUDA graph that find their inputs in
L2 as far as they fit. FLOPs are 4 * heads * head size for each query and key it sees.

FlashAttention-3 runs three ways, and the fastest that is paged is what shares refer to: on pages in its own
layout with a schedule made in each call, the same with the schedule made before, and on keys that are not
paged ("plain", only where chunks are whole contexts).

Caches in FP8: both kernels on codes, and the one for Hopper on the BF16 values that they stand for, which the
answer is made of, too; `--fp8` measures nothing else.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_timing import Report, time_graph
from tests.helpers.kernel_compiler import compiling, meta
from tiny_vllm.kernels import prefill_attention
from tiny_vllm.kernels.cuda.nvrtc import compile_cubin
from tiny_vllm.kernels.fp8_cache import Cache, Fp8Cache, dequantise_rows, quantise_rows
from tiny_vllm.kernels.hopper_prefill import launch as hopper
from tiny_vllm.kernels.hopper_prefill.launch import SMALL_VARIANTS, VARIANTS, Shape, Variant

DEVICE = "cuda"
HEADS, KV_HEADS, PAGE_SIZE = 32, 8, 16
HEAD_DIMS = (64, 128)
# Of the largest value: weights and the result are rounded to BF16 once each.
MAX_ERROR = 2**-7

# (chunk length, context length) of each sequence
WORKLOADS = {
    "1x512": [(512, 512)],
    "1x2048": [(2048, 2048)],
    "1x8192": [(8192, 8192)],
    "16x512": [(512, 512)] * 16,
    "4x2048": [(2048, 2048)] * 4,
    "ragged": [(length, length) for length in (100, 700, 1500, 3001, 50, 411, 2200, 33)],
    "chunk 2048 of 8192": [(2048, 8192)],
    "prefix hits: 16 x 128 of 2048": [(128, 2048)] * 16,
}
# With caches in FP8
FP8_WORKLOADS = {
    **{name: WORKLOADS[name] for name in ("4x2048", "16x512", "1x8192", "ragged")},
    "chunk 1024 behind 16384": [(1024, 16384 + 1024)],
}
SWEPT = ("1x2048", "16x512", "1x512", "1x8192")
# None: what the engine takes
Variants = dict[int, list[Variant | None]]
HOPPER_VARIANTS: Variants = {
    64: [Variant(warpgroups, stages) for warpgroups in (3, 2) for stages in (4, 2)],
    128: [Variant(warpgroups=2, stages=2)],
}
# (rows, keys, warps, stages)
TRITON_TILES: dict[int, list[tuple[int, ...]]] = {
    64: [(128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 4, 2), (128, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3)],
    128: [(128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3)],
}
# Fewer, larger copies: what they gain is what the copying of small pages costs.
OTHER_PAGE_SIZES = (32, 64)
PAGED = ("1x2048", "1x8192")


@dataclass(frozen=True)
class Problem:
    """A workload's tensors on the GPU, and its answer."""

    q: Tensor
    k_cache: Cache
    v_cache: Cache
    tables: tuple[Tensor, Tensor, Tensor]
    chunks: list[tuple[int, int]]
    expected: Tensor
    flops: float

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.q, self.k_cache, self.v_cache, *self.tables, self.q.shape[-1] ** -0.5

    def error(self, actual: Tensor) -> float:
        return float((actual.float() - self.expected).abs().max() / self.expected.abs().max())

    def in_16_bits(self) -> Problem:
        """What caches in FP8 stand for."""
        return replace(self, k_cache=values_of(self.k_cache), v_cache=values_of(self.v_cache))


def values_of(cache: Cache) -> Tensor:
    if isinstance(cache, Fp8Cache):
        return dequantise_rows(cache.codes, cache.scales, cache.dtype)
    return cache


def make_problem(
    chunks: list[tuple[int, int]], head_dim: int, page_size: int = PAGE_SIZE, *, is_fp8: bool = False
) -> Problem:
    widths = [-(-context // page_size) for _, context in chunks]
    pages = torch.randperm(sum(widths), device=DEVICE) + 1
    table = torch.zeros(len(chunks), max(widths), dtype=torch.int64, device=DEVICE)
    for row, own in zip(table, pages.split(widths), strict=True):
        row[: len(own)] = own
    shape = (2, sum(widths) + 1, KV_HEADS, page_size, head_dim)
    values = torch.randn(shape, device=DEVICE).bfloat16()
    k_cache, v_cache = (Fp8Cache(*quantise_rows(part), part.dtype) if is_fp8 else part for part in values)
    lens = [chunk for chunk, _ in chunks]
    q = (2 * torch.randn(sum(lens), HEADS, head_dim, device=DEVICE)).bfloat16()
    expected = torch.empty(q.shape, device=DEVICE)
    for index, (part, out) in enumerate(zip(q.split(lens), expected.split(lens), strict=True)):
        context = chunks[index][1]
        keys, values = (gather(values_of(cache), table[index], context) for cache in (k_cache, v_cache))
        attend_reference(part, keys, values, out)
    starts = torch.tensor([0, *lens], device=DEVICE).cumsum(0)
    contexts = torch.tensor([context for _, context in chunks], device=DEVICE)
    seen = sum(chunk * context - chunk * (chunk - 1) / 2 for chunk, context in chunks)
    flops = 4 * HEADS * head_dim * seen
    return Problem(q, k_cache, v_cache, (table, starts, contexts), chunks, expected, flops)


def gather(cache: Tensor, pages: Tensor, context: int) -> Tensor:
    """[context, Hkv, D]."""
    rows = cache[pages[: -(-context // cache.shape[2])]].transpose(1, 2)
    return rows.reshape(-1, *rows.shape[2:])[:context]


def attend_reference(q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
    """FP32, some rows at a time. q, out [n, Hq, D], the last n of keys, values [context, Hkv, D]."""
    keys, values = (part.float().permute(1, 2, 0).unsqueeze(1) for part in (keys, values))
    positions = torch.arange(keys.shape[-1], device=DEVICE)
    for start in range(0, len(q), 512):
        part = q[start : start + 512].float()
        grouped = part.view(len(part), KV_HEADS, -1, part.shape[-1]).permute(1, 2, 0, 3)
        scores = grouped @ keys * part.shape[-1] ** -0.5
        first = keys.shape[-1] - len(q) + start
        own = torch.arange(first, first + len(part), device=DEVICE)
        scores.masked_fill_(positions > own[:, None], -torch.inf)
        attended = scores.softmax(-1) @ values.mT
        out[start : start + 512] = attended.permute(2, 0, 1, 3).reshape(part.shape)


class Peer:
    """FlashAttention-3 of the bundle, without the engine around it."""

    def __init__(self, site: Path) -> None:
        # As a package of its own: the engine's package imports much that is of no use here.
        package = types.ModuleType("peer_flash_attention")
        package.__path__ = [str(site / "vllm" / "vllm_flash_attn")]
        sys.modules[package.__name__] = package
        self._interface = importlib.import_module(f"{package.__name__}.flash_attn_interface")
        if not self._interface.FA3_AVAILABLE:
            raise RuntimeError(f"FlashAttention-3 is not there: {self._interface.FA3_UNAVAILABLE_REASON}")

    def calls(self, problem: Problem) -> dict[str, Callable[[], Tensor]]:
        table, starts, contexts = (part.int() for part in problem.tables)
        longest = max(chunk for chunk, _ in problem.chunks)
        longest_context = max(context for _, context in problem.chunks)
        head_dim = problem.q.shape[-1]
        attend = partial(
            self._interface.flash_attn_varlen_func,
            problem.q,
            max_seqlen_q=longest,
            cu_seqlens_q=starts,
            max_seqlen_k=longest_context,
            softmax_scale=head_dim**-0.5,
            causal=True,
            fa_version=3,
        )
        # Its own order within a page: tokens, then heads.
        caches = values_of(problem.k_cache), values_of(problem.v_cache)
        pages = [cache.transpose(1, 2).contiguous() for cache in caches]
        paged = partial(attend, *pages, seqused_k=contexts, block_table=table)
        schedule = self._interface.get_scheduler_metadata(
            batch_size=len(contexts),
            max_seqlen_q=longest,
            max_seqlen_k=longest_context,
            num_heads_q=HEADS,
            num_heads_kv=KV_HEADS,
            headdim=head_dim,
            cache_seqlens=contexts,
            qkv_dtype=torch.bfloat16,
            cu_seqlens_q=starts,
            page_size=PAGE_SIZE,
            causal=True,
        )
        calls: dict[str, Callable[[], Tensor]] = {
            "FA3": paged,
            "FA3, scheduled before": partial(paged, scheduler_metadata=schedule),
        }
        if all(chunk == context for chunk, context in problem.chunks):
            plain = [
                torch.cat(
                    [gather(cache, *row) for row in zip(problem.tables[0], contexts.tolist(), strict=True)]
                )
                for cache in caches
            ]
            calls["FA3, plain"] = partial(attend, *plain, cu_seqlens_k=starts)
        return calls


def shape_of(head_dim: int, is_fp8: bool = False) -> Shape:
    integer = torch.int64
    heads = HEADS // KV_HEADS, KV_HEADS
    return Shape(head_dim, *heads, PAGE_SIZE, torch.bfloat16, False, False, integer, integer, integer, is_fp8)


def launch_triton(tile: tuple[int, ...], head_dim: int, arguments: tuple[Any, ...]) -> Tensor:
    with mock.patch.object(prefill_attention, "TILES_16_BIT", ((head_dim, tile),)):
        return prefill_attention.attend_chunks(*arguments)


def compile_hopper(head_dim: int, variant: Variant | None, is_fp8: bool = False) -> None:
    """In a worker process: fills the cache of binaries."""
    assert variant is not None
    defines = hopper.macros(shape_of(head_dim, is_fp8), variant)
    compile_cubin(hopper.source(), name="prefill", defines=defines, arch="sm_90a")


def compile_triton(
    head_dim: int, tile: tuple[int, ...], chunks: list[tuple[int, int]], is_fp8: bool = False
) -> None:
    """In a worker process: fills Triton's cache."""
    width = max(-(-context // PAGE_SIZE) for _, context in chunks)
    count, tokens = len(chunks), sum(chunk for chunk, _ in chunks)
    rows = count * width + 1, KV_HEADS, PAGE_SIZE
    cache: Cache = meta(*rows, head_dim)
    if is_fp8:
        codes = meta(*rows, head_dim, dtype=torch.float8_e4m3fn)
        cache = Fp8Cache(codes, meta(*rows, dtype=torch.bfloat16), torch.bfloat16)
    integers = [meta(*size, dtype=torch.int64) for size in ((count, width), (count + 1,), (count,))]
    with compiling():
        arguments = (meta(tokens, HEADS, head_dim), cache, cache, *integers, head_dim**-0.5)
        launch_triton(tile, head_dim, arguments)


def time_call(report: Report, problem: Problem, call: Callable[[], Tensor], **row: Any) -> float | None:
    """Checks, times and reports a kernel. TFLOP/s, or None where it fails."""
    try:
        actual = call()
        torch.cuda.synchronize()
        error = problem.error(actual)
        if not error <= MAX_ERROR:
            report.add(**row, error=error, failure="wrong")
            return None
        seconds = time_graph(call, rounds=5, replays=10)
    except RuntimeError as reason:
        report.add(**row, failure=str(reason)[:200])
        return None
    rate = problem.flops / seconds / 1e12
    report.add(**row, us=seconds * 1e6, tflops=rate, error=error)
    return rate


class Bench:
    def __init__(self, report: Report, deadline: float) -> None:
        self.report = report
        self._deadline = deadline
        self._problems: dict[tuple[str, int], Problem] = {}
        self._peers: dict[tuple[str, int], float] = {}

    def problem(self, workload: str, head_dim: int) -> Problem:
        key = workload, head_dim
        if key not in self._problems:
            self._problems[key] = make_problem(WORKLOADS[workload], head_dim)
        return self._problems[key]

    def time(self, workload: str, head_dim: int, kernel: str, call: Callable[[], Tensor]) -> float | None:
        if time.monotonic() > self._deadline:
            raise TimeoutError("the time is up")
        row = dict(workload=workload, head_dim=head_dim, kernel=kernel)
        return time_call(self.report, self.problem(workload, head_dim), call, **row)

    def run_peer(self, peer: Peer) -> None:
        for head_dim in HEAD_DIMS:
            for workload in WORKLOADS:
                calls = peer.calls(self.problem(workload, head_dim))
                rates = {name: self.time(workload, head_dim, name, call) for name, call in calls.items()}
                paged = [rate for name, rate in rates.items() if rate is not None and name != "FA3, plain"]
                if paged:
                    self._peers[workload, head_dim] = max(paged)

    def run_hopper(self, variants: Variants, workloads: tuple[str, ...]) -> None:
        for head_dim in HEAD_DIMS:
            for variant in variants[head_dim]:
                for workload in workloads:
                    arguments = self.problem(workload, head_dim).arguments
                    call = partial(attend_hopper, arguments, variant)
                    self.share(workload, head_dim, f"Hopper {describe(variant)}", call)

    def run_triton(self, tiles: dict[int, list[tuple[int, ...]]], workloads: tuple[str, ...]) -> None:
        for head_dim in HEAD_DIMS:
            for tile in tiles[head_dim]:
                for workload in workloads:
                    arguments = self.problem(workload, head_dim).arguments
                    call = partial(launch_triton, tile, head_dim, arguments)
                    self.share(workload, head_dim, f"Triton {tile}", call)

    def run_page_sizes(self) -> None:
        for head_dim in HEAD_DIMS:
            for workload in PAGED:
                for page_size in OTHER_PAGE_SIZES:
                    problem = make_problem(WORKLOADS[workload], head_dim, page_size)
                    kernel = f"Hopper as chosen, pages of {page_size}"
                    call = partial(attend_hopper, problem.arguments, None)
                    time_call(self.report, problem, call, workload=workload, head_dim=head_dim, kernel=kernel)

    def run_fp8(self) -> None:
        for head_dim in HEAD_DIMS:
            for workload, chunks in FP8_WORKLOADS.items():
                if time.monotonic() > self._deadline:
                    raise TimeoutError("the time is up")
                problem = make_problem(chunks, head_dim, is_fp8=True)
                tile = tiles_of_table(head_dim)
                calls = {
                    "Triton, FP8": partial(launch_triton, tile, head_dim, problem.arguments),
                    "Hopper, FP8": partial(attend_hopper, problem.arguments, None),
                    "Hopper, 16 bits": partial(attend_hopper, problem.in_16_bits().arguments, None),
                }
                for kernel, call in calls.items():
                    row = dict(workload=workload, head_dim=head_dim, kernel=kernel)
                    time_call(self.report, problem, call, **row)

    def share(self, workload: str, head_dim: int, kernel: str, call: Callable[[], Tensor]) -> None:
        rate = self.time(workload, head_dim, kernel, call)
        peer = self._peers.get((workload, head_dim))
        if rate is not None and peer is not None:
            self.report.rows[-1]["share_of_fa3"] = rate / peer
            print(f"    {100 * rate / peer:.1f} % of FA3", flush=True)


def describe(variant: Variant | None) -> str:
    if variant is None:
        return "as chosen"
    return f"{variant.warpgroups} x 64 rows, {variant.stages} stages"


def attend_hopper(arguments: tuple[Any, ...], variant: Variant | None) -> Tensor:
    output = hopper.attend(*arguments, variant=variant)
    if output is None:
        raise RuntimeError("the kernel does not compile")
    return output


def install(peer: Path, site: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.Popen(["bash", str(peer / "install.sh"), str(site)], env=environment)


def tiles_of_table(head_dim: int) -> tuple[int, ...]:
    return next(tile for limit, tile in prefill_attention.TILES_16_BIT if limit >= head_dim)


def submit_in_use(pool: ProcessPoolExecutor) -> list[Future[None]]:
    futures = [
        pool.submit(compile_hopper, head_dim, variant)
        for table in (VARIANTS, SMALL_VARIANTS)
        for head_dim, variant in table.items()
    ]
    for head_dim in HEAD_DIMS:
        for workload in ("1x2048", "16x512", "ragged"):
            chunks = WORKLOADS[workload]
            futures.append(pool.submit(compile_triton, head_dim, tiles_of_table(head_dim), chunks))
    return futures


def submit_fp8(pool: ProcessPoolExecutor) -> list[Future[None]]:
    futures = []
    for head_dim in HEAD_DIMS:
        variant, tile = VARIANTS[head_dim], tiles_of_table(head_dim)
        futures += [pool.submit(compile_hopper, head_dim, variant, is_fp8) for is_fp8 in (True, False)]
        futures += [
            pool.submit(compile_triton, head_dim, tile, chunks, True) for chunks in FP8_WORKLOADS.values()
        ]
    return futures


def submit_sweeps(pool: ProcessPoolExecutor) -> list[Future[None]]:
    sweeps = []
    for head_dim in HEAD_DIMS:
        sweeps += [pool.submit(compile_hopper, head_dim, variant) for variant in HOPPER_VARIANTS[head_dim]]
    for head_dim in HEAD_DIMS:
        for tile in TRITON_TILES[head_dim]:
            sweeps += [pool.submit(compile_triton, head_dim, tile, WORKLOADS[name]) for name in SWEPT]
    return sweeps


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="where the results go, as JSON")
    parser.add_argument("--peer", type=Path, help="directory with vLLM's install.sh")
    parser.add_argument("--site", type=Path, help="where the peer is installed already")
    parser.add_argument("--seconds", type=float, default=100, help="stop after so many")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--fp8", action="store_true", help="only caches in FP8")
    parser.add_argument("--no-sweep", action="store_true", help="only the variants and tiles in use")
    arguments = parser.parse_args()
    start = time.monotonic()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        site = arguments.site or Path(folder)
        installing = install(arguments.peer, site) if arguments.peer and not arguments.site else None
        context = get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.gpu_prefill_attention"])
        with ProcessPoolExecutor(arguments.workers, mp_context=context) as pool:
            # What is timed first is compiled first.
            futures: list[Future[None]] = []
            if not arguments.fp8:
                futures += submit_in_use(pool)
            of_fp8 = submit_fp8(pool)
            sweeps: list[Future[None]] = []
            if not (arguments.no_sweep or arguments.fp8):
                sweeps += submit_sweeps(pool)
            report = Report(arguments.output)
            bench = Bench(report, start + arguments.seconds)
            everything = tuple(WORKLOADS)

            def run_peer() -> None:
                if installing is not None and installing.wait() != 0:
                    raise RuntimeError("the peer cannot be installed")
                bench.run_peer(Peer(site))

            def run_in_use() -> None:
                for future in futures:
                    future.exception()
                bench.run_triton({head_dim: [tiles_of_table(head_dim)] for head_dim in HEAD_DIMS}, everything)
                bench.run_hopper({head_dim: [None] for head_dim in HEAD_DIMS}, everything)

            def run_fp8() -> None:
                for future in of_fp8:
                    future.exception()
                bench.run_fp8()

            if installing is not None or arguments.site:
                report.section("FlashAttention-3", run_peer)
            if not arguments.fp8:
                report.section("in use", run_in_use)
            report.section("caches in FP8", run_fp8)
            if sweeps:
                for future in sweeps:
                    future.exception()
                report.section("Hopper variants", lambda: bench.run_hopper(HOPPER_VARIANTS, SWEPT))
                report.section("Triton tiles", lambda: bench.run_triton(TRITON_TILES, SWEPT))
                report.section("page sizes", bench.run_page_sizes)
    report.write()
    print(f"{time.monotonic() - start:.0f} s", flush=True)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
