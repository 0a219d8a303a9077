"""When do the blocks of Hopper's decode attention begin, get their first tile, and end?

    PYTHONPATH=. python3 benchmarks/gpu_decode_ends.py --json ends.json [--head-dim 64] [--workload 256x800]

Attention reads its keys and values some 10 % slower than one pass over a buffer does, and all blocks have
equal shares. If some multiprocessors are slower than others, the card waits for these: this tells by how
much. The kernel is compiled with four reads of the GPU's clock per block (gpu_decode_attention.py has times
without); the layers of a workload run as a graph, chained, and the clocks are those of the last one.

us from the first block's begin: of all blocks the mean, the first and the last. `idle` is the share of the
kernel in which blocks have ended already, on average: what a perfect distribution could gain. Blocks are also
averaged by multiprocessor, and those of several replays are compared: `steady` is the correlation of the ends
of two replays, 1 where the same multiprocessors are always late.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_decode_attention import DEVICE, WORKLOADS, Problem, Setting, make_problem
from benchmarks.gpu_timing import Report, time_graph
from tiny_vllm.kernels.hopper_decode import launch as hopper

BEGIN, TABLES, TILE, END, UNIT = range(5)
REPLAYS = 5
# Texts of attention.cu, each there once, and what takes their place.
CLOCK = """
DEV void note(const Params& p, int what, u64 value) {
  ((u64*)p.flags)[gridDim.x + block_index() * 5 + what] = value;
}
DEV u64 clock_now() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
DEV int multiprocessor() {
  int unit;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(unit));
  return unit;
}
"""
MARKS = {
    "// Where things lie in shared memory.\n": CLOCK + "// Where things lie in shared memory.\n",
    "  launch_dependents();\n  const Shared shared;\n": (
        "  launch_dependents();\n"
        "  if (threadIdx.x == 0) note(p, 0, clock_now()), note(p, 4, multiprocessor());\n"
        "  const Shared shared;\n"
    ),
    "  named_sync(0, THREADS);\n": (
        "  named_sync(0, THREADS);\n  if (threadIdx.x == 0) note(p, 1, clock_now());\n"
    ),
    "    Consumer(p, shared, warp - PRODUCING_WARPS, lane).consume();\n": (
        "    {\n"
        "    if (warp == PRODUCING_WARPS) {\n"
        "      wait(shared.full(0), 0);\n"
        "      if (lane == 0) note(p, 2, clock_now());\n"
        "    }\n"
        "    Consumer(p, shared, warp - PRODUCING_WARPS, lane).consume();\n"
        "    // The last of its warps.\n"
        "    if (lane == 0)\n"
        "      atomicMax((u64*)p.flags + gridDim.x + block_index() * 5 + 3, clock_now());\n"
        "    }\n"
    ),
}


def marked_source() -> str:
    """attention.cu with its clocks, which lie behind the flags."""
    text = hopper.source()
    for place, marked in MARKS.items():
        assert text.count(place) == 1, f"not once in the kernel's source: {place}"
        text = text.replace(place, marked)
    return text


def make_workspace(problem: Problem) -> tuple[hopper.Workspace, Tensor]:
    """A workspace with room for the clocks, and these, [blocks, 5] int64."""
    own = hopper.workspace_of(problem.caches[0][0])
    assert own is not None
    blocks = len(own.flags)
    # As many units of 8 bytes as there are blocks come first: of these the first half are the flags.
    memory = torch.zeros(blocks * 6, dtype=torch.int64, device=DEVICE)
    return hopper.Workspace(own.parts, memory.view(torch.int32)[:blocks]), memory[blocks:].view(blocks, 5)


def attend(problem: Problem, workspace: hopper.Workspace) -> list[Tensor]:
    outputs = []
    for index, caches in enumerate(problem.caches):
        output = hopper.attend(
            problem.q, *caches, problem.table, problem.lens, problem.scale, workspace=workspace, pdl=index > 0
        )
        assert output is not None, "the kernel does not compile"
        outputs.append(output)
    return outputs


def measure(report: Report, setting: Setting, workload: str) -> None:
    problem = make_problem(WORKLOADS[workload], setting)
    workspace, clocks = make_workspace(problem)
    expected = problem.attend_triton()
    graph = torch.cuda.CUDAGraph()
    attend(problem, workspace)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        outputs = attend(problem, workspace)
    runs = []
    for _ in range(REPLAYS):
        clocks.zero_()
        graph.replay()
        torch.cuda.synchronize()
        runs.append(clocks.cpu())
    apart = max(float((own - other).abs().max()) for own, other in zip(outputs, expected, strict=True))
    assert apart < 0.1, f"wrong by {apart}"
    us = time_graph(partial(attend, problem, workspace), rounds=3, replays=4) / len(problem.caches) * 1e6
    report.add(head_dim=setting.head_dim, workload=workload, us=us, **summary(runs))


def summary(runs: list[Tensor]) -> dict[str, Any]:
    """Of the last replay."""
    times = runs[-1][:, :UNIT].double() / 1e3
    times -= times[:, BEGIN].min()
    ends = times[:, END]
    found: dict[str, Any] = {}
    for name, index in (("begin", BEGIN), ("tables", TABLES), ("first tile", TILE), ("end", END)):
        column = times[:, index]
        found[name] = [round(float(value), 2) for value in (column.mean(), column.min(), column.max())]
    found["idle"] = float((ends.max() - ends).mean() / ends.max())
    units = runs[-1][:, UNIT]
    by_unit = torch.stack([ends[units == unit].mean() for unit in units.unique()])
    found["multiprocessors"] = [round(float(value), 2) for value in by_unit.sort().values]
    lengths = [(run[:, END] - run[:, BEGIN].min()).double() for run in runs[-2:]]
    found["steady"] = float(torch.corrcoef(torch.stack(lengths))[0, 1])
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--head-dim", type=int, choices=(64, 128), action="append")
    parser.add_argument("--workload", choices=WORKLOADS, action="append")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report = Report(arguments.json)
    source = marked_source()
    with mock.patch.object(hopper, "source", lambda: source):
        for head_dim in arguments.head_dim or (64, 128):
            for workload in arguments.workload or ("256x800", "64x1100", "16x1000"):
                setting = Setting(head_dim, "bf16", 16)
                report.section(workload, partial(measure, report, setting, workload))


if __name__ == "__main__":
    main()
