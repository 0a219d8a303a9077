"""How fast are the experts of mixtures with many tokens?

    PYTHONPATH=. python3 benchmarks/gpu_expert_prompts.py --json experts.json [--sweep]

One layer's two grouped products and the sorting before them (expert_products.py), BF16, random values, one
CUDA graph: us, TFLOPS of picked experts alone (tiles that are not full compute more), and of these us those
of sorting. --sweep: other tiles and other heights of groups, too; all must give the same parts.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_timing import Report, time_graph
from tiny_vllm.kernels import expert_products
from tiny_vllm.kernels.expert_products import ExpertMatrices, Tiles, choose_tiles, expert_parts
from tiny_vllm.kernels.expert_tiles import expert_tiles
from tiny_vllm.kernels.pick_experts import pick_experts

TOKENS_PER_EXPERT = (4, 16, 32, 64, 128, 256, 512, 1024, 4096)
MAX_TOKENS = 16384
ROUNDS, LEAST_SECONDS, GUESSED_RATE = 5, 0.005, 4e14
GROUPS = (512, 1024, 2048)
SWEPT = (
    (Tiles(16, 64, 128, 4, 4), Tiles(16, 64, 128, 4, 4)),
    (Tiles(64, 64, 64, 4, 4), Tiles(64, 64, 64, 4, 4)),
    (Tiles(128, 128, 64, 3, 8), Tiles(128, 128, 64, 3, 8)),
    (Tiles(128, 128, 64, 4, 8), Tiles(128, 128, 64, 4, 8)),
    (Tiles(128, 128, 64, 4, 8), Tiles(128, 256, 64, 4, 8)),
    (Tiles(256, 64, 64, 4, 8), Tiles(256, 128, 64, 4, 8)),
)


@dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    experts: int
    active: int
    activation: str


SHAPES = {
    "Qwen3 30B A3B": Shape(2048, 768, 128, 8, "silu"),
    "gpt-oss 20B": Shape(2880, 2880, 32, 4, "clamped_swiglu"),
    "Mixtral 8x7B": Shape(4096, 14336, 8, 2, "silu"),
}


def random(*sizes: int) -> Tensor:
    return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16) * 0.02


def make_matrices(shape: Shape) -> ExpertMatrices:
    sizes = shape.experts, 2 * shape.inner, shape.hidden
    has_bias = shape.activation == "clamped_swiglu"
    return ExpertMatrices(
        random(*sizes),
        random(shape.experts, shape.hidden, shape.inner),
        random(*sizes[:2]) if has_bias else None,
        random(shape.experts, shape.hidden) if has_bias else None,
    )


def measure(report: Report, name: str, sweep: bool) -> None:
    shape = SHAPES[name]
    matrices = make_matrices(shape)
    for per_expert in TOKENS_PER_EXPERT:
        num_tokens = per_expert * shape.experts // shape.active
        if num_tokens > MAX_TOKENS:
            break
        x = random(num_tokens, shape.hidden) * 50
        logits = torch.randn(1, num_tokens, shape.experts, device="cuda")
        experts, weights = pick_experts(logits, None, shape.active, True)
        flops = 6 * experts.numel() * shape.hidden * shape.inner
        run = partial(expert_parts, x, experts, weights, matrices, shape.activation)
        chosen = choose_tiles(experts.numel(), shape.experts, x.dtype)
        expected = run()
        sort = partial(expert_tiles, experts.flatten(), shape.experts, chosen[0].block_m)
        replays = max(2, min(20, int(LEAST_SECONDS * GUESSED_RATE / flops)))
        time = partial(time_graph, rounds=ROUNDS, replays=replays)
        sorting_us = time(sort) * 1e6
        pairs = [pair for pair in SWEPT if pair[0].block_m <= 4 * per_expert and sweep]
        for tiles in [chosen, *pairs]:
            for group in GROUPS if sweep else (expert_products.GROUP_ROWS,):
                table = ((1 << 40, *tiles),)
                with (
                    mock.patch.object(expert_products, "TILES_16_BIT", table),
                    mock.patch.object(expert_products, "GROUP_ROWS", group),
                ):
                    assert torch.equal(run(), expected), f"{tiles} differ"
                    us = time(run) * 1e6
                report.add(
                    model=name, per_expert=per_expert, tokens=num_tokens, group=group,
                    tiles=" / ".join(
                        ",".join(str(v) for v in (t.block_m, t.block_n, t.block_k, t.stages, t.num_warps))
                        for t in tiles
                    ),
                    chosen=tiles is chosen, us=us, tflops=flops / us / 1e6, sorting_us=sorting_us,
                )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--sweep", action="store_true", help="other tiles, too")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report = Report(arguments.json)
    for name in SHAPES:
        report.section(name, partial(measure, report, name, arguments.sweep))
    print(f"failed: {report.failures or 'nothing'}")


if __name__ == "__main__":
    main()
