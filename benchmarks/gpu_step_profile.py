"""Where does the time of a decode step go, kernel by kernel, within its CUDA graph?

    PYTHONPATH=. python3 benchmarks/gpu_step_profile.py [--rows 1,8,64] [--contexts 129,640] [--no-pdl]

Per kernel name: how many there are in a step, and how much later than its predecessor one ends on average,
which is what it costs the step (kernels overlap, so durations would count time twice). Profiling may slow the
step down; the sum is printed beside the time without the profiler.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_decode_chain import DEVICE, REPLAYS, Workload, make_spec, make_weights
from benchmarks.gpu_timing import time_replays
from tiny_vllm.kernels.triton_support import has_pdl
from tiny_vllm.models.rope import rope_table

PROFILED = 5


@torch.inference_mode()
def profile_step(work: Workload) -> None:
    work.step()
    work.rewind()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work.step()
    seconds = time_replays(graph, rounds=5, replays=REPLAYS, before_round=work.rewind, keep=kept)
    work.rewind()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            graph.replay()
        torch.cuda.synchronize()
    kernels = sorted(
        (event.time_range.end, event.time_range.start, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    per_step = len(kernels) // PROFILED
    costs: dict[str, list[float]] = defaultdict(list)
    lengths: dict[str, list[float]] = defaultdict(list)
    place_of: dict[str, list[int]] = defaultdict(list)
    for place in range(per_step):
        ends = [
            kernels[step * per_step + place][0] - kernels[step * per_step + place - 1][0]
            for step in range(1, PROFILED)
        ]
        spans = [
            kernels[step * per_step + place][0] - kernels[step * per_step + place][1]
            for step in range(1, PROFILED)
        ]
        name = kernels[place][2]
        # Products differ by what they multiply: told apart by what came before them.
        if "linear" in name or "product" in name:
            name += " after " + kernels[place - 1][2]
        costs[name].append(median(ends))
        lengths[name].append(median(spans))
        place_of[name].append(place)
    total = sum(sum(values) for values in costs.values())
    print(f"  {seconds * 1e6:.0f} us without the profiler, {total:.0f} with it, {per_step} kernels")
    for name in sorted(costs, key=lambda name: place_of[name][0]):
        values = costs[name]
        print(
            f"  {sum(values):8.1f} us  {len(values):3} x {sum(values) / len(values):7.2f}"
            f"  (running {sum(lengths[name]) / len(values):6.2f})  {name[:110]}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--contexts", default="129,640")
    parser.add_argument("--no-pdl", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), flush=True)
    spec = make_spec("1b")
    weights = make_weights(spec)
    cos_sin = rope_table(spec.rope, max_len=8192).to(DEVICE)
    for rows in map(int, arguments.rows.split(",")):
        for context in map(int, arguments.contexts.split(",")):
            print(f"== rows {rows} context {context}", flush=True)
            use_pdl = has_pdl(DEVICE) and not arguments.no_pdl
            profile_step(Workload(spec, weights, cos_sin, rows, context, use_pdl))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
