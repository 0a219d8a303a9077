"""What does a layer of a long prompt cost besides attention, and which way of computing each part is fastest?

    PYTHONPATH=. python3 benchmarks/gpu_prefill_products.py --output products.json

Shapes of Llama-3.2-1B, Llama-3.1-8B and Qwen3-0.6B in BF16, random values, some hundred to some thousand
tokens at a time: the products by cuBLAS, alone and with the residual added in place or by a kernel of its
own, and by kernels/hopper_linear in tiles of each size; gate and up with SiLU as two kernels or as one; norm.
Own products are checked against FP32 first. us and TFLOP/s of each.

Then all layers of a model, one prompt a step (norm, QKV, rotation and cache, attention, output, norm, gate
and up, down): with products by cuBLAS or by kernels/hopper_linear, each with and without dependent launch
(kernels/triton_support.py), launched kernel by kernel and as a CUDA graph. These must give the same hidden
states: exactly with and without dependent launch, nearly with other products.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_timing import Report, rotate, time_graph, time_launches
from tiny_vllm.kernels.hopper_linear import launch as hopper_linear
from tiny_vllm.kernels.hopper_linear.launch import (
    CLUSTER,
    TILE_COLUMNS,
    Variant,
    choose_variant,
    multiply_gated,
    multiply_plain,
)
from tiny_vllm.kernels.hopper_prefill.launch import count_multiprocessors
from tiny_vllm.kernels.rms_norm import rms_norm
from tiny_vllm.kernels.silu_and_mul import silu_and_mul, silu_and_mul_ref
from tiny_vllm.models.batch import ForwardBatch
from tiny_vllm.models.decoder import Decoder
from tiny_vllm.models.kv_cache import KVCache
from tiny_vllm.weights.checkpoint import open_checkpoint
from tiny_vllm.weights.load import load_weights

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Shape:
    """model: of benchmarks/shapes. attended: columns of the queries, and of what attention gives."""

    model: str
    hidden: int
    intermediate: int
    qkv: int
    attended: int


SHAPES = {
    "1b": Shape("llama-3.2-1b", 2048, 8192, 3072, 2048),
    "8b": Shape("llama-3.1-8b", 4096, 14336, 6144, 4096),
    "0.6b": Shape("qwen3-0.6b", 1024, 3072, 4096, 2048),
}
MAX_ERROR = 2**-7
# Of hidden states after all layers: every layer rounds some times, and adds to what is there.
MAX_CHAIN_ERROR = 2**-4
PAGE_SIZE = 16


def _gate_after(x: Tensor, weight: Tensor) -> Tensor:
    return silu_and_mul(F.linear(x, weight))


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
            ("output", shape.hidden, shape.attended),
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
            if part != "gate_up":
                self.own_products(part, x, weight, residual if part != "qkv" else None)

    def own_products(self, part: str, x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
        """In tiles of each size, onto the residual in place where there is one."""
        rows, width, terms = len(x), *weight.shape
        adds = residual is not None
        clusters = count_multiprocessors(x.device) // CLUSTER
        chosen = choose_variant(rows, width, terms, adds, clusters)
        some = slice(rows // 2, rows // 2 + 300)
        expected = F.linear(x[some].float(), weight.float())
        # Replays add up: small factors keep the values finite.
        small = x * 1e-3
        for tile_columns in TILE_COLUMNS:
            variant = Variant(adds=adds, tile_columns=tile_columns)
            result = multiply_plain(x, weight, residual, variant=variant)
            assert result is not None, "the kernel does not compile"
            right = expected if residual is None else expected + residual[some].float()
            error = float((result[some].float() - right).norm() / right.norm())
            assert error < MAX_ERROR, f"wrong: relative error {error:.3g}"
            run = partial(multiply_plain, small, weight, residual, in_place=adds, variant=variant)
            self.add(
                f"{part}{' onto residual' if adds else ''}, own, tiles of {tile_columns}", time_graph(run),
                2.0 * rows * width * terms, error=error, is_chosen=variant == chosen,
            )  # fmt: skip

    def gated(self) -> None:
        shape, T = self.shape, self.num_tokens
        x, weight = self.random(T, shape.hidden), self.matrix(2 * shape.intermediate, shape.hidden)
        some = slice(T // 2, T // 2 + 300)
        expected = silu_and_mul_ref(F.linear(x[some].float(), weight.float()))
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
        self.add("silu", time_graph(lambda: [silu_and_mul(x) for x in wide]) / len(wide))


class ChainBench:
    """All layers of one model."""

    def __init__(self, report: Report, name: str) -> None:
        self.report, self.name = report, name
        checkpoint = open_checkpoint(
            str(ROOT / "benchmarks" / "shapes" / SHAPES[name].model), load_format="dummy"
        )
        self.spec = checkpoint.spec
        weights = load_weights(checkpoint, dtype=torch.bfloat16, device="cuda")
        # A decoder takes the layers out of the list, and shares their tensors.
        self.decoders = {
            pdl: Decoder(
                self.spec, replace(weights, layers=list(weights.layers)), max_model_len=1 << 15, use_pdl=pdl
            )
            for pdl in (False, True)
        }

    def batch(self, num_tokens: int) -> tuple[ForwardBatch, KVCache]:
        """One prompt."""
        positions = torch.arange(num_tokens, device="cuda")
        pages = torch.randperm(-(-num_tokens // PAGE_SIZE), device="cuda") + 1
        cache = KVCache.allocate(
            self.spec, num_pages=len(pages) + 1, page_size=PAGE_SIZE, dtype=torch.bfloat16, device="cuda"
        )
        empty = positions[:0]
        batch = ForwardBatch(
            token_ids=torch.randint(self.spec.vocab_size, (num_tokens,), device="cuda"),
            positions=positions,
            cells=pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE,
            decode_page_table=empty.view(0, 1),
            decode_context_lens=empty,
            prefill_page_table=pages.unsqueeze(0),
            prefill_query_starts=torch.tensor([0, num_tokens], device="cuda"),
            prefill_context_lens=torch.tensor([num_tokens], device="cuda"),
        )
        return batch, cache

    def run(self, num_tokens: int) -> None:
        batch, cache = self.batch(num_tokens)
        reference: Tensor | None = None
        for is_own in (False, True):
            rows = range(1, num_tokens + 1) if is_own else range(0)
            unchained: Tensor | None = None
            with mock.patch.object(hopper_linear, "PLAIN_ROWS", rows):
                for pdl, decoder in self.decoders.items():
                    run = partial(decoder.forward, batch, cache)
                    hidden = run().clone()
                    assert pdl is False or (unchained is not None and torch.equal(hidden, unchained)), (
                        "dependent launch changes what is computed"
                    )
                    unchained = hidden
                    reference = hidden if reference is None else reference
                    error = float((hidden.float() - reference.float()).norm() / reference.float().norm())
                    assert error < MAX_CHAIN_ERROR, f"wrong: relative error {error:.3g}"
                    self._time(run, tokens=num_tokens, own_products=is_own, pdl=pdl, error=error)

    def _time(self, run: Callable[[], object], **row: object) -> None:
        replays = 5
        self.report.add(
            shape=self.name, part="all layers", **row, launched_us=time_launches(run, replays=replays) * 1e6,
            graph_us=time_graph(run, replays=replays) * 1e6,
        )  # fmt: skip


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--shapes", default="1b,8b,0.6b")
    parser.add_argument("--tokens", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--parts", default="products,others,gated,chain", help="of these, with commas")
    arguments = parser.parse_args()
    report = Report(arguments.output)
    cases = [(n, int(t)) for n in arguments.shapes.split(",") for t in arguments.tokens.split(",")]
    parts = arguments.parts.split(",")
    for name, count in cases:
        bench = Bench(report, name, count)
        for part in ("products", "others", "gated"):
            if part in parts:
                report.section(f"{name} {count} {part}", getattr(bench, part))
    for name in arguments.shapes.split(",") if "chain" in parts else ():
        chain = ChainBench(report, name)
        for count in arguments.tokens.split(","):
            report.section(f"{name} {count} chain", partial(chain.run, int(count)))
    print("failed sections:", report.failures or "none")


if __name__ == "__main__":
    main()
