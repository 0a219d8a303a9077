"""Which tiles of a decode step's products make the whole step fastest?

    PYTHONPATH=. python3 benchmarks/gpu_step_products.py --json tiles.json [--models 1b] [--rows 64,128]

`gpu_decode_products.py` times products by themselves. In a step the parts that a product leaves are read by
attention or by what finishes rows, and a card at its power limit runs slower the more is moved. So here one
product at a time is computed by a variant of hopper_linear/decode_product.cu, everything else as
`choose_variant` has it: the variants that `estimate_cycles` likes best, and its best of every number of parts
and of blocks in a cluster. All variants of a product are timed by turns, since cards warm up. us of a step
with contexts of 800 at temperature 0.6: the median of all turns.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu_decode_chain import DEVICE, Workload, make_spec, make_weights
from benchmarks.gpu_timing import Report, time_replays
from tiny_vllm.kernels.hopper_linear import decode_launch as products
from tiny_vllm.kernels.hopper_linear.decode_launch import Variant
from tiny_vllm.models.rope import rope_table
from tiny_vllm.models.spec import ModelSpec

CONTEXT, TEMPERATURE = 800, 0.6
BEST = 5
TURNS, REPLAYS = 6, 8
# Columns of the result, terms, gated.
Shape = tuple[int, int, bool]


def shapes(spec: ModelSpec) -> dict[str, Shape]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return {
        "qkv": (spec.qkv_size, hidden, False), "output": (hidden, spec.q_size, False),
        "gate_up": (inner, hidden, True), "down": (hidden, inner, False),
    }  # fmt: skip


def pick_variants(rows: int, shape: Shape) -> list[Variant]:
    """The chosen one first."""
    every = list(products.candidates(rows, *shape))

    def cycles(variant: Variant) -> float:
        return products.estimate_cycles(variant, rows, *shape)

    best = heapq.nsmallest(BEST, every, key=cycles)
    kinds = {(variant.splits, variant.row_blocks) for variant in every}
    best += [
        min((variant for variant in every if (variant.splits, variant.row_blocks) == kind), key=cycles)
        for kind in sorted(kinds)
    ]
    return list(dict.fromkeys([products.choose_variant(rows, *shape), *best]))


class Step:
    """A captured step in which the product of one shape is computed by `variant`."""

    def __init__(self, work: Workload, shape: Shape, variant: Variant) -> None:
        self._work, usual = work, products.choose_variant
        self.us: list[float] = []

        def choose(rows: int, width: int, terms: int, gated: bool = False) -> Variant:
            return variant if (width, terms, gated) == shape else usual(rows, width, terms, gated)

        with mock.patch.object(products, "choose_variant", choose):
            work.rewind()
            work.step()
            work.rewind()
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._kept = work.step()

    def time(self) -> None:
        seconds = time_replays(self._graph, rounds=1, replays=REPLAYS, before_round=self._work.rewind)
        self.us.append(seconds * 1e6)


@torch.inference_mode()
def measure(report: Report, work: Workload, model: str, name: str, shape: Shape) -> None:
    rows = len(work.slots)
    steps = {variant: Step(work, shape, variant) for variant in pick_variants(rows, shape)}
    for _ in range(TURNS):
        for step in steps.values():
            step.time()
    usual = statistics.median(next(iter(steps.values())).us)
    for index, (variant, step) in enumerate(steps.items()):
        fields: dict[str, Any] = {
            field: getattr(variant, field) for field in ("warpgroups", "columns", "splits", "row_blocks")
        }
        us = statistics.median(step.us)
        report.add(
            model=model, rows=rows, product=name, chosen=index == 0, **fields, us=us, change=us / usual - 1
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--models", default="1b,qwen3-0.6b,8b")
    parser.add_argument("--rows", default="32,64,128,192,256")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report = Report(arguments.json)
    for model in arguments.models.split(","):
        spec = make_spec(model)
        with torch.inference_mode():
            weights, cos_sin = make_weights(spec), rope_table(spec.rope, max_len=8192).to(DEVICE)
        for rows in map(int, arguments.rows.split(",")):
            work = Workload(spec, weights, cos_sin, rows, CONTEXT, True)
            work.temperature.fill_(TEMPERATURE)
            for name, shape in shapes(spec).items():
                report.section(
                    f"{model}, {rows} rows, {name}", partial(measure, report, work, model, name, shape)
                )
            del work
        del weights
        torch.cuda.empty_cache()
    print(f"failed: {report.failures or 'nothing'}")


if __name__ == "__main__":
    main()
