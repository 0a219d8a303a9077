"""How long does the decoder alone take on a CPU, and how much of the memory's speed does it reach?

Random weights in SmolLM2-135M's shape, BF16: decode steps of 1, 4 and 16 sequences at contexts of 128 and 512
tokens, and a prompt of 512 tokens. A step is forward plus logits. Its bytes: the weights once, and K and V
of every context token. The limit is the best of several sums over a buffer larger than the caches.

    python benchmarks/cpu_decoder.py [--no-fused] [--threads N] [--dtype bfloat16|float32] [--repeats N]
                                     [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from tiny_vllm.kernels.cpu_decode import has_numba
from tiny_vllm.models.batch import ForwardBatch
from tiny_vllm.models.decoder import Decoder
from tiny_vllm.models.kv_cache import KVCache
from tiny_vllm.models.spec import ModelSpec, RopeSpec
from tiny_vllm.models.weights import LayerWeights, ModelWeights

SPEC = ModelSpec(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    rope=RopeSpec(theta=100000.0, rotary_dim=64),
    tie_word_embeddings=True,
)
PAGE_SIZE = 16
MAX_LEN = 1024
DECODES = ((1, 128), (1, 512), (4, 128), (4, 512), (8, 128), (16, 128), (16, 512))
PREFILL_LEN = 512


@dataclass(frozen=True)
class Result:
    """One workload. Times of a step in ms; tokens: computed per step."""

    workload: str
    best_ms: float
    median_ms: float
    tokens_per_second: float
    gigabytes_per_second: float
    share_of_memory_limit: float


def random_weights(spec: ModelSpec, dtype: torch.dtype) -> ModelWeights:
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.02).to(dtype)

    layers = [
        LayerWeights(
            input_norm=torch.ones(spec.hidden_size, dtype=dtype),
            qkv=matrix(spec.qkv_size, spec.hidden_size),
            output=matrix(spec.hidden_size, spec.q_size),
            post_attention_norm=torch.ones(spec.hidden_size, dtype=dtype),
            gate_up=matrix(2 * spec.intermediate_size, spec.hidden_size),
            down=matrix(spec.hidden_size, spec.intermediate_size),
        )
        for _ in range(spec.num_layers)
    ]
    embedding = matrix(spec.vocab_size, spec.hidden_size)
    return ModelWeights(embedding, layers, torch.ones(spec.hidden_size, dtype=dtype), lm_head=embedding)


def page_tables(num_sequences: int, context_len: int) -> torch.Tensor:
    """Pages in random order, as a pool in use hands them out."""
    width = -(-context_len // PAGE_SIZE)
    order = torch.randperm(num_sequences * width, generator=torch.Generator().manual_seed(0)) + 1
    return order.view(num_sequences, width)


def decode_batch(num_sequences: int, context_len: int) -> ForwardBatch:
    page_table = page_tables(num_sequences, context_len)
    last = torch.full((num_sequences,), context_len - 1)
    return ForwardBatch(
        token_ids=torch.arange(num_sequences) + 100,
        positions=last,
        cells=page_table[:, -1] * PAGE_SIZE + last % PAGE_SIZE,
        decode_page_table=page_table,
        decode_context_lens=last + 1,
        prefill_page_table=torch.empty(0, 1, dtype=torch.int64),
        prefill_query_starts=torch.zeros(1, dtype=torch.int64),
        prefill_context_lens=torch.empty(0, dtype=torch.int64),
    )


def prefill_batch(length: int) -> ForwardBatch:
    page_table = page_tables(1, length)
    positions = torch.arange(length)
    return ForwardBatch(
        token_ids=positions + 100,
        positions=positions,
        cells=page_table[0, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE,
        decode_page_table=torch.empty(0, 1, dtype=torch.int64),
        decode_context_lens=torch.empty(0, dtype=torch.int64),
        prefill_page_table=page_table,
        prefill_query_starts=torch.tensor([0, length]),
        prefill_context_lens=torch.tensor([length]),
        ends_only=True,
    )


def times_ms(call: Callable[[], object], repeats: int) -> list[float]:
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def memory_limit() -> float:
    """GB/s of reading a 512 MiB buffer."""
    buffer = torch.ones(1 << 27)
    return buffer.nbytes / min(times_ms(buffer.sum, 10)) / 1e6


def run(dtype: torch.dtype, repeats: int, fused: bool) -> tuple[float, list[Result]]:
    limit = memory_limit()
    num_pages = 16 * MAX_LEN // PAGE_SIZE + 1
    kv_cache = KVCache.allocate(SPEC, num_pages=num_pages, page_size=PAGE_SIZE, dtype=dtype)
    decoder = Decoder(SPEC, random_weights(SPEC, dtype), max_model_len=MAX_LEN, fused_cpu_decode=fused)
    weight_bytes = SPEC.num_parameters * dtype.itemsize

    def measure(workload: str, batch: ForwardBatch, context_tokens: int, repeats: int) -> Result:
        last = slice(-max(batch.num_decodes, 1), None)
        times = times_ms(lambda: decoder.logits(decoder.forward(batch, kv_cache)[last]), repeats)
        best, median = min(times), statistics.median(times)
        step_bytes = weight_bytes + context_tokens * SPEC.kv_values_per_token * dtype.itemsize
        speed = step_bytes / best / 1e6
        return Result(workload, best, median, len(batch.token_ids) / median * 1e3, speed, speed / limit)

    results = [
        measure(f"decode {count:2d} x {length}", decode_batch(count, length), count * length, repeats)
        for count, length in DECODES
    ]
    prefill = prefill_batch(PREFILL_LEN)
    results.append(measure(f"prefill {PREFILL_LEN}", prefill, PREFILL_LEN, max(repeats // 5, 3)))
    return limit, results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--fused", action=argparse.BooleanOptionalAction, default=has_numba())
    parser.add_argument("--repeats", type=int, default=50, help="steps of each workload (prefill: a fifth)")
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    load = os.getloadavg()[0]
    limit, results = run(getattr(torch, options.dtype), options.repeats, options.fused)
    print(f"{options.dtype}, {options.threads} threads, load before {load:.2f}, memory {limit:.1f} GB/s")
    print(f"{'workload':16s} {'best ms':>9s} {'median ms':>9s} {'tok/s':>8s} {'GB/s':>6s} {'of limit':>8s}")
    for result in results:
        print(
            f"{result.workload:16s} {result.best_ms:9.2f} {result.median_ms:9.2f} "
            f"{result.tokens_per_second:8.1f} {result.gigabytes_per_second:6.1f} "
            f"{result.share_of_memory_limit:8.0%}"
        )
    if options.json:
        report = {
            "torch": torch.__version__,
            "processor": platform.processor() or platform.machine(),
            "dtype": options.dtype,
            "fused": options.fused,
            "threads": options.threads,
            "load_before": load,
            "memory_gigabytes_per_second": limit,
            "results": [asdict(result) for result in results],
        }
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
