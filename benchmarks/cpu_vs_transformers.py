"""tiny-vllm beside transformers on a CPU: the bundled model, same weights, interleaved runs.

    python benchmarks/cpu_vs_transformers.py [--rounds 3] [--dtype bfloat16] [--json FILE]

Needs transformers. Each round runs both engines one after the other, so that a slow moment of the machine
hits both; the report takes the median round. Workloads: decode of one stream and of 16 (prompt 32, 64 new
tokens), prefill of 512 tokens. Rates of decode count new tokens over the whole call, prompt included, for
both engines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.helpers.bundled import load_with_transformers
from tiny_vllm import LLM, SamplingParams

PROMPT_LEN = 32
NEW_TOKENS = 64
PREFILL_LEN = 512


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(100, 40000) for _ in range(length)] for _ in range(count)]


def run_tiny(llm: LLM, token_ids: list[list[int]], new_tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(token_ids, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert all(len(output.outputs[0].token_ids) == new_tokens for output in outputs)
    assert not any(output.num_cached_tokens for output in outputs)
    return seconds


def run_transformers(model: Any, token_ids: list[list[int]], new_tokens: int) -> float:
    ids = torch.tensor(token_ids)
    start = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        pad_token_id=0,
    )
    seconds = time.perf_counter() - start
    assert out.shape == (len(token_ids), len(token_ids[0]) + new_tokens)
    return seconds


def measure(rounds: int, dtype: str, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    model = load_with_transformers(getattr(torch, dtype))
    workloads: dict[str, tuple[int, int, int]] = {
        "decode_1_stream": (1, PROMPT_LEN, NEW_TOKENS),
        "decode_16_streams": (16, PROMPT_LEN, NEW_TOKENS),
        "prefill_512": (1, PREFILL_LEN, 1),
    }
    rates: dict[str, dict[str, list[float]]] = {
        name: {"tiny_vllm": [], "transformers": []} for name in workloads
    }
    with LLM(dtype=dtype, max_num_seqs=16, max_num_batched_tokens=512) as llm:
        engines: dict[str, Callable[[list[list[int]], int], float]] = {
            "tiny_vllm": lambda ids, count: run_tiny(llm, ids, count),
            "transformers": lambda ids, count: run_transformers(model, ids, count),
        }
        for number in range(rounds + 1):
            for name, (count, length, new_tokens) in workloads.items():
                tokens = count * (length if name.startswith("prefill") else new_tokens)
                ids = prompts(count, length, seed=1000 * number + length + count)
                for engine, run in engines.items():
                    seconds = run(ids, new_tokens)
                    if number:  # the first round warms up
                        rates[name][engine].append(tokens / seconds)
    report: dict[str, Any] = {
        "date": date.today().isoformat(),
        "command": "python benchmarks/cpu_vs_transformers.py " + " ".join(sys.argv[1:]),
        "model": "SmolLM2-135M-Instruct (bundled GGUF, dequantised)",
        "dtype": dtype,
        "threads": threads,
        "machine": platform.machine(),
        "load_average": os.getloadavg(),
        "torch": torch.__version__,
        "transformers": __import__("transformers").__version__,
        "rounds": rounds,
        "tokens_per_second": {},
    }
    for name, by_engine in rates.items():
        medians = {engine: round(statistics.median(values), 1) for engine, values in by_engine.items()}
        medians["ratio"] = round(medians["tiny_vllm"] / medians["transformers"], 2)
        report["tokens_per_second"][name] = medians
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = measure(args.rounds, args.dtype, args.threads)
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
