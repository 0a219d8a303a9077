"""How close is decode attention of large batches to the rate at which the card can be read?

    PYTHONPATH=. python3 benchmarks/gpu_decode_attention.py --json out.json [--sweep] [--head-dim 64]

The kernel for Hopper beside the Triton kernels: BF16, 32 query heads on 8 KV heads of 64 (Llama-3.2-1B) or
of 128 (Llama-3.1-8B), in shuffled pages of 16 tokens. A CUDA graph runs attention of several layers, whose
keys and values push each other out of the L2 cache; times are per layer. Shares are of what one pass over a
large buffer with bulk copies reaches (kernels/cuda/read_probe.py), for the context's keys and values alone.

attention    queries given, kernels chained by programmatic dependent launch: a layer's first reads may
             overlap the end of the layer before
unchained    the same, each kernel after the one before (Hopper only)
step         from the parts of a QKV product, as in a decode step, chained: rotation and cache write, too

Outputs of the two are compared before they are timed. --sweep: other variants of the kernel for Hopper.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_timing import COLD_BYTES, Report, time_graph
from tiny_vllm.kernels.cuda.nvrtc import compile_cubin
from tiny_vllm.kernels.cuda.read_probe import measure_read_rate
from tiny_vllm.kernels.hopper_decode import launch as hopper
from tiny_vllm.kernels.hopper_decode.launch import VARIANTS, Shape, Variant, Workspace
from tiny_vllm.kernels.paged_decode_attention import attend_pages
from tiny_vllm.kernels.rope_and_attend import rope_and_attend

DEVICE = torch.device("cuda", 0)
HEADS, KV_HEADS, PAGE_SIZE, SPLITS = 32, 8, 16, 2
GROUP = HEADS // KV_HEADS
# Of the largest value: queries, weights and results are rounded to BF16 on both sides.
MAX_DIFFERENCE = 2**-5
# Seconds of replays per round.
ROUND_SECONDS = 0.004


def ragged(count: int) -> list[int]:
    """Uniform from 100 to 2,000."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(100, 2001, (count,), generator=generator).tolist()


WORKLOADS = {
    "64x384": [384] * 64,
    "64x1100": [1100] * 64,
    "256x800": [800] * 256,
    "256 ragged": ragged(256),
    "128 ragged": ragged(128),
    "32x4000": [4000] * 32,
    "512x500": [500] * 512,
    "16x1000": [1000] * 16,
    # What a step of 300 sequences is in a graph.
    "300 ragged of 512": ragged(300) + [1] * 212,
}
SWEPT = ("64x1100", "256 ragged", "64x384", "300 ragged of 512")
SWEEP = {
    64: [
        *(Variant(stages=4), Variant(stages=8), Variant(tile=32, stages=8), Variant(tile=32, stages=24)),
        *(Variant(tile=32, stages=16, warps=8), Variant(stages=8, warps=8), Variant(stages=12, warps=2)),
        *(Variant(tile=128, stages=4), Variant(stages=4, blocks=2), Variant(tile=32, stages=8, blocks=2)),
        *(Variant(extra=0), Variant(), Variant(extra=64)),
    ],
    128: [
        *(Variant(tile=32, extra=0), Variant(tile=32, extra=16), Variant(tile=32, extra=48)),
        *(Variant(tile=32, stages=4), Variant(tile=32, stages=8), Variant(tile=64, stages=6, warps=2)),
        *(Variant(tile=64, stages=4), Variant(tile=32, stages=8, warps=8)),
        *(Variant(tile=32, stages=12, warps=2), Variant(tile=32, stages=4, blocks=2)),
    ],
}


def shape_of(head_dim: int) -> Shape:
    return Shape(head_dim, GROUP, KV_HEADS, PAGE_SIZE, torch.int64, torch.int64)


def compile_variant(head_dim: int, variant: Variant) -> None:
    """Into the cache on disk."""
    compile_cubin(hopper.source(), name="decode", defines=hopper.macros(shape_of(head_dim), variant))


@dataclass(frozen=True)
class Problem:
    """A workload's tensors: those of all layers, and keys and values of each."""

    lens: Tensor
    table: Tensor
    cells: Tensor
    cos_sin: Tensor
    q: Tensor
    parts: Tensor
    caches: list[tuple[Tensor, Tensor]]
    num_bytes: int
    longest: int

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def attend_triton(self) -> list[Tensor]:
        return [
            attend_pages(
                self.q, *caches, self.table, self.lens, self.scale, max_context_len=self.longest, pdl=True
            )
            for caches in self.caches
        ]

    def attend_hopper(self, pdl: bool, variant: Variant | None = None) -> list[Tensor]:
        """With flags that one launch fills with zeros for all layers."""
        chosen = variant or VARIANTS[self.q.shape[2]]
        blocks = hopper.num_blocks(chosen, DEVICE)
        flags = torch.zeros(len(self.caches), blocks, dtype=torch.int32, device=DEVICE)
        outputs = []
        for index, (k_cache, v_cache) in enumerate(self.caches):
            parts = hopper.make_workspace(k_cache, chosen, is_ready=False).parts
            output = hopper.attend(
                self.q, k_cache, v_cache, self.table, self.lens, self.scale, pdl=pdl and index > 0,
                variant=variant, workspace=Workspace(parts, flags[index]),
            )  # fmt: skip
            assert output is not None, "the kernel does not compile"
            outputs.append(output)
        return outputs

    def step(self, takes_hopper: bool) -> list[Tensor]:
        with mock.patch.object(hopper, "TAKES_HOPPER_DECODE", takes_hopper):
            return [
                rope_and_attend(
                    self.parts, None, self.cos_sin, self.cells, *caches, self.table, self.lens, HEADS,
                    self.scale, max_context_len=self.longest, pdl=True,
                )
                for caches in self.caches
            ]  # fmt: skip


