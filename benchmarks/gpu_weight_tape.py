"""How long does a step of the weight-tape kernel take, as a share of the card's read limit?

    PYTHONPATH=. python3 benchmarks/gpu_weight_tape.py --output results.json [--model 1b,8b] [--rows 1,2,4,8]

Random weights in a Llama's shape, pages in random order; launches one after another, each drawing tokens.
`share` counts the weights and the keys and values against the bulk-copy reader timed in the same run.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu_decode_chain import PAGE_SIZE, make_spec, make_weights
from benchmarks.gpu_timing import Report
from tiny_vllm.kernels.cuda.read_probe import measure_read_rate
from tiny_vllm.kernels.slot_inputs import SlotState
from tiny_vllm.kernels.weight_tape.step import TapeStep
from tiny_vllm.models.kv_cache import KVCache
from tiny_vllm.models.rope import rope_table
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.models.tape_decode import TapeDecode, compile_tape


def time_steps(
    step: TapeStep, state: SlotState, positions: Tensor, *, rounds: int = 7, launches: int = 30
) -> float:
    """Seconds, the median of the rounds. positions: of the slots, where each round begins."""
    tokens = torch.empty_like(step.slots)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    seconds = []
    for _ in range(rounds):
        state.computed_len.copy_(positions)
        for _ in range(3):
            step.draw(tokens)
        state.computed_len.copy_(positions)
        start.record()
        for _ in range(launches):
            step.draw(tokens)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / launches / 1e3)
    return statistics.median(seconds)


def make_slots(
    spec: ModelSpec, num_slots: int, longest: int, page_size: int
) -> tuple[KVCache, SlotState, Tensor]:
    """Random keys and values, slots with pages in random order for contexts up to `longest` and some steps
    more, and the rotation's table."""
    longest += 64
    pages_per_slot = -(-longest // page_size)
    cache = KVCache.allocate(
        spec,
        num_pages=num_slots * pages_per_slot + 1,
        page_size=page_size,
        dtype=torch.bfloat16,
        device="cuda",
    )
    cache.k.normal_()
    cache.v.normal_()
    zeros = torch.zeros(num_slots, dtype=torch.int64, device="cuda")
    pages = torch.randperm(num_slots * pages_per_slot, device="cuda").view(num_slots, -1) + 1
    state = SlotState(pages, zeros.clone(), zeros.clone(), zeros.clone(), zeros.clone())
    return cache, state, rope_table(spec.rope, max_len=longest).cuda()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--model", default="1b")
    parser.add_argument("--rows", default="1,2,4,8")
    parser.add_argument("--contexts", default="129,640,4096")
    parser.add_argument("--page-size", type=int, default=PAGE_SIZE)
    parser.add_argument("--windows", default="3")
    parser.add_argument("--direct-limits", default="512")
    options = parser.parse_args()
    report = Report(options.output)
    contexts = [int(value) for value in options.contexts.split(",")]
    tunings = [
        [int(value) for value in values.split(",")] for values in (options.windows, options.direct_limits)
    ]
    rows_wanted = [int(value) for value in options.rows.split(",")]
    for model in options.model.split(","):
        spec = make_spec(model)
        weights = make_weights(spec)
        rate = measure_read_rate()
        report.add(read_rate_tb_s=rate.bytes_per_second / 1e12)
        page_size, num_slots = options.page_size, max(rows_wanted)
        cache, state, cos_sin = make_slots(spec, num_slots, max(contexts), page_size)
        functions = compile_tape(spec, page_size, num_slots, cache.k.device)
        temperature = torch.zeros(num_slots, device="cuda")
        tape = TapeDecode(spec, weights, cos_sin, cache, state, temperature, functions)
        for rows in rows_wanted:
            step = tape.step(rows)
            step.slots.fill_(num_slots)
            step.slots[:rows] = torch.arange(rows)
            for context in contexts:
                for window, limit in product(*tunings):
                    step.set_tuning(window=window, direct_limit=limit)
                    seconds = time_steps(step, state, torch.full_like(state.computed_len, context))
                    weight_bytes = tape.layout.shape.num_weights * 2
                    kv_bytes = rows * context * spec.kv_values_per_token * 2
                    report.add(
                        model=model, page_size=page_size, rows=rows, context=context, window=window,
                        direct_limit=limit, us=seconds * 1e6,
                        share=(weight_bytes + kv_bytes) / seconds / rate.bytes_per_second,
                    )  # fmt: skip
        del tape, weights, cache
        torch.cuda.empty_cache()
    report.write()


if __name__ == "__main__":
    main()
