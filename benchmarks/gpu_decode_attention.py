"""How close is decode attention of large batches to the rate at which the card can be read?

    PYTHONPATH=. python3 benchmarks/gpu_decode_attention.py --head-dim 64 --json out.json [--sweep]

The kernel for Hopper beside the Triton kernels, over caches in BF16 and in FP8: 32 query heads on 8 KV heads
of 64 (Llama-3.2-1B) or of 128 (Llama-3.1-8B), in shuffled pages of 16 tokens (--page-size). A CUDA graph
runs attention of several layers, whose keys and values push each other out of the L2 cache; times are per
layer. Shares are of what one pass over a large buffer with bulk copies reaches (kernels/cuda/read_probe.py),
for the context's keys and values (in FP8 with their scales) alone.

attention    queries given, kernels chained by programmatic dependent launch: a layer's first reads may
             overlap the end of the layer before
unchained    the same, each kernel after the one before (Hopper only; --unchained)
step         from the parts of a QKV product, as in a decode step, chained: rotation and cache write, too;
             for Hopper as one kernel (BF16 only) and as a pair

Outputs are compared before they are timed. At the end a table has a workload's times beside each other.
--sweep: other variants of the kernel for Hopper, with given queries and, in BF16, of parts.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_timing import COLD_BYTES, Report, time_graph
from tiny_vllm.kernels.cuda.nvrtc import compile_cubin
from tiny_vllm.kernels.cuda.read_probe import measure_read_rate
from tiny_vllm.kernels.fp8_cache import Cache, Fp8Cache, quantise_rows
from tiny_vllm.kernels.hopper_decode import launch as hopper
from tiny_vllm.kernels.hopper_decode.launch import PARTS_VARIANTS, QueryParts, Shape, Variant
from tiny_vllm.kernels.paged_decode_attention import attend_pages
from tiny_vllm.kernels.rope_and_attend import rope_and_attend

DEVICE = torch.device("cuda", 0)
HEADS, KV_HEADS, SPLITS = 32, 8, 2
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
    "256x800": [800] * 256,
    "256 ragged": ragged(256),
    "64x1100": [1100] * 64,
    "64x384": [384] * 64,
    "128 ragged": ragged(128),
    "32x4000": [4000] * 32,
    "512x500": [500] * 512,
    "16x1000": [1000] * 16,
    # What a step of 300 sequences is in a graph: 0 is a row of padding.
    "300 ragged of 512": ragged(300) + [0] * 212,
}
SWEPT = ("64x1100", "256 ragged", "64x384", "300 ragged of 512")
CACHES = ("bf16", "fp8")
SWEEP = {
    (64, "bf16"): [
        *(Variant(stages=4), Variant(stages=8), Variant(tile=32, stages=8), Variant(tile=32, stages=24)),
        *(Variant(tile=32, stages=16, warps=8), Variant(stages=8, warps=8), Variant(stages=12, warps=2)),
        *(Variant(tile=128, stages=4), Variant(stages=4, blocks=2), Variant(tile=32, stages=8, blocks=2)),
        *(Variant(extra=0), Variant(), Variant(extra=64)),
    ],
    (128, "bf16"): [
        *(Variant(tile=32, extra=0), Variant(tile=32, extra=16), Variant(tile=32, extra=48)),
        *(Variant(tile=32, stages=4), Variant(tile=32, stages=8), Variant(tile=64, stages=6, warps=2)),
        *(Variant(tile=64, stages=4), Variant(tile=32, stages=8, warps=8)),
        *(Variant(tile=32, stages=12, warps=2), Variant(tile=32, stages=4, blocks=2)),
    ],
    (64, "fp8"): [
        *(Variant(tile=64, stages=8, blocks=2, extra=extra) for extra in (0, 64, 128, 192)),
        *(Variant(tile=64, stages=4, blocks=2, extra=128), Variant(tile=32, stages=16, blocks=2, extra=128)),
        *(Variant(tile=64, stages=16, extra=128), Variant(tile=64, stages=16, warps=8, extra=128)),
        *(Variant(tile=128, stages=8, warps=8, extra=128), Variant(tile=128, stages=8, extra=128)),
    ],
    (128, "fp8"): [
        *(Variant(tile=64, stages=8, warps=8, extra=extra) for extra in (0, 48, 96, 192)),
        *(Variant(tile=64, stages=8, extra=96), Variant(tile=64, stages=12, extra=96)),
        *(Variant(tile=32, stages=16, extra=96), Variant(tile=32, stages=16, warps=8, extra=96)),
        *(Variant(tile=64, stages=8, warps=2, extra=96), Variant(tile=32, stages=8, blocks=2, extra=96)),
    ],
}
# By head size, of parts, in BF16.
PARTS_SWEEP = {
    # Two blocks of more warps have too few registers.
    64: [replace(PARTS_VARIANTS[64], query_warps=w, extra=e) for w in (1, 2) for e in (64, 96, 128)],
    128: [replace(PARTS_VARIANTS[128], query_warps=w, extra=e) for w in (1, 2, 4) for e in (48, 80, 112)],
}


@dataclass(frozen=True)
class Setting:
    """cache: its type, one of CACHES."""

    head_dim: int
    cache: str
    page_size: int

    @property
    def shape(self) -> Shape:
        sizes = self.head_dim, GROUP, KV_HEADS, self.page_size
        return Shape(*sizes, torch.int64, torch.int64, self.cache == "fp8")

    def tasks(self, is_sweep: bool) -> list[tuple[Shape, Variant]]:
        """What is compiled for it."""
        parts = replace(self.shape, from_parts=True)
        if is_sweep:
            given = [(self.shape, variant) for variant in SWEEP[self.head_dim, self.cache]]
            own = [] if self.shape.is_fp8 else PARTS_SWEEP[self.head_dim]
            return [*given, *((parts, variant) for variant in own)]
        return [(self.shape, self.shape.variant), *([] if self.shape.is_fp8 else [(parts, parts.variant)])]


def compile_variant(shape: Shape, variant: Variant) -> None:
    """Into the cache on disk."""
    compile_cubin(hopper.source(), name="decode", defines=hopper.macros(shape, variant))


@dataclass(frozen=True)
class Problem:
    """A workload's tensors: those of all layers, and keys and values of each."""

    is_real: Tensor
    lens: Tensor
    table: Tensor
    cells: Tensor
    cos_sin: Tensor
    q: Tensor
    parts: Tensor
    caches: list[tuple[Cache, Cache]]
    num_bytes: int
    longest: int

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def attend_triton(self) -> list[Tensor]:
        with mock.patch.object(hopper, "TAKES_HOPPER_DECODE", False):
            return [
                attend_pages(
                    self.q, *caches, self.table, self.lens, self.scale, max_context_len=self.longest, pdl=True
                )
                for caches in self.caches
            ]

    def attend_hopper(self, pdl: bool, variant: Variant | None = None) -> list[Tensor]:
        workspace = hopper.make_workspace(self.caches[0][0], variant)
        outputs = []
        for index, caches in enumerate(self.caches):
            output = hopper.attend(
                self.q, *caches, self.table, self.lens, self.scale, pdl=pdl and index > 0, variant=variant,
                workspace=workspace,
            )  # fmt: skip
            assert output is not None, "the kernel does not compile"
            outputs.append(output)
        return outputs

    def step_hopper(self, variant: Variant) -> list[Tensor]:
        """In one kernel a layer."""
        made = QueryParts(self.parts, None, self.cos_sin, self.cells, None)
        workspace = hopper.make_workspace(self.caches[0][0], variant)
        outputs = []
        for index, caches in enumerate(self.caches):
            output = hopper.attend_from_parts(
                made, *caches, self.table, self.lens, HEADS, self.scale, pdl=index > 0, variant=variant,
                workspace=workspace,
            )  # fmt: skip
            assert output is not None, "the kernel does not compile"
            outputs.append(output)
        return outputs

    def step(self, takes_hopper: bool, takes_parts: bool = False) -> list[Tensor]:
        workspace = hopper.workspace_of(self.caches[0][0])
        with (
            mock.patch.object(hopper, "TAKES_HOPPER_DECODE", takes_hopper),
            mock.patch.object(hopper, "TAKES_PARTS", takes_parts),
        ):
            return [
                rope_and_attend(
                    self.parts, None, self.cos_sin, self.cells, *caches, self.table, self.lens, HEADS,
                    self.scale, max_context_len=self.longest, workspace=workspace, pdl=True,
                )
                for caches in self.caches
            ]  # fmt: skip


