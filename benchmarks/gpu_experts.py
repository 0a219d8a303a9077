"""How near to the memory's rate are the experts of a decode step of few rows?

    PYTHONPATH=. python3 benchmarks/gpu_experts.py --json experts.json [--sweep] [--seconds 35]

Layers as the decode chain runs them from the router's logits on: norm and choice of experts, gate and up,
down, sum; BF16, random weights and logits, one CUDA graph over all layers, whose weights push each other out
of the L2 cache, with programmatic dependent launch where the GPU has it. `unsorted` multiplies picks as they
come (picked_experts.py), `sorted` tiles of rows with one expert (expert_products.py), `chosen` what the chain
takes. us per layer; distinct experts per layer; their bytes over the time as a share of the read probe's
rate. Both ways are compared before they are timed. --sweep: other tiles for the unsorted products, one of the
two at a time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_timing import Report, time_graph
from tiny_vllm.kernels import expert_products, picked_experts
from tiny_vllm.kernels.cuda.read_probe import measure_read_rate
from tiny_vllm.kernels.expert_products import ExpertMatrices, expert_parts
from tiny_vllm.kernels.finish_rows import finish_rows
from tiny_vllm.kernels.norm_and_pick import norm_and_pick
from tiny_vllm.kernels.picked_experts import MAX_PICKS, PickTiles, choose_pick_tiles
from tiny_vllm.kernels.triton_support import has_pdl
from tiny_vllm.models.decode_chain import SUM_COLUMNS

EPS = 1e-6
# Inner values, and the residual after every layer, are rounded to BF16 on both ways.
MAX_ERROR = 2**-6
WARPS = (2, 4, 8)
LOADS = (8, 16, 32)


@dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    experts: int
    active: int
    layers: int


SHAPES = {
    "qwen3_30b_a3b": Shape(2048, 768, 128, 8, 8),
    "mixtral_8x7b": Shape(4096, 14336, 8, 2, 4),
}


def random(*sizes: int) -> Tensor:
    """BF16 that keeps the size of what it multiplies."""
    made = torch.empty(*sizes, dtype=torch.bfloat16, device="cuda")
    return made.normal_(std=sizes[-1] ** -0.5)


class Layers:
    """The experts' part of all layers of a shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.norm = torch.ones(shape.hidden, device="cuda")
        self.matrices = [
            ExpertMatrices(
                random(shape.experts, 2 * shape.inner, shape.hidden),
                random(shape.experts, shape.hidden, shape.inner),
                None,
                None,
            )
            for _ in range(shape.layers)
        ]

    def steps(self, num_rows: int) -> tuple[Callable[[], Tensor], float]:
        """What to time, and how many experts a layer reads on average."""
        shape, pdl = self.shape, has_pdl(torch.device("cuda"))
        logits = torch.randn(shape.layers, 1, num_rows, shape.experts, device="cuda")
        x = torch.randn(num_rows, shape.hidden, device="cuda").bfloat16()
        picked = logits.squeeze(1).topk(shape.active).indices.flatten(1)
        distinct = sum(len(row.unique()) for row in picked) / shape.layers

        def run() -> Tensor:
            hidden = x
            for index, (matrices, row) in enumerate(zip(self.matrices, logits, strict=True)):
                picks = norm_and_pick(
                    hidden, self.norm, EPS, row, None, shape.active, True, pdl and index > 0
                )
                parts = expert_parts(*picks, matrices, "silu", pdl)
                hidden, _ = finish_rows(
                    parts.view(shape.active, -1, SUM_COLUMNS),
                    hidden.view(-1, SUM_COLUMNS),
                    None,
                    EPS,
                    pdl=pdl,
                )
                hidden = hidden.view(num_rows, -1)
            return hidden

        return run, distinct


@contextmanager
def sorting(is_sorted: bool | None) -> Iterator[None]:
    """None: what the chain takes."""
    if is_sorted is None:
        yield
        return
    with mock.patch.object(expert_products, "takes_picks", lambda *counts: not is_sorted):
        yield


