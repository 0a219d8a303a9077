"""Is a decode step of a large batch faster as two halves side by side?

    PYTHONPATH=. python3 benchmarks/gpu_decode_halves.py --json halves.json [--model 1b] [--rows 256,128]

Attention is limited by memory, products of a hundred rows by arithmetic and by what beginning a kernel takes:
one half's attention could run beside the other's products. All layers of a step run as one CUDA graph:
whole; as two chains of half the rows, one behind the other; and as two on two streams. Kernels only share a
multiprocessor if they leave each other shared memory and registers, so kernels of less are tried, too: KiB of
a product's block, and stages of attention's (one block per multiprocessor). us without the LM head; `apart`
compares the last hidden state with the whole step's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_decode_chain import DEVICE, SIZES, Workload, make_spec, make_weights
from benchmarks.gpu_timing import Report, time_graph
from tiny_vllm.kernels.hopper_decode import launch as attention
from tiny_vllm.kernels.hopper_linear import decode_launch as products
from tiny_vllm.kernels.slot_inputs import SlotInputs
from tiny_vllm.models.decode_chain import DecodeChain
from tiny_vllm.models.rope import rope_table

# KiB of a product's block, stages of attention's, None for those in use.
SIZES_TRIED: tuple[tuple[int | None, int | None], ...] = (
    (None, None), (112, None), (None, 4), (112, 4), (96, 4), (72, 4), (112, 8), (64, 8),
)  # fmt: skip


CACHES = products.choose_variant, products._loaded, products.load_product, attention._compiled


def forget() -> None:
    for function in CACHES:
        function.cache_clear()


@contextmanager
def sized(head_dim: int, product_kib: int | None, stages: int | None) -> Iterator[None]:
    """Kernels are chosen and compiled anew within it."""
    with ExitStack() as stack:
        if product_kib is not None:
            stack.enter_context(mock.patch.object(products, "SHARED_LIMIT", product_kib * 1024))
            # Wider ones have too many registers beside attention's.
            stack.enter_context(mock.patch.object(products, "GATED_WIDTHS", (64,)))
        if stages is not None:
            for variants in (attention.VARIANTS, attention.PARTS_VARIANTS):
                query_warps = min(variants[head_dim].query_warps, 2)
                own = replace(variants[head_dim], stages=stages, blocks=1, query_warps=query_warps)
                stack.enter_context(mock.patch.dict(variants, {head_dim: own}))
            # As few registers as two blocks would have.
            bounds = "__launch_bounds__(THREADS, BLOCKS)"
            text = attention.source()
            assert text.count(bounds) == 1, f"not once in the kernel's source: {bounds}"
            text = text.replace(bounds, "__launch_bounds__(THREADS, 2)")
            stack.enter_context(mock.patch.object(attention, "source", lambda: text))
        forget()
        yield
    forget()


def part(inputs: SlotInputs, rows: slice) -> SlotInputs:
    return SlotInputs(*(getattr(inputs, field.name)[rows].contiguous() for field in fields(inputs)))


class Step:
    """A step's layers, whole or in halves, each with a chain and so a workspace of its own."""

    def __init__(self, work: Workload) -> None:
        self._work = work
        shared = work.spec, work.weights, work.cos_sin, work.cache
        self._chains = [DecodeChain(*shared) for _ in range(2)]
        self._inputs = self._chains[0]._read(work.state, work.slots)
        middle = len(work.slots) // 2
        self._halves = [part(self._inputs, rows) for rows in (slice(middle), slice(middle, None))]
        self._side = torch.cuda.Stream()

    def _run(self, chain: DecodeChain, inputs: SlotInputs) -> Tensor:
        return chain._layers_of(inputs, self._work.state.page_table, self._work.longest)

    def whole(self) -> list[Tensor]:
        return [self._run(self._chains[0], self._inputs)]

    def one_by_one(self) -> list[Tensor]:
        return [self._run(*pair) for pair in zip(self._chains, self._halves, strict=True)]

    def side_by_side(self) -> list[Tensor]:
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        first = self._run(self._chains[0], self._halves[0])
        with torch.cuda.stream(self._side):
            second = self._run(self._chains[1], self._halves[1])
        current.wait_stream(self._side)
        return [first, second]


@torch.inference_mode()
def measure(report: Report, work: Workload, model: str, sizes: tuple[int | None, int | None]) -> None:
    with sized(work.spec.head_dim, *sizes):
        step = Step(work)
        expected = torch.cat(step.whole())
        ways: dict[str, Callable[[], list[Tensor]]] = {
            "whole": step.whole, "one by one": step.one_by_one, "side by side": step.side_by_side,
        }  # fmt: skip
        for name, run in ways.items():
            actual = torch.cat(run())
            torch.cuda.synchronize()
            apart = float((actual - expected).float().norm() / expected.float().norm())
            assert apart < 0.05, f"{name} is {apart} off"
            seconds = time_graph(run, rounds=5, replays=10)
            report.add(
                model=model, rows=len(work.slots), context=work.context, product_kib=sizes[0],
                stages=sizes[1], way=name, us=seconds * 1e6, apart=apart,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--model", choices=SIZES, default="1b")
    parser.add_argument("--rows", default="256,128")
    parser.add_argument("--context", type=int, default=800)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report = Report(arguments.json)
    spec = make_spec(arguments.model)
    with torch.inference_mode():
        weights, cos_sin = make_weights(spec), rope_table(spec.rope, max_len=8192).to(DEVICE)
    for rows in map(int, arguments.rows.split(",")):
        work = Workload(spec, weights, cos_sin, rows, arguments.context, True)
        for sizes in SIZES_TRIED:
            name = f"{arguments.model}, {rows} rows, products {sizes[0]} KiB, attention {sizes[1]} stages"
            report.section(name, partial(measure, report, work, arguments.model, sizes))
        del work
    print(f"failed: {report.failures or 'nothing'}")


if __name__ == "__main__":
    main()
