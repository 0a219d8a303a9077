"""The workload of `bench latency`, and its report for people and as JSON."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_vllm.cli.machine import describe_machine, measure_read_bandwidth, step_bytes
from tiny_vllm.cli.options import engine_config
from tiny_vllm.errors import LEAVE_OUT, UNWRITABLE, ConfigError
from tiny_vllm.types import SamplingParams

if TYPE_CHECKING:
    from tiny_vllm.llm import LLM
    from tiny_vllm.outputs import RequestOutput


def add_workload_options(parser: argparse.ArgumentParser, *, input_len: int, output_len: int) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--input-len",
        type=int,
        default=input_len,
        metavar="N",
        help=f"tokens per prompt (default: {input_len})",
    )
    group.add_argument(
        "--output-len",
        type=int,
        default=output_len,
        metavar="N",
        help=f"tokens generated per prompt (default: {output_len})",
    )
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; - is stdout")


def check_workload(args: argparse.Namespace, counts: Sequence[str]) -> None:
    """Refuse what cannot run before the model is loaded. counts: the arguments that must be at least 1."""
    engine_config(args)
    for name in ("input_len", "output_len", *counts):
        value = getattr(args, name)
        if value < 1:
            raise ConfigError(f"{name} is {value}, but must be at least 1", hint=LEAVE_OUT)
    if args.json not in (None, "-") and not Path(args.json).absolute().parent.is_dir():
        raise ConfigError(f"{args.json} cannot be written: its directory does not exist", hint=UNWRITABLE)


def run_batch(llm: LLM, args: argparse.Namespace, num_prompts: int, *, seed: int) -> list[RequestOutput]:
    """Generate exactly output_len tokens, greedily, for prompts of random tokens that share no prefix."""
    total = args.input_len + args.output_len
    if total > llm.config.max_model_len:
        raise ConfigError(
            f"input_len + output_len is {total}, more than max_model_len ({llm.config.max_model_len})",
            hint="lower one of them",
        )
    generator = random.Random(seed)
    prompts = [generator.choices(range(llm.spec.vocab_size), k=args.input_len) for _ in range(num_prompts)]
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True, detokenize=False)
    return llm.generate(prompts, params, use_tqdm=False)


def spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median and 99th percentile in milliseconds."""
    ordered = sorted(seconds)
    last = ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)]
    values = {"mean": statistics.fmean(ordered), "p50": statistics.median(ordered), "p99": last}
    return {name: value * 1000 for name, value in values.items()}


def waiting_times(outputs: Sequence[RequestOutput]) -> dict[str, dict[str, float]]:
    """Time to the first token and time per further token, over requests. The second needs two tokens."""
    first = [output.metrics.time_to_first_token for output in outputs]
    further = [output.metrics.time_per_output_token for output in outputs]
    times = {
        "time_to_first_token_ms": [value for value in first if value is not None],
        "time_per_output_token_ms": [value for value in further if value is not None],
    }
    return {name: spread_ms(values) for name, values in times.items() if values}


def memory_limit(
    llm: LLM, args: argparse.Namespace, *, batch_size: int, tokens_per_second: float
) -> dict[str, float]:
    """How fast `batch_size` sequences could decode if reading memory were all there is to do.

    The context grows during a run, so its mean is taken. Bandwidth is measured now, on this machine.
    """
    bandwidth = measure_read_bandwidth(llm.config.device)
    context = args.input_len + (args.output_len + 1) / 2
    bytes_per_token = (
        step_bytes(llm.spec, llm.config.dtype, batch_size, context, kv_cache_dtype=llm.config.kv_cache_dtype)
        / batch_size
    )
    limit = bandwidth / bytes_per_token
    return {
        "read_bandwidth_bytes_per_second": bandwidth,
        "bytes_per_token": bytes_per_token,
        "tokens_per_second": limit,
        "share": tokens_per_second / limit,
    }


def publish(
    llm: LLM,
    args: argparse.Namespace,
    *,
    name: str,
    workload: dict[str, int],
    results: dict[str, Any],
    limit: dict[str, float],
) -> None:
    """Write the JSON where it was asked for, and the summary on stdout (on stderr if JSON takes stdout)."""
    machine = describe_machine(llm.config.device)
    report = {
        "benchmark": name,
        "machine": machine,
        "model": asdict(llm.spec) | {"num_parameters": llm.spec.num_parameters},
        "engine": asdict(llm.config),
        "workload": workload,
        "results": results,
        "limit": limit,
    }
    text = json.dumps(report, indent=2)
    if args.json == "-":
        print(text)
    elif args.json:
        _write(args.json, text + "\n")
    out = sys.stderr if args.json == "-" else sys.stdout
    print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in workload.items()), file=out)
    print(
        f"  on {machine['name']}, {machine['threads']} threads, "
        f"{llm.spec.num_parameters / 1e6:.0f}M parameters in {llm.config.dtype}",
        file=out,
    )
    for key, value in results.items():
        label, is_ms, _ = key.replace("_", " ").partition(" ms")
        if isinstance(value, dict):
            shown = "  ".join(f"{part} {number:.2f}" for part, number in value.items()) + is_ms
        else:
            shown = f"{value:.2f}"
        print(f"  {label:28} {shown}", file=out)
    print(
        f"  {'share of the memory limit':28} {limit['share']:.1%} "
        f"({limit['bytes_per_token'] / 1e6:.1f} MB per token at "
        f"{limit['read_bandwidth_bytes_per_second'] / 1e9:.1f} GB/s allow "
        f"{limit['tokens_per_second']:.0f} tokens/s)",
        file=out,
    )


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", hint=UNWRITABLE) from error
