"""How fast is each kernel alone, with cold weights, against the rate at which the card can be read?

    PYTHONPATH=. python3 benchmarks/gpu_kernels.py --output results.json [--only products,attention] [--sweep]

Products are timed as chains over several weights that push each other out of the cache, without and with
programmatic dependent launch, and beside cuBLAS. Times are per kernel, from CUDA graph replays.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from benchmarks.gpu_timing import Report, measure_read_rate, rotate, time_graph
from tiny_vllm.kernels import norm_linear as products
from tiny_vllm.kernels.draw_tokens import draw_tokens
from tiny_vllm.kernels.embedding import embedding
from tiny_vllm.kernels.norm_linear import _launch_norm_linear, choose_tiles
from tiny_vllm.kernels.paged_decode_attention import attend_pages
from tiny_vllm.kernels.prefill_attention import attend_chunks
from tiny_vllm.kernels.rms_norm import rms_norm, rms_norm_ref
from tiny_vllm.kernels.rope import prepare_rope, rope_and_cache
from tiny_vllm.kernels.silu_and_mul import silu_and_mul, silu_and_mul_ref
from tiny_vllm.kernels.triton_support import has_pdl

DEVICE = torch.device("cuda", 0)
# name: rows of the matrix, columns, norm before, gate and up
MATRICES = {
    "1b qkv": (3072, 2048, True, False),
    "1b output": (2048, 2048, False, False),
    "1b gate_up": (8192, 2048, True, True),
    "1b down": (2048, 8192, False, False),
    "1b lm_head": (128256, 2048, True, False),
    "8b qkv": (6144, 4096, True, False),
    "8b output": (4096, 4096, False, False),
    "8b gate_up": (14336, 4096, True, True),
    "8b down": (4096, 14336, False, False),
}
ROWS = (1, 2, 4, 8, 16)
# Tiles to try with --sweep. One row: (BLOCK_N, BLOCK_K, warps); several: (BLOCK_N, BLOCK_K, warps = splits of
# K).
ONE_ROW_SWEEP = (
    (2, 2048, 2), (4, 2048, 2), (4, 2048, 4), (8, 2048, 4), (8, 2048, 8), (16, 2048, 4), (16, 2048, 8),
    (2, 4096, 4), (4, 4096, 4), (4, 4096, 8), (2, 8192, 8), (4, 8192, 8), (8, 1024, 4), (16, 1024, 4),
)  # fmt: skip
DOT_SWEEP = (
    (16, 256, 4), (16, 512, 4), (16, 1024, 4), (16, 256, 8), (16, 512, 8), (16, 1024, 8), (16, 2048, 8),
    (32, 256, 4), (32, 512, 4), (32, 512, 8), (32, 1024, 8), (64, 256, 4), (64, 512, 8),
)  # fmt: skip


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def make_weights(name: str) -> list[torch.Tensor]:
    rows, columns, _, gated = MATRICES[name]
    return rotate(lambda: random(rows * (1 + gated), columns) * columns**-0.5, least=3)


def time_product(name: str, num_rows: int, weights: list[torch.Tensor], pdl: bool) -> float:
    """Seconds per kernel of a chain over all weights."""
    rows, columns, has_norm, gated = MATRICES[name]
    x, norm = random(num_rows, columns), torch.ones(columns, device=DEVICE)
    residual = None if has_norm else random(num_rows, rows)
    out_dtype = torch.float32 if "lm_head" in name else None

    def chain() -> list[torch.Tensor]:
        return [
            _launch_norm_linear(
                x, weight, norm_weight=norm if has_norm else None, eps=1e-5, residual=residual, gated=gated,
                out_dtype=out_dtype, pdl=pdl,
            )
            for weight in weights
        ]  # fmt: skip

    return time_graph(chain) / len(weights)


def bench_products(report: Report, read_rate: float) -> None:
    for name in MATRICES:
        weights = make_weights(name)
        for num_rows in ROWS:
            row: dict[str, Any] = dict(kernel="norm_linear", matrix=name, rows=num_rows)
            plain = time_product(name, num_rows, weights, False)
            best = time_product(name, num_rows, weights, True) if has_pdl(DEVICE) else plain
            x = random(num_rows, MATRICES[name][1])
            cublas = time_graph(
                partial(lambda x, weights: [F.linear(x, weight) for weight in weights], x, weights)
            )
            row |= dict(
                us=best * 1e6, us_without_pdl=plain * 1e6, us_cublas_alone=cublas / len(weights) * 1e6
            )
            row |= dict(gb_per_s=weights[0].nbytes / best / 1e9, share=weights[0].nbytes / best / read_rate)
            report.add(**row)


def bench_more_rows(report: Report, read_rate: float) -> None:
    """Where does cuBLAS overtake? Its time here lacks the norm, SiLU or residual that the kernel includes."""
    for name in ("1b qkv", "1b gate_up", "1b down"):
        weights = make_weights(name)
        for num_rows in (24, 32, 48, 64):
            ours = time_product(name, num_rows, weights, has_pdl(DEVICE))
            x = random(num_rows, MATRICES[name][1])
            cublas = time_graph(
                partial(lambda x, weights: [F.linear(x, weight) for weight in weights], x, weights)
            )
            report.add(
                kernel="norm_linear", matrix=name, rows=num_rows, us=ours * 1e6,
                us_cublas_alone=cublas / len(weights) * 1e6, share=weights[0].nbytes / ours / read_rate,
            )  # fmt: skip


def sweep_products(report: Report, read_rate: float) -> None:
    for name in [name for name in MATRICES if name.startswith("1b")]:
        weights = make_weights(name)
        for num_rows, tiles in ((1, ONE_ROW_SWEEP), (8, DOT_SWEEP), (16, DOT_SWEEP)):
            for block_n, block_k, warps in tiles:
                chosen = choose_tiles(num_rows, *MATRICES[name][:2], 1 + MATRICES[name][3])
                chosen |= dict(BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps)
                chosen["NUM_SPLITS"] = 1 if num_rows == 1 else warps
                try:
                    with mock.patch.object(products, "choose_tiles", lambda *_, chosen=chosen: dict(chosen)):
                        seconds = time_product(name, num_rows, weights, has_pdl(DEVICE))
                except Exception as error:
                    print(f"  {name} rows {num_rows} tile {block_n}x{block_k} warps {warps}: {error!r:.120}")
                    continue
                report.add(
                    sweep=name, rows=num_rows, tile=f"{block_n}x{block_k}", warps=warps, us=seconds * 1e6,
                    share=weights[0].nbytes / seconds / read_rate,
                )  # fmt: skip


def make_pages(batch: int, context: int, num_kv_heads: int, head_dim: int, copies: int) -> tuple[Any, ...]:
    """`copies` caches of shuffled pages of 16 tokens, a page table, and context lengths."""
    width = -(-context // 16)
    shape = (batch * width + 1, num_kv_heads, 16, head_dim)
    caches = [(random(*shape), random(*shape)) for _ in range(copies)]
    table = (torch.randperm(batch * width, device=DEVICE) + 1).view(batch, width)
    return caches, table, torch.full((batch,), context, device=DEVICE)


def bench_decode_attention(report: Report, read_rate: float) -> None:
    for name, num_heads, num_kv_heads, head_dim in (("1b", 32, 8, 64), ("8b", 32, 8, 128)):
        for batch, context in (
            (1, 129), (1, 640), (1, 4096), (1, 32768), (8, 640), (8, 4096), (64, 640), (64, 4096), (256, 640),
        ):  # fmt: skip
            num_bytes = 2 * 2 * batch * context * num_kv_heads * head_dim
            copies = max(2, min(256, 400_000_000 // num_bytes))
            caches, table, lens = make_pages(batch, context, num_kv_heads, head_dim, copies)
            q = random(batch, num_heads, head_dim)

            def chain(
                pdl: bool, caches: Any = caches, table: Any = table, lens: Any = lens, q: Any = q
            ) -> Any:
                return [attend_pages(q, k, v, table, lens, q.shape[-1] ** -0.5, pdl=pdl) for k, v in caches]

            plain = time_graph(partial(chain, False)) / copies
            best = time_graph(partial(chain, True)) / copies if has_pdl(DEVICE) else plain
            report.add(
                kernel="attend_pages", model=name, batch=batch, context=context, us=best * 1e6,
                us_without_pdl=plain * 1e6, gb_per_s=num_bytes / best / 1e9,
                share=num_bytes / best / read_rate,
            )  # fmt: skip
            del caches


def bench_prefill_attention(report: Report, read_rate: float) -> None:
    for name, num_heads, num_kv_heads, head_dim in (("1b", 32, 8, 64), ("8b", 32, 8, 128)):
        for sequences, chunk, context in (
            (1, 512, 512),
            (1, 2048, 2048),
            (4, 2048, 2048),
            (1, 8192, 8192),
            (1, 512, 8192),
        ):
            caches, table, lens = make_pages(sequences, context, num_kv_heads, head_dim, 1)
            starts = torch.arange(sequences + 1, device=DEVICE) * chunk
            q = random(sequences * chunk, num_heads, head_dim)
            arguments = (q, *caches[0], table, starts, lens, head_dim**-0.5)
            seconds = time_graph(partial(attend_chunks, *arguments), replays=5)
            pairs = sequences * (chunk * (context - chunk) + chunk * (chunk + 1) / 2)
            row: dict[str, Any] = dict(
                kernel="attend_chunks", model=name, sequences=sequences, chunk=chunk, context=context,
                us=seconds * 1e6, tflops=4 * pairs * num_heads * head_dim / seconds / 1e12,
            )  # fmt: skip
            if chunk == context:
                shape = (sequences, chunk, num_heads, head_dim)
                q4, k4, v4 = (random(*shape).transpose(1, 2) for _ in range(3))
                sdpa = partial(F.scaled_dot_product_attention, q4, k4, v4, is_causal=True)
                row["us_torch_unpaged"] = time_graph(sdpa, replays=5) * 1e6
            report.add(**row)


def bench_small_ops(report: Report, read_rate: float) -> None:
    tokens, hidden, intermediate = 4096, 2048, 8192
    x = [random(tokens, hidden) for _ in range(16)]
    norm = torch.ones(hidden, device=DEVICE)
    gate_up = [random(tokens, 2 * intermediate) for _ in range(4)]
    table = random(128256, hidden)
    token_ids = torch.randint(0, 128256, (tokens,), device=DEVICE)
    qkv = [random(tokens, 3072) for _ in range(16)]
    caches, _, _ = make_pages(1, tokens, 8, 64, 1)
    cos_sin = torch.randn(8192, 64, device=DEVICE)
    positions = torch.arange(tokens, device=DEVICE)
    step = prepare_rope(cos_sin, positions, positions + 16, 8, 16)
    cases: dict[str, tuple[Any, int, int]] = {
        "rms_norm": (lambda: [rms_norm(one, norm, 1e-5) for one in x], 16, 2 * x[0].nbytes),
        "rms_norm torch": (lambda: [rms_norm_ref(one, norm, 1e-5) for one in x], 16, 2 * x[0].nbytes),
        "silu_and_mul": (lambda: [silu_and_mul(one) for one in gate_up], 4, 3 * gate_up[0].nbytes // 2),
        "silu_and_mul torch": (
            lambda: [silu_and_mul_ref(one) for one in gate_up], 4, 3 * gate_up[0].nbytes // 2,
        ),
        "embedding": (lambda: embedding(table, token_ids), 1, 2 * x[0].nbytes),
        "rope_and_cache": (
            lambda: [rope_and_cache(one, step, *caches[0], 32) for one in qkv], 16, 2 * qkv[0].nbytes,
        ),
    }  # fmt: skip
    for name, (launch, count, num_bytes) in cases.items():
        seconds = time_graph(launch) / count
        report.add(
            kernel=name, tokens=tokens, us=seconds * 1e6, gb_per_s=num_bytes / seconds / 1e9,
            share=num_bytes / seconds / read_rate,
        )  # fmt: skip


def bench_draw(report: Report, read_rate: float) -> None:
    for rows in (1, 8, 64, 256):
        logits = rotate(partial(random, rows, 128256, dtype=torch.float32))[:100]
        keys = torch.randint(-(2**31), 2**31, (rows, 2), device=DEVICE).int()
        for temperature in (0.0, 0.8):
            temperatures = torch.full((rows,), temperature, device=DEVICE)

            def chain(logits: Any = logits, temperatures: Any = temperatures, keys: Any = keys) -> Any:
                return [draw_tokens(one, temperatures, keys, pdl=has_pdl(DEVICE)) for one in logits]

            seconds = time_graph(chain) / len(logits)
            argmax = time_graph(partial(lambda logits: [one.argmax(-1) for one in logits], logits)) / len(
                logits
            )
            report.add(
                kernel="draw_tokens", rows=rows, temperature=temperature, us=seconds * 1e6,
                us_torch_argmax=argmax * 1e6, share=logits[0].nbytes / seconds / read_rate,
            )  # fmt: skip


SECTIONS = {
    "products": bench_products,
    "more_rows": bench_more_rows,
    "decode_attention": bench_decode_attention,
    "prefill_attention": bench_prefill_attention,
    "small_ops": bench_small_ops,
    "draw": bench_draw,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--sweep", action="store_true", help="also time other tiles for the products")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report = Report(arguments.output)
    rates = measure_read_rate()
    report.add(read_gb_per_s=rates["sum"] / 1e9, copy_gb_per_s=rates["copy"] / 1e9)
    for name in arguments.only.split(","):
        report.section(name, partial(SECTIONS[name], report, rates["sum"]))
    if arguments.sweep:
        report.section("sweep", partial(sweep_products, report, rates["sum"]))
    print("failed sections:", report.failures or "none")


if __name__ == "__main__":
    main()