def make_problem(lens: list[int], head_dim: int) -> Problem:
    counts = [-(-length // PAGE_SIZE) for length in lens]
    pages = (torch.randperm(sum(counts), device=DEVICE) + 1).split(counts)
    table = torch.zeros(len(lens), max(counts), dtype=torch.int64, device=DEVICE)
    for row, own in zip(table, pages, strict=True):
        row[: len(own)] = own
    num_bytes = 2 * sum(lens) * KV_HEADS * head_dim * 2
    shape = (2, sum(counts) + 1, KV_HEADS, PAGE_SIZE, head_dim)
    caches = []
    for _ in range(max(2, -(-COLD_BYTES // num_bytes))):
        both = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_()
        caches.append((both[0], both[1]))
    context_lens = torch.tensor(lens, device=DEVICE)
    newest = context_lens - 1
    pages_of_newest = table.gather(1, (newest // PAGE_SIZE)[:, None])[:, 0]
    angles = torch.arange(max(lens), device=DEVICE)[:, None] * torch.rand(head_dim // 2, device=DEVICE)
    return Problem(
        lens=context_lens,
        table=table,
        cells=pages_of_newest * PAGE_SIZE + newest % PAGE_SIZE,
        cos_sin=torch.cat((angles.cos(), angles.sin()), -1),
        q=torch.randn(len(lens), HEADS, head_dim, device=DEVICE).bfloat16(),
        parts=torch.randn(SPLITS, len(lens), (HEADS + 2 * KV_HEADS) * head_dim, device=DEVICE),
        caches=caches,
        num_bytes=num_bytes,
        longest=max(lens),
    )


def difference(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest, as a share of the largest value; not finite if a value is not."""
    return max(
        float((one.float() - other.float()).abs().max() / other.float().abs().max())
        for one, other in zip(actual, expected, strict=True)
    )


def measure(report: Report, rate: float, head_dim: int, workload: str, is_sweep: bool) -> None:
    problem = make_problem(WORKLOADS[workload], head_dim)
    layers = len(problem.caches)

    def add(what: str, kernel: str, run: Callable[[], list[Tensor]], wanted: list[Tensor] | None) -> None:
        apart = 0.0 if wanted is None else difference(run(), wanted)
        assert apart <= MAX_DIFFERENCE, f"{what} by {kernel} is {apart} of the largest value off"
        expected_seconds = layers * problem.num_bytes / rate
        replays = max(2, round(ROUND_SECONDS / expected_seconds))
        seconds = time_graph(run, rounds=5, replays=replays) / layers
        report.add(
            head_dim=head_dim, workload=workload, what=what, kernel=kernel, us=seconds * 1e6,
            tb_per_second=problem.num_bytes / seconds / 1e12, share=problem.num_bytes / seconds / rate,
            apart=apart,
        )  # fmt: skip

    expected = problem.attend_triton()
    if is_sweep:
        for variant in SWEEP[head_dim]:
            name = " ".join(f"{field} {value}" for field, value in asdict(variant).items())
            add("attention", name, partial(problem.attend_hopper, True, variant), expected)
        return
    add("attention", "triton", problem.attend_triton, None)
    add("attention", "hopper", partial(problem.attend_hopper, True), expected)
    add("unchained", "hopper", partial(problem.attend_hopper, False), expected)
    add("step", "triton", partial(problem.step, False), None)
    expected = problem.step(False)
    add("step", "hopper", partial(problem.step, True), expected)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--sweep", action="store_true", help="other variants, on some workloads")
    parser.add_argument("--head-dim", type=int, choices=sorted(SWEEP), action="append")
    parser.add_argument("--workload", choices=WORKLOADS, action="append")
    parser.add_argument("--seconds", type=float, default=100, help="begin nothing new after so many")
    arguments = parser.parse_args()
    start = time.monotonic()
    head_dims = arguments.head_dim or sorted(SWEEP)
    torch.manual_seed(0)
    report = Report(arguments.json)
    tasks = [
        (head_dim, variant)
        for head_dim in head_dims
        for variant in (SWEEP[head_dim] if arguments.sweep else [VARIANTS[head_dim]])
    ]
    with ThreadPoolExecutor(8) as pool:
        compiled = [pool.submit(compile_variant, *task) for task in tasks]
        rate = measure_read_rate().bytes_per_second
        report.add(what="read probe", tb_per_second=rate / 1e12)
        for future in compiled:
            future.result()
    for head_dim in head_dims:
        for workload in arguments.workload or (SWEPT if arguments.sweep else WORKLOADS):
            if time.monotonic() - start > arguments.seconds:
                report.failures.append(f"heads of {head_dim}, {workload}: no time")
                continue

            run = partial(measure, report, rate, head_dim, workload, arguments.sweep)
            report.section(f"heads of {head_dim}, {workload}", run)
    report.write()
    print(f"{time.monotonic() - start:.0f} s; failed: {report.failures or 'nothing'}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
