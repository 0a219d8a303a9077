"""What does a layer of a long prompt cost besides attention, and which way of computing each part is fastest?

    PYTHONPATH=. python3 benchmarks/gpu_prefill_products.py --output products.json

Llama-3.2-1B's and Llama-3.1-8B's shapes in BF16, random values, some thousand tokens at a time: the products
by cuBLAS, alone and with the residual added in place or by a kernel of its own; gate and up with SiLU as two
kernels or as one (kernels/hopper_linear), checked against FP32; norm. us and TFLOP/s of each.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_timing import Report, rotate, time_graph
from tiny_vllm.kernels.gated_activation import gated_activation, gated_activation_ref
from tiny_vllm.kernels.hopper_linear.launch import multiply_gated
from tiny_vllm.kernels.rms_norm import rms_norm


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    qkv: int


SHAPES = {"1b": Shape(2048, 8192, 3072), "8b": Shape(4096, 14336, 6144)}
MAX_ERROR = 2**-7


def _gate_after(x: Tensor, weight: Tensor) -> Tensor:
    return gated_activation(F.linear(x, weight), "silu")


def _add_after(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    return F.linear(x, weight) + residual


class Bench:
    """One shape with a number of tokens."""

    def __init__(self, report: Report, name: str, num_tokens: int) -> None:
        self.report, self.name, self.num_tokens, self.shape = report, name, num_tokens, SHAPES[name]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").bfloat16()

    def matrix(self, rows: int, columns: int) -> Tensor:
        return self.random(rows, columns).mul_(columns**-0.5)

    def add(self, part: str, seconds: float, flops: float = 0.0, **more: object) -> None:
        self.report.add(
            shape=self.name, tokens=self.num_tokens, part=part, us=seconds * 1e6,
            tflops=flops / seconds / 1e12, **more,
        )  # fmt: skip

    def products(self) -> None:
        shape, T = self.shape, self.num_tokens
        for part, rows, columns in (
            ("qkv", shape.qkv, shape.hidden),
            ("output", shape.hidden, shape.hidden),
            ("gate_up", 2 * shape.intermediate, shape.hidden),
            ("down", shape.hidden, shape.intermediate),
        ):
            x, weight, residual = self.random(T, columns), self.matrix(rows, columns), self.random(T, rows)
            flops = 2.0 * T * rows * columns
            self.add(part, time_graph(partial(F.linear, x, weight)), flops)
            if part in ("output", "down"):
                with_kernel = partial(_add_after, x, weight, residual)
                self.add(f"{part} + residual", time_graph(with_kernel), flops)
                # Replays add up: a small factor keeps the values finite.
                in_place = partial(residual.addmm_, x, weight.T, alpha=1e-3)
                self.add(f"{part} onto residual", time_graph(in_place), flops)

    def gated(self) -> None:
        shape, T = self.shape, self.num_tokens
        x, weight = self.random(T, shape.hidden), self.matrix(2 * shape.intermediate, shape.hidden)
        some = slice(T // 2, T // 2 + 300)
        expected = gated_activation_ref(F.linear(x[some].float(), weight.float()), "silu")
        for how, multiply in (("cuBLAS, then SiLU", _gate_after), ("one kernel", multiply_gated)):
            run = partial(multiply, x, weight)
            result = run()
            assert result is not None, "the kernel does not compile"
            error = float((result[some].float() - expected).norm() / expected.norm())
            assert error < MAX_ERROR, f"wrong: relative error {error:.3g}"
            flops = 4.0 * T * shape.hidden * shape.intermediate
            self.add(f"gated, {how}", time_graph(run), flops, error=error)

    def others(self) -> None:
        shape, T = self.shape, self.num_tokens
        norm = torch.ones(shape.hidden, device="cuda")
        hidden = rotate(lambda: self.random(T, shape.hidden))
        self.add("norm", time_graph(lambda: [rms_norm(x, norm, 1e-5) for x in hidden]) / len(hidden))
        wide = rotate(lambda: self.random(T, 2 * shape.intermediate))
        self.add("silu", time_graph(lambda: [gated_activation(x, "silu") for x in wide]) / len(wide))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--shapes", default="1b,8b")
    parser.add_argument("--tokens", default="8192,16384")
    arguments = parser.parse_args()
    report = Report(arguments.output)
    cases = [(n, int(t)) for n in arguments.shapes.split(",") for t in arguments.tokens.split(",")]
    for name, count in cases:
        bench = Bench(report, name, count)
        report.section(f"{name} {count} products", bench.products)
        report.section(f"{name} {count} others", bench.others)
        report.section(f"{name} {count} gated", bench.gated)
    print("failed sections:", report.failures or "none")


if __name__ == "__main__":
    main()
