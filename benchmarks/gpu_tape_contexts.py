"""Which way of reading keys and values makes a step of the weight-tape kernel fastest?

    PYTHONPATH=. python3 benchmarks/gpu_tape_contexts.py --output results.json

Without further options: a kernel that cannot take them through its ring, and others with different numbers of
copies in flight, for short and long contexts of 1, 4 and 8 rows, among them one long row beside short ones.
Random weights in a Llama's shape, pages in random order; launches one after another, each drawing tokens.
`share` counts the weights and the keys and values against the bulk-copy reader timed in the same run.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import torch

from benchmarks.gpu_decode_chain import PAGE_SIZE, make_spec, make_weights
from benchmarks.gpu_timing import Report
from benchmarks.gpu_weight_tape import make_slots, time_steps
from tiny_vllm.kernels.cuda.driver import CudaFunction, architecture, load_function
from tiny_vllm.kernels.cuda.nvrtc import compile_cubin
from tiny_vllm.kernels.cuda.read_probe import measure_read_rate
from tiny_vllm.kernels.weight_tape.layout import WINDOW, TapeLayout, plan_block, token_buckets
from tiny_vllm.kernels.weight_tape.step import DIRECT_LIMIT, macros, source
from tiny_vllm.models.tape_decode import TapeDecode, tape_shape

CASES = "1:129,1:640,1:4096,1:32768,4:129,4:4096,4:32768,8:129,8:4096,8:32768,8:32768/129"


def compile_variant(
    layout: TapeLayout, rows: set[int], changes: dict[str, int], device: torch.device
) -> dict[int, CudaFunction]:
    """The kernels by the rows they take, with macros changed."""

    def compile_one(tokens: int) -> CudaFunction:
        plan = plan_block(layout, tokens)
        assert plan is not None
        defines = {**macros(layout, tokens), **changes}
        cubin = compile_cubin(source(), name="tape", defines=defines, arch=architecture(device))
        return load_function(cubin, "tape_step", shared_bytes=plan.shared_bytes, device=device)

    buckets = sorted({next(b for b in token_buckets(layout.shape) if b >= count) for count in rows})
    with ThreadPoolExecutor(len(buckets)) as pool:
        return dict(zip(buckets, pool.map(compile_one, buckets), strict=True))


def numbers(text: str) -> list[int]:
    return [int(value) for value in text.split(",")]


def parse_variants(text: str) -> dict[str, dict[str, int]]:
    """'A=1,B=2;C=3' -> by its text, each variant's macros."""
    variants: dict[str, dict[str, int]] = {}
    for variant in text.split(";"):
        pairs = (part.split("=") for part in variant.split(",") if part)
        variants[variant] = {name: int(value) for name, value in pairs}
    return variants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--model", default="1b")
    parser.add_argument("--cases", default=CASES, help="rows:context, or rows:first row's/others' context")
    parser.add_argument("--page-size", type=int, default=PAGE_SIZE)
    parser.add_argument("--windows", default=str(WINDOW))
    parser.add_argument("--direct-limits", default=str(DIRECT_LIMIT))
    parser.add_argument("--kv-stream-limits", default="0", help="tokens; -1: as usual")
    parser.add_argument("--kv-windows", default="3,4,6")
    parser.add_argument("--variants", default="KV_STREAM=0;KV_STREAM=1;KV_SKEW=8", help="macros")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--launches", type=int, default=20)
    options = parser.parse_args()
    report = Report(options.output)
    cases = []
    for rows, contexts in (case.split(":") for case in options.cases.split(",")):
        first, *others = numbers(contexts.replace("/", ","))
        cases.append((int(rows), [first, *(others or [first])]))
    longest = max(max(contexts) for _, contexts in cases)
    kv_stream_limits = [None if limit < 0 else limit for limit in numbers(options.kv_stream_limits)]
    loading = list(product(numbers(options.windows), numbers(options.direct_limits)))
    streaming = list(product(kv_stream_limits, numbers(options.kv_windows)))
    variants = parse_variants(options.variants)
    rows_wanted = {rows for rows, _ in cases}
    for model in options.model.split(","):
        spec = make_spec(model)
        weights = make_weights(spec)
        rate = measure_read_rate()
        report.add(read_rate_tb_s=rate.bytes_per_second / 1e12)
        page_size, num_slots = options.page_size, max(rows_wanted)
        cache, state, cos_sin = make_slots(spec, num_slots, longest, page_size)
        layout = TapeLayout.of(tape_shape(spec, page_size))
        temperature = torch.zeros(num_slots, device="cuda")
        for variant, changes in variants.items():
            functions = compile_variant(layout, rows_wanted, changes, cache.k.device)
            tape = TapeDecode(spec, weights, cos_sin, cache, state, temperature, functions)
            tunings = list(product(loading, streaming if changes.get("KV_STREAM", 1) else streaming[:1]))
            for rows, (first, other) in cases:
                positions = torch.full((num_slots,), other, device="cuda")
                positions[0] = first
                step = tape.step(rows)
                step.slots.fill_(num_slots)
                step.slots[:rows] = torch.arange(rows)
                for (window, direct_limit), (kv_stream_limit, kv_window) in tunings:
                    step.set_tuning(
                        window=window, direct_limit=direct_limit, kv_stream_limit=kv_stream_limit,
                        kv_window=kv_window,
                    )  # fmt: skip
                    seconds = time_steps(
                        step, state, positions, rounds=options.rounds, launches=options.launches
                    )
                    weight_bytes = layout.shape.num_weights * 2
                    kv_bytes = (first + (rows - 1) * other) * spec.kv_values_per_token * 2
                    report.add(
                        model=model, page_size=page_size, rows=rows, context=first, others=other,
                        variant=variant, window=window, direct_limit=direct_limit,
                        kv_stream_limit=kv_stream_limit, kv_window=kv_window, us=seconds * 1e6,
                        share=(weight_bytes + kv_bytes) / seconds / rate.bytes_per_second,
                    )  # fmt: skip
            del tape
        del weights, cache
        torch.cuda.empty_cache()
    report.write()


if __name__ == "__main__":
    main()
