"""How long does a step of the weight-tape kernel take, as a share of the card's read limit?

    PYTHONPATH=. python3 benchmarks/gpu_weight_tape.py --output results.json [--model 1b,8b] [--rows 1,2,4,8]
    PYTHONPATH=. python3 benchmarks/gpu_weight_tape.py --output results.json --model qwen3-30b-a3b --rows 1

Random weights in a Llama's shape, or in one of `benchmarks/shapes`, pages in random order; launches one after
another, each drawing tokens. `share` counts the weights that a step reads, of experts those of one token's
picks, and the keys and values against the bulk-copy reader timed in the same run; `idle_us`: what a layer
takes beyond reading them. With experts tokens are drawn at temperature 1, so that tokens and picks change.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu_decode_chain import DEVICE, PAGE_SIZE, SIZES, make_spec, make_weights
from benchmarks.gpu_timing import Report
from tiny_vllm.kernels.cuda.read_probe import measure_read_rate
from tiny_vllm.kernels.slot_inputs import SlotState
from tiny_vllm.kernels.weight_tape import layout
from tiny_vllm.kernels.weight_tape.step import TapeStep
from tiny_vllm.models.hf_config import spec_from_hf_config
from tiny_vllm.models.kv_cache import KVCache
from tiny_vllm.models.rope import rope_table
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.models.tape_decode import TapeDecode, compile_tape, spec_obstacle
from tiny_vllm.models.weights import LayerWeights, ModelWeights

SHAPES = Path(__file__).parent / "shapes"


def read_spec(model: str) -> ModelSpec:
    """One of `SIZES`, or of the folder of shapes."""
    if model in SIZES:
        return make_spec(model)
    config = json.loads((SHAPES / model / "config.json").read_text(encoding="utf-8"))
    return spec_from_hf_config(config)


def make_mixture(spec: ModelSpec) -> ModelWeights:
    """Weights of a model with experts, random in place: they may fill more than half of the memory."""
    experts = spec.experts
    assert experts is not None

    def matrix(*shape: int) -> Tensor:
        return torch.empty(*shape, device=DEVICE, dtype=torch.bfloat16).normal_(std=shape[-1] ** -0.5)

    def norm(size: int = spec.hidden_size) -> Tensor:
        return torch.empty(size, device=DEVICE, dtype=torch.bfloat16).normal_(1.0, 0.1)

    layers = [
        LayerWeights(
            input_norm=norm(),
            qkv=matrix(spec.qkv_size, spec.hidden_size),
            output=matrix(spec.hidden_size, spec.q_size),
            post_attention_norm=norm(),
            gate_up=matrix(experts.num_experts, 2 * experts.intermediate_size, spec.hidden_size),
            down=matrix(experts.num_experts, spec.hidden_size, experts.intermediate_size),
            q_norm=norm(spec.head_dim) if spec.qk_norm else None,
            k_norm=norm(spec.head_dim) if spec.qk_norm else None,
            router=matrix(experts.num_experts, spec.hidden_size),
        )
        for _ in range(spec.num_layers)
    ]
    vocabulary = (spec.vocab_size, spec.hidden_size)
    return ModelWeights(matrix(*vocabulary), layers, norm(), matrix(*vocabulary))


def time_steps(
    step: TapeStep, state: SlotState, position: int, *, rounds: int = 7, launches: int = 30
) -> float:
    tokens = torch.empty_like(step.slots)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    seconds = []
    for _ in range(rounds):
        state.computed_len.fill_(position)
        for _ in range(3):
            step.draw(tokens)
        state.computed_len.fill_(position)
        start.record()
        for _ in range(launches):
            step.draw(tokens)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / launches / 1e3)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--model", default="1b")
    parser.add_argument("--rows", default="1,2,4,8")
    parser.add_argument("--contexts", default="129,640,4096")
    parser.add_argument("--page-size", type=int, default=PAGE_SIZE)
    parser.add_argument("--windows", default="3")
    parser.add_argument("--direct-limits", default="512")
    parser.add_argument("--ring-stages", type=int, default=layout.RING_STAGES, help="with experts: 4, 7 or 8")
    options = parser.parse_args()
    layout.RING_STAGES = options.ring_stages
    report = Report(options.output)
    contexts = [int(value) for value in options.contexts.split(",")]
    tunings = [
        [int(value) for value in values.split(",")] for values in (options.windows, options.direct_limits)
    ]
    rows_wanted = [int(value) for value in options.rows.split(",")]
    for model in options.model.split(","):
        spec = read_spec(model)
        if obstacle := spec_obstacle(spec, options.page_size):
            parser.error(f"{model}: {obstacle}")
        weights = make_weights(spec) if spec.experts is None else make_mixture(spec)
        rate = measure_read_rate()
        report.add(read_rate_tb_s=rate.bytes_per_second / 1e12)
        page_size = options.page_size
        pages_per_slot = -(-(max(contexts) + 64) // page_size)
        num_slots = max(rows_wanted)
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
        cos_sin = rope_table(spec.rope, max_len=max(contexts) + 64).cuda()
        functions = compile_tape(spec, page_size, num_slots, cache.k.device)
        temperature = torch.full((num_slots,), float(spec.experts is not None), device="cuda")
        tape = TapeDecode(spec, weights, cos_sin, cache, state, temperature, functions)
        for rows in rows_wanted:
            if rows > tape.max_rows:
                print(f"{model}: no more than {tape.max_rows} rows")
                continue
            step = tape.step(rows)
            step.slots.fill_(num_slots)
            step.slots[:rows] = torch.arange(rows)
            for context in contexts:
                for window, limit in product(*tunings):
                    step.set_tuning(window=window, direct_limit=limit)
                    seconds = time_steps(step, state, context)
                    weight_bytes = tape.layout.shape.num_weights * 2
                    kv_bytes = rows * context * spec.kv_values_per_token * 2
                    read_seconds = (weight_bytes + kv_bytes) / rate.bytes_per_second
                    report.add(
                        model=model, page_size=page_size, rows=rows, context=context, window=window,
                        direct_limit=limit, us=seconds * 1e6,
                        share=read_seconds / seconds,
                        idle_us=(seconds - read_seconds) / spec.num_layers * 1e6,
                    )  # fmt: skip
        del tape, weights, cache
        torch.cuda.empty_cache()
    report.write()


if __name__ == "__main__":
    main()
