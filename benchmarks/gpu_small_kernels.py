"""How near to the memory's rate are a layer's kernels that compute little, on a long prompt?

    PYTHONPATH=. python3 benchmarks/gpu_small_kernels.py --output small_kernels.json

Llama-3.2-1B's shape in BF16, 8192 tokens, shuffled pages of 16: rotation with the cache write (also with
other heads per program and threads per pair), SiLU and product, norm. Each is checked against its reference,
then timed on as many inputs as push each other out of L2. us, GB/s read and written, share of a copy's rate.
Last, the memsets that come with a layer's products by cuBLAS.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_timing import Report, measure_read_rate, rotate, time_graph
from tiny_vllm.kernels import rope
from tiny_vllm.kernels.gated_activation import gated_activation, gated_activation_ref
from tiny_vllm.kernels.rms_norm import rms_norm, rms_norm_ref
from tiny_vllm.kernels.rope import prepare_rope, rope_and_cache, rope_and_cache_ref

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 2048, 8192, 32, 8, 64, 16
HEADS_PER_PROGRAM = (8, 16, 32, 64)
THREADS_PER_PAIR = (1, 2, 4)
# One rounding to BF16 each, of results that may differ in FP32's last bits before.
MAX_ERROR = 2**-7


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((actual.float() - expected.float()).abs().max() / expected.float().abs().max())


class Bench:
    def __init__(self, report: Report, num_tokens: int, copy_rate: float) -> None:
        self.report, self.num_tokens, self.copy_rate = report, num_tokens, copy_rate

    def add(self, kernel: str, inputs: list[Tensor], launch: Callable[[Tensor], Any], moved: int) -> None:
        """moved: bytes that a launch reads and writes."""
        seconds = time_graph(lambda: [launch(one) for one in inputs], rounds=5, replays=5) / len(inputs)
        rate = moved / seconds
        self.report.add(
            kernel=kernel, tokens=self.num_tokens, us=seconds * 1e6, gb_s=rate / 1e9,
            share_of_copy=rate / self.copy_rate,
        )  # fmt: skip

    def check(self, kernel: str, pairs: list[tuple[Tensor, Tensor]]) -> None:
        errors = [error(actual, expected) for actual, expected in pairs]
        assert all(one <= MAX_ERROR for one in errors), f"{kernel} is off by {errors}"

    def rotation(self) -> None:
        """Every token's cell is another one of shuffled pages; positions are those of one prompt."""
        count = self.num_tokens
        positions = torch.arange(count, device="cuda")
        pages = torch.randperm(count // PAGE_SIZE + 1, device="cuda")
        cells = pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        angles = positions[:, None] * torch.rand(HEAD_DIM // 2, device="cuda")
        table = torch.cat((angles.cos(), angles.sin()), -1)
        step = prepare_rope(table, positions, cells, KV_HEADS, PAGE_SIZE)
        shape = (2, len(pages), KV_HEADS, PAGE_SIZE, HEAD_DIM)
        expected_caches, caches = torch.zeros(2, *shape, device="cuda").bfloat16()
        inputs = rotate(lambda: random(count, (HEADS + 2 * KV_HEADS) * HEAD_DIM))
        expected = rope_and_cache_ref(inputs[0], step, expected_caches[0], expected_caches[1], HEADS)
        moved = 2 * inputs[0].nbytes + table.nbytes + positions.nbytes + cells.nbytes
        own = rope.HEADS_PER_PROGRAM, rope.THREADS_PER_PAIR
        choices = itertools.product(HEADS_PER_PROGRAM, THREADS_PER_PAIR)
        for heads, threads in (own, *(choice for choice in choices if choice != own)):
            name = f"rope_and_cache, {heads} heads per program, {threads} threads per pair"
            with (
                mock.patch.object(rope, "HEADS_PER_PROGRAM", heads),
                mock.patch.object(rope, "THREADS_PER_PAIR", threads),
            ):
                caches.zero_()
                launch = partial(
                    rope_and_cache, step=step, k_cache=caches[0], v_cache=caches[1], num_heads=HEADS
                )
                self.check(name, [(launch(inputs[0]), expected), (caches, expected_caches)])
                self.add(name, inputs, launch, moved)

    def activation(self) -> None:
        inputs = rotate(lambda: random(self.num_tokens, 2 * INTERMEDIATE))
        for activation in ("silu", "gelu_tanh", "clamped_swiglu"):
            activate = partial(gated_activation, activation=activation)
            self.check(activation, [(activate(inputs[0]), gated_activation_ref(inputs[0], activation))])
            self.add(activation, inputs, activate, inputs[0].nbytes * 3 // 2)

    def norm(self) -> None:
        inputs, weight = rotate(lambda: random(self.num_tokens, HIDDEN)), torch.rand(HIDDEN, device="cuda")
        self.check("rms_norm", [(rms_norm(inputs[0], weight, 1e-5), rms_norm_ref(inputs[0], weight, 1e-5))])
        self.add("rms_norm", inputs, partial(rms_norm, weight=weight, eps=1e-5), inputs[0].nbytes * 2)

    def memsets(self) -> None:
        """The products are all of a layer that is not a kernel of ours."""
        x, wide = random(self.num_tokens, HIDDEN), random(self.num_tokens, INTERMEDIATE)
        residual = random(self.num_tokens, HIDDEN)
        qkv, output = random((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), random(HIDDEN, HIDDEN)
        gate_up, down = random(2 * INTERMEDIATE, HIDDEN), random(HIDDEN, INTERMEDIATE)
        products: dict[str, Callable[[], Any]] = {
            "qkv": partial(F.linear, x, qkv),
            "output, added": partial(residual.addmm_, x, output.T),
            "gate and up": partial(F.linear, x, gate_up),
            "down, added": partial(residual.addmm_, wide, down.T),
        }
        for name, launch in products.items():
            launch()
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                launch()
                torch.cuda.synchronize()
            on_device = torch.autograd.DeviceType.CUDA
            names = [event.name for event in profile.events() if event.device_type == on_device]
            self.report.add(product=name, memsets=sum("Memset" in one for one in names), kernels=names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the results as JSON")
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args()
    torch.manual_seed(0)
    report = Report(options.output)
    rate = measure_read_rate(1_000_000_000)["copy"]
    report.add(copy_gb_s=rate / 1e9)
    bench = Bench(report, options.tokens, rate)
    with torch.inference_mode():
        for part in (bench.rotation, bench.activation, bench.norm, bench.memsets):
            report.section(part.__name__, part)


if __name__ == "__main__":
    main()
