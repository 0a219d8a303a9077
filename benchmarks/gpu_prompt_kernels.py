"""What do the layers of each family spend on prompts, kernel by kernel?

    PYTHONPATH=. python3 benchmarks/gpu_prompt_kernels.py --json prompts.json [--models "Gemma 2 2B"]

Models as they were published (tests/models/test_published_configs.py), but with LAYERS layers and random
weights, in BF16: NUM_PROMPTS prompts of PROMPT_LEN tokens, one new token each, through `LLM`. ms of all, and
from torch's profiler the time of every kernel; torch_share is that of torch's own operators, products by
cuBLAS not counted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_timing import Report
from tests.models.test_published_configs import CONFIGS
from tiny_vllm import LLM, SamplingParams

LAYERS, NUM_PROMPTS, PROMPT_LEN, ROUNDS = 4, 32, 512, 5
VOCAB = 30_000  # ids that all models have
SHOWN = 14


def make_prompts() -> list[dict[str, list[int]]]:
    return [
        {"prompt_token_ids": [random.randrange(VOCAB) for _ in range(PROMPT_LEN)]} for _ in range(NUM_PROMPTS)
    ]


def profile_kernels(llm: LLM, sampling: SamplingParams) -> list[dict[str, Any]]:
    """Those of the GPU, the longest first."""
    prompts = make_prompts()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        llm.generate(prompts, sampling, use_tqdm=False)
    kernels = [
        {"kernel": event.key[:90], "count": event.count, "us": event.self_device_time_total}
        for event in profiler.key_averages()
        if event.self_device_time_total > 0 and not event.key.startswith(("aten::", "cu"))
    ]
    return sorted(kernels, key=lambda kernel: -kernel["us"])


def measure(report: Report, name: str) -> None:
    config, _ = CONFIGS[name]
    of_layers = {
        key: value[:LAYERS]
        for key, value in config.items()
        if isinstance(value, list) and len(value) == config["num_hidden_layers"]
    }
    config = {**config, **of_layers, "num_hidden_layers": LAYERS}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        llm = LLM(
            directory, load_format="dummy", dtype="bfloat16", max_model_len=2048,
            max_num_batched_tokens=16384, kv_cache_memory_bytes=4 << 30,
        )  # fmt: skip
    sampling = SamplingParams(max_tokens=1, temperature=0.6, ignore_eos=True)
    with llm:
        seconds = []
        for _ in range(ROUNDS + 1):
            prompts = make_prompts()
            start = time.perf_counter()
            llm.generate(prompts, sampling, use_tqdm=False)
            seconds.append(time.perf_counter() - start)
        kernels = profile_kernels(llm, sampling)
    total = sum(kernel["us"] for kernel in kernels)
    of_torch = sum(kernel["us"] for kernel in kernels if "at::native" in kernel["kernel"])
    report.add(
        model=name, ms=statistics.median(seconds[1:]) * 1e3, kernels_ms=total / 1e3,
        torch_share=of_torch / total,
    )  # fmt: skip
    for kernel in kernels[:SHOWN]:
        report.add(model=name, **kernel)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--models", default=",".join(CONFIGS), help="names of published models")
    arguments = parser.parse_args()
    random.seed(0)
    report = Report(arguments.json)
    for name in arguments.models.split(","):
        report.section(name, partial(measure, report, name))
    print(f"failed: {report.failures or 'nothing'}")


if __name__ == "__main__":
    main()
