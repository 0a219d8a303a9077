"""Is the LM head faster when its tiles draw than when it writes logits from which a kernel draws? And what
does that kernel take alone?

    PYTHONPATH=. python3 benchmarks/gpu_draw.py --output draw.json
    PYTHONPATH=. python3 benchmarks/gpu_draw.py --hopper --output draw.json

The LM head of Llama-3.2-1B's shape in BF16, random weights; every variant of tiles is compiled by worker
processes, its tokens are compared with those that torch draws from FP32 logits, and it is timed as a graph.
`written` is what `decode_chain` does without: `tiled_linear` (or cuBLAS), then `draw_tokens`; `draw alone` is
that second part.

--hopper: instead, `hopper_linear/draw_product.cu` beside what `draw_from_linear` has without it, for LM heads
of several models.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_timing import Report, time_graph
from tests.helpers.kernel_compiler import compiling, meta
from tiny_vllm.kernels import draw_from_linear
from tiny_vllm.kernels.draw_from_linear import draw_from_linear_ref, launch_draw
from tiny_vllm.kernels.draw_tokens import SlotAdvance, draw_tokens_ref, launch_draw_tokens
from tiny_vllm.kernels.hopper_linear.draw_launch import draw_product
from tiny_vllm.kernels.sampling_noise import noise_keys
from tiny_vllm.kernels.tiled_linear import Tiles
from tiny_vllm.kernels.triton_support import has_pdl

VOCABULARY, HIDDEN = 128256, 2048
# Rows of x, to rows of W, values of K, stages, columns brought to L2, warps. 64 rows are beyond the limit.
VARIANTS = {
    16: ((128, 128, 3, 0, 8), (64, 64, 5, 0, 4)),
    32: ((64, 64, 5, 0, 4), (128, 64, 4, 0, 8)),
    64: ((64, 64, 5, 0, 4),),
}
ROWS_ALONE = (64, 256)
# Logits per program, warps.
TILES_ALONE = ((2048, 4), (1024, 2), (1024, 4), (2048, 8), (4096, 8))
# For --hopper: rows of W, values of K.
HEADS = {"Llama-3.2-1B": (128256, 2048), "Qwen3-0.6B": (151936, 1024), "Llama-3.1-8B": (128256, 4096)}
HOPPER_ROWS = (9, 16, 32, 64, 65, 96, 128, 192, 256)


def compile_variant(rows: int, variant: tuple[int, ...]) -> str:
    """In a worker process: fills Triton's cache."""
    index = meta(rows, dtype=torch.int64)
    advance = SlotAdvance(index, index, index, index)
    try:
        with compiling() as kernels:
            launch_draw(
                meta(rows, HIDDEN), meta(VOCABULARY, HIDDEN), meta(rows, dtype=torch.float32),
                meta(rows, 2, dtype=torch.int32), advance, Tiles(*variant), True,
            )  # fmt: skip
        return f"{kernels[0].num_registers} registers, {kernels[0].stack_bytes} bytes of stack"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:150]}"


class Bench:
    """One number of rows at one temperature."""

    def __init__(self, weight: Tensor, rows: int, temperature: float) -> None:
        device = weight.device
        self.weight, self.pdl = weight, has_pdl(device)
        self.x = torch.randn(rows, weight.shape[1], device=device).bfloat16()
        self.temperature = torch.full((rows,), temperature, device=device)
        counter = torch.arange(rows, device=device)
        self.keys = noise_keys(counter, counter)
        self.advance = SlotAdvance(counter, counter.clone(), counter.clone(), counter.clone())
        self.logits = self.x.float() @ weight.float().T
        self.expected = draw_tokens_ref(self.logits, self.temperature, self.keys)

    def draw(self, tiles: Tiles | None) -> Tensor:
        arguments = self.x, self.weight, self.temperature, self.keys, self.advance
        if tiles is None:
            return draw_from_linear_ref(*arguments, self.pdl)
        return launch_draw(*arguments, tiles, self.pdl)

    def draw_without_hopper(self) -> Tensor:
        with mock.patch.object(draw_from_linear, "HOPPER_ROWS", ()):
            return draw_from_linear.draw_from_linear(
                self.x, self.weight, self.temperature, self.keys, self.advance, self.pdl
            )

    def draw_by_hopper(self) -> Tensor:
        tokens = draw_product(self.x, self.weight, self.temperature, self.keys, self.advance, self.pdl)
        assert tokens is not None, "the kernel is not taken"
        return tokens

    def draw_alone(self, block: int, num_warps: int) -> Tensor:
        arguments = self.logits, self.temperature, self.keys, self.advance
        return launch_draw_tokens(*arguments, self.pdl, block, num_warps)

    def measure(self, report: Report, name: str, draw: Callable[[], Tensor], compiled: str = "") -> None:
        same = float((draw() == self.expected).float().mean())
        report.add(
            head=tuple(self.weight.shape), rows=len(self.x), temperature=float(self.temperature[0]),
            variant=name, us=time_graph(draw) * 1e6, same=same, compiled=compiled,
        )  # fmt: skip


def make_head(vocabulary: int, hidden: int) -> Tensor:
    return (torch.randn(vocabulary, hidden, device="cuda") * hidden**-0.5 * 4).bfloat16()


def compare_hopper(report: Report) -> None:
    for head in HEADS.values():
        weight = make_head(*head)
        for rows in HOPPER_ROWS:
            for temperature in (0.0, 0.6):
                bench = Bench(weight, rows, temperature)
                for name, draw in (("without", bench.draw_without_hopper), ("hopper", bench.draw_by_hopper)):
                    report.section(name, partial(bench.measure, report, name, draw))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--hopper", action="store_true")
    arguments = parser.parse_args()
    report = Report(arguments.output)
    if arguments.hopper:
        torch.manual_seed(0)
        compare_hopper(report)
        return
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        futures = {
            (rows, variant): pool.submit(compile_variant, rows, variant)
            for rows, variants in VARIANTS.items()
            for variant in variants
        }
        compiled = {key: future.result() for key, future in futures.items()}
    torch.manual_seed(0)
    weight = make_head(VOCABULARY, HIDDEN)
    for rows, variants in VARIANTS.items():
        for temperature in (0.0, 0.6):
            bench = Bench(weight, rows, temperature)
            run = partial(bench.draw, None)
            report.section("written", partial(bench.measure, report, "written", run))
            for variant in variants:
                name, run = str(variant), partial(bench.draw, Tiles(*variant))
                report.section(name, partial(bench.measure, report, name, run, compiled[rows, variant]))
    for rows in ROWS_ALONE:
        for temperature in (0.0, 0.6):
            bench = Bench(weight, rows, temperature)
            run = partial(bench.draw, None)
            report.section("written", partial(bench.measure, report, "written", run))
            for tiles in TILES_ALONE:
                name, run = f"draw alone {tiles}", partial(bench.draw_alone, *tiles)
                report.section(name, partial(bench.measure, report, name, run))


if __name__ == "__main__":
    main()