@contextmanager
def tiles_for(is_gated: bool, tiles: PickTiles) -> Iterator[None]:
    def choose(K: int, dtype: torch.dtype, gated: bool) -> PickTiles:
        return tiles if gated == is_gated else choose_pick_tiles(K, dtype, gated)

    with mock.patch.object(picked_experts, "choose_pick_tiles", choose):
        yield


def variants(K: int, is_gated: bool) -> list[PickTiles]:
    """Other numbers of warps, and of loads that a thread has in flight."""
    own = choose_pick_tiles(K, torch.bfloat16, is_gated)
    per_row = own.num_tiles * (2 if is_gated else 1)
    found = []
    for num_warps in WARPS:
        for loads in LOADS:
            rows = 1 << (max(loads // per_row, 1).bit_length() - 1)
            tiles = replace(own, block_n=rows * num_warps, num_warps=num_warps)
            if tiles not in found:
                found.append(tiles)
    # Half a row at a time.
    if own.num_tiles % 2 == 0:
        found.append(replace(own, num_tiles=own.num_tiles // 2, block_n=own.block_n * 2))
        found.append(replace(own, num_tiles=own.num_tiles // 2))
    return found


def measure(launch: Callable[[], Tensor], num_layers: int) -> float:
    """us per layer."""
    return time_graph(launch, rounds=5, replays=10) / num_layers * 1e6


class Bench:
    def __init__(self, report: Report, rate: float, deadline: float) -> None:
        self.report, self.rate, self.deadline = report, rate, deadline

    def add(self, name: str, shape: Shape, rows: int, distinct: float, us: float, **more: object) -> None:
        moved = distinct * 3 * shape.hidden * shape.inner * 2
        self.report.add(
            shape=name, rows=rows, distinct=distinct, us=us, limit_us=moved / self.rate * 1e6,
            share=moved / self.rate / us * 1e6, **more,
        )  # fmt: skip

    def compare(self, name: str, all_rows: list[int]) -> None:
        shape = SHAPES[name]
        layers = Layers(shape)
        for rows in all_rows:
            launch, distinct = layers.steps(rows)
            ways: dict[str, bool | None] = {"sorted": True, "chosen": None}
            if rows * shape.active <= MAX_PICKS:
                ways["unsorted"] = False
            results = {}
            for way, is_sorted in ways.items():
                with sorting(is_sorted):
                    results[way] = launch().float()
                    us = measure(launch, shape.layers)
                self.add(name, shape, rows, distinct, us, way=way)
            expected = results["sorted"]
            for way, actual in results.items():
                error = float((actual - expected).abs().max() / expected.abs().max())
                assert error <= MAX_ERROR, f"{way} is off by {error}"

    def sweep(self, name: str, rows: int) -> None:
        shape = SHAPES[name]
        launch, distinct = Layers(shape).steps(rows)
        with sorting(False):
            for product, K in (("gate_up", shape.hidden), ("down", shape.inner)):
                is_gated = product == "gate_up"
                for tiles in variants(K, is_gated):
                    if time.perf_counter() > self.deadline:
                        print("out of time", flush=True)
                        return
                    with tiles_for(is_gated, tiles):
                        us = measure(launch, shape.layers)
                    self.add(
                        name, shape, rows, distinct, us, product=product, warps=tiles.num_warps,
                        block_n=tiles.block_n, num_tiles=tiles.num_tiles,
                        is_own=tiles == choose_pick_tiles(K, torch.bfloat16, is_gated),
                    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--sweep", action="store_true", help="other tiles, of the first and third --rows")
    parser.add_argument("--seconds", type=float, default=35.0, help="when to start no further variant")
    options = parser.parse_args()
    deadline = time.perf_counter() + options.seconds
    torch.manual_seed(0)
    report = Report(options.json)
    rate = measure_read_rate().bytes_per_second
    report.add(read_gb_s=rate / 1e9)
    bench = Bench(report, rate, deadline)
    with torch.inference_mode():
        for name in SHAPES:
            report.section(name, lambda name=name: bench.compare(name, options.rows))  # type: ignore[misc]
        if options.sweep:
            for rows in options.rows[0:3:2]:
                report.section(
                    f"tiles, {rows} rows",
                    lambda rows=rows: bench.sweep("qwen3_30b_a3b", rows),  # type: ignore[misc]
                )


if __name__ == "__main__":
    main()