def make_problem(lens: list[int], setting: Setting) -> Problem:
    head_dim, page_size, is_fp8 = setting.head_dim, setting.page_size, setting.shape.is_fp8
    counts = [-(-length // page_size) for length in lens]
    is_real = torch.tensor(lens, device=DEVICE) > 0
    pages = (torch.randperm(sum(counts), device=DEVICE) + 1).split(counts)
    table = torch.zeros(len(lens), max(counts), dtype=torch.int64, device=DEVICE)
    for row, own in zip(table, pages, strict=True):
        row[: len(own)] = own
    num_bytes = 2 * sum(lens) * KV_HEADS * (head_dim + 2 if is_fp8 else head_dim * 2)
    shape = (sum(counts) + 1, KV_HEADS, page_size, head_dim)

    def make_cache() -> Cache:
        values = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_()
        return Fp8Cache(*quantise_rows(values), torch.bfloat16) if is_fp8 else values

    caches = [(make_cache(), make_cache()) for _ in range(max(2, -(-COLD_BYTES // num_bytes)))]
    context_lens = torch.tensor(lens, device=DEVICE).clamp(min=1)
    newest = context_lens - 1
    pages_of_newest = table.gather(1, (newest // page_size)[:, None])[:, 0]
    angles = torch.arange(max(lens), device=DEVICE)[:, None] * torch.rand(head_dim // 2, device=DEVICE)
    return Problem(
        is_real=is_real,
        lens=context_lens,
        table=table,
        cells=pages_of_newest * page_size + newest % page_size,
        cos_sin=torch.cat((angles.cos(), angles.sin()), -1),
        q=torch.randn(len(lens), HEADS, head_dim, device=DEVICE).bfloat16(),
        parts=torch.randn(SPLITS, len(lens), (HEADS + 2 * KV_HEADS) * head_dim, device=DEVICE),
        caches=caches,
        num_bytes=num_bytes,
        longest=max(lens),
    )


def difference(actual: list[Tensor], expected: list[Tensor], is_real: Tensor) -> float:
    """Of real rows the largest, as a share of the largest value; not finite if a value is not."""
    pairs = [
        (one[is_real].float(), other[is_real].float()) for one, other in zip(actual, expected, strict=True)
    ]
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def measure(
    report: Report, rate: float, setting: Setting, workload: str, is_sweep: bool, has_unchained: bool
) -> None:
    problem = make_problem(WORKLOADS[workload], setting)
    layers = len(problem.caches)

    def add(what: str, kernel: str, run: Callable[[], list[Tensor]], wanted: list[Tensor] | None) -> None:
        apart = 0.0 if wanted is None else difference(run(), wanted, problem.is_real)
        assert apart <= MAX_DIFFERENCE, f"{what} by {kernel} is {apart} of the largest value off"
        expected_seconds = layers * problem.num_bytes / rate
        replays = max(2, round(ROUND_SECONDS / expected_seconds))
        seconds = time_graph(run, rounds=5, replays=replays) / layers
        report.add(
            **asdict(setting), workload=workload, what=what, kernel=kernel, us=seconds * 1e6,
            tb_per_second=problem.num_bytes / seconds / 1e12, share=problem.num_bytes / seconds / rate,
            apart=apart,
        )  # fmt: skip

    expected = problem.attend_triton()
    if is_sweep:
        expected_of_parts = [] if setting.shape.is_fp8 else problem.step(False)
        for shape, variant in setting.tasks(is_sweep):
            name = " ".join(f"{field} {value}" for field, value in asdict(variant).items())
            if shape.from_parts:
                add("step", name, partial(problem.step_hopper, variant), expected_of_parts)
            else:
                add("attention", name, partial(problem.attend_hopper, True, variant), expected)
        return
    add("attention", "triton", problem.attend_triton, None)
    add("attention", "hopper", partial(problem.attend_hopper, True), expected)
    if has_unchained:
        add("unchained", "hopper", partial(problem.attend_hopper, False), expected)
    add("step", "triton", partial(problem.step, False), None)
    expected = problem.step(False)
    add("step", "pair", partial(problem.step, True), expected)
    if not setting.shape.is_fp8:
        add("step", "hopper", partial(problem.step, True, True), expected)


def print_table(report: Report) -> None:
    """Microseconds per layer of a workload beside each other, Hopper's with their share of the read limit."""
    kernels = {"attention": ("triton", "hopper"), "step": ("triton", "pair", "hopper")}
    columns = [(what, cache, kernel) for what in kernels for cache in CACHES for kernel in kernels[what]]
    found: dict[tuple[int, str], dict[tuple[str, str, str], str]] = {}
    for row in report.rows:
        if row.get("kernel") in kernels["step"]:
            share = f" {row['share']:4.0%}" if row["kernel"] != "triton" else ""
            place = found.setdefault((row["head_dim"], row["workload"]), {})
            place[row["what"], row["cache"], row["kernel"]] = f"{row['us']:.1f}{share}"
    print(f"{'us per layer':22}" + "".join(f"{' '.join(column):>24}" for column in columns))
    for (head_dim, workload), cells in found.items():
        print(f"{f'{head_dim}, {workload}':22}" + "".join(f"{cells.get(key, ''):>24}" for key in columns))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--sweep", action="store_true", help="other variants, on some workloads")
    parser.add_argument("--head-dim", type=int, choices=(64, 128), action="append")
    parser.add_argument("--cache", choices=CACHES, action="append")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--unchained", action="store_true")
    parser.add_argument("--workload", choices=WORKLOADS, action="append")
    parser.add_argument("--seconds", type=float, default=28, help="begin nothing new after so many")
    arguments = parser.parse_args()
    start = time.monotonic()
    settings = [
        Setting(head_dim, cache, arguments.page_size)
        for head_dim in arguments.head_dim or (64, 128)
        for cache in arguments.cache or CACHES
    ]
    torch.manual_seed(0)
    report = Report(arguments.json)
    tasks = [task for setting in settings for task in setting.tasks(arguments.sweep)]
    with ThreadPoolExecutor(8) as pool:
        compiled = [pool.submit(compile_variant, *task) for task in tasks]
        rate = measure_read_rate().bytes_per_second
        report.add(what="read probe", tb_per_second=rate / 1e12)
        for future in compiled:
            future.result()
    workloads = arguments.workload or (SWEPT if arguments.sweep else WORKLOADS)
    for _, own in itertools.groupby(settings, key=lambda setting: setting.head_dim):
        for workload, setting in itertools.product(workloads, list(own)):
            name = f"heads of {setting.head_dim}, {workload}, {setting.cache}"
            if time.monotonic() - start > arguments.seconds:
                report.failures.append(f"{name}: no time")
                continue
            options = arguments.sweep, arguments.unchained
            report.section(name, partial(measure, report, rate, setting, workload, *options))
    if not arguments.sweep:
        print_table(report)
    report.write()
    print(f"{time.monotonic() - start:.0f} s; failed: {report.failures or 'nothing'}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
