"""`tiny-vllm bench decode`: what one token costs, against what reading memory alone would cost."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tiny_vllm.cli import session
from tiny_vllm.cli.bench_rows import (
    RowReport,
    add_report_options,
    check_report_options,
    positive_numbers,
    release_memory,
)
from tiny_vllm.cli.machine import free_memory_bytes, step_bytes
from tiny_vllm.cli.options import add_common_options, add_engine_options, engine_config
from tiny_vllm.config import EngineConfig, kv_bytes
from tiny_vllm.errors import LEAVE_OUT, ConfigError
from tiny_vllm.types import SamplingParams

if TYPE_CHECKING:
    from tiny_vllm.cli.decode_workload import DecodeModel, DecodeWorkload, Step
    from tiny_vllm.engine.build import EnginePlan
    from tiny_vllm.llm import LLM
    from tiny_vllm.models.spec import ModelSpec

SHARE_OF_FREE = 0.8
"""Of free memory, what the pages of one measurement may take."""
DEFAULT_BATCH_SIZES = {"cuda": (1, 2, 4, 8, 16, 64), "cpu": (1, 2, 4, 8, 16)}
OPTIONS = (
    *("batch_sizes", "contexts", "num_steps", "num_rounds"),
    *("step", "end_to_end", "input_lens", "output_len", "num_iters", "num_warmup"),
)


def add_parser(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "decode",
        help="time decode steps, by batch and context",
        usage="%(prog)s [options]",
        description="Time decode steps by themselves and, with --end-to-end, through LLM.generate, "
        "beside the rate at which this machine can read memory.",
        allow_abbrev=False,
    )
    add_line_options(parser)
    alone = parser.add_argument_group("steps by themselves")
    alone.add_argument(
        "--step", action=argparse.BooleanOptionalAction, default=True, help="time them (default: on)"
    )
    alone.add_argument("--num-steps", type=int, default=32, metavar="N", help="steps per round (default: 32)")
    alone.add_argument(
        "--num-rounds", type=int, default=7, metavar="N", help="rounds; the median counts (default: 7)"
    )
    whole = parser.add_argument_group("through LLM.generate")
    whole.add_argument(
        "--end-to-end",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="time it, for every batch size and prompt length (default: off)",
    )
    whole.add_argument(
        "--input-lens",
        type=positive_numbers,
        default=(128,),
        metavar="N,N,...",
        help="tokens per prompt (default: 128)",
    )
    whole.add_argument(
        "--output-len", type=int, default=512, metavar="N", help="new tokens, at least 2 (default: 512)"
    )
    whole.add_argument(
        "--num-iters", type=int, default=3, metavar="N", help="repetitions; the median counts (default: 3)"
    )
    whole.add_argument(
        "--num-warmup",
        type=int,
        default=1,
        metavar="N",
        help="repetitions before the timed ones (default: 1)",
    )
    add_engine_options(parser)
    add_common_options(parser)
    parser.set_defaults(run=run)


def add_line_options(parser: argparse.ArgumentParser) -> None:
    """What `bench decode` and `bench kernels` share."""
    parser.add_argument(
        "--batch-sizes",
        type=positive_numbers,
        metavar="N,N,...",
        help="sequences per step (default: 1,2,4,8,16, on a GPU also 64)",
    )
    parser.add_argument(
        "--contexts",
        type=positive_numbers,
        default=(129, 640, 4096),
        metavar="N,N,...",
        help="tokens that a step attends to, the newest included (default: 129,640,4096)",
    )
    add_report_options(parser)


def run(args: argparse.Namespace) -> int:
    _check(args)
    config = engine_config(args)
    from tiny_vllm.engine.build import plan_engine

    plan = plan_engine(config)
    args.batch_sizes = args.batch_sizes or DEFAULT_BATCH_SIZES[plan.config.device]
    _check_lengths(args, plan)
    report = RowReport(
        "decode",
        args.json,
        spec=plan.checkpoint.spec,
        config=plan.config,
        options={name: getattr(args, name) for name in OPTIONS},
    )
    if args.step:
        time_steps_alone(report, plan, args)
        release_memory()
    if args.end_to_end:
        time_generate(report, args)
    return report.finish()


def _check(args: argparse.Namespace) -> None:
    least_values = {"num_steps": 1, "num_rounds": 1, "output_len": 2, "num_iters": 1, "num_warmup": 0}
    for name, least in least_values.items():
        if getattr(args, name) < least:
            raise ConfigError(
                f"{name} is {getattr(args, name)}, but must be at least {least}", hint=LEAVE_OUT
            )
    if not (args.step or args.end_to_end):
        raise ConfigError("--no-step leaves nothing to time", hint="add --end-to-end")
    check_report_options(args)


def _check_lengths(args: argparse.Namespace, plan: EnginePlan) -> None:
    """Refuse what the model or the engine could not do, before anything is measured."""
    spec, config = plan.checkpoint.spec, plan.config
    assert config.max_num_seqs is not None and config.max_model_len is not None
    longest = max(args.contexts) + args.num_steps
    if args.step and longest > spec.max_position_embeddings:
        raise ConfigError(
            f"the longest of the contexts and num_steps make {longest} tokens, more than the model's context "
            f"({spec.max_position_embeddings})",
            hint="lower one of them",
        )
    if not args.end_to_end:
        return
    total = max(args.input_lens) + args.output_len
    if total > config.max_model_len:
        raise ConfigError(
            f"the longest of input_lens and output_len make {total} tokens, more than max_model_len "
            f"({config.max_model_len})",
            hint="lower one of them",
        )
    if max(args.batch_sizes) > config.max_num_seqs:
        raise ConfigError(
            f"batch_sizes has {max(args.batch_sizes)}, more than max_num_seqs ({config.max_num_seqs})",
            hint="raise --max-num-seqs",
        )


def time_steps_alone(report: RowReport, plan: EnginePlan, args: argparse.Namespace) -> None:
    """One line per batch size, context and way of computing the step."""
    import torch

    from tiny_vllm.cli.decode_workload import DecodeModel
    from tiny_vllm.weights.load import load_weights

    spec, config = plan.checkpoint.spec, plan.config
    weights = load_weights(
        plan.checkpoint, dtype=getattr(torch, config.dtype), device=config.device, seed=config.seed
    )
    longest = max(args.contexts) + args.num_steps
    model = DecodeModel(spec, weights, config, max_model_len=longest)
    if config.device == "cuda" and model.tape_obstacle is not None:
        report.skip(model.tape_obstacle, measure="step", computed_by="tape")
    for batch_size in args.batch_sizes:
        for context in args.contexts:
            line = {"measure": "step", "batch_size": batch_size, "context": context}
            report.attempt(partial(_time_line, report, model, args, line), **line)


def _time_line(report: RowReport, model: DecodeModel, args: argparse.Namespace, line: dict[str, Any]) -> None:
    from tiny_vllm.cli.decode_workload import DecodeWorkload

    spec, config = model.spec, model.config
    batch_size, context = line["batch_size"], line["context"]
    num_values = batch_size * (context + args.num_steps) * spec.kv_values_per_token
    cache_bytes = kv_bytes(
        num_values, spec.head_dim, dtype=config.dtype, kv_cache_dtype=config.kv_cache_dtype
    )
    free_bytes = free_memory_bytes(config.device)
    if free_bytes is not None and cache_bytes > SHARE_OF_FREE * free_bytes:
        report.skip(
            f"keys and values take {cache_bytes / 1e9:.1f} GB, more than {SHARE_OF_FREE:.0%} of the "
            f"{free_bytes / 1e9:.1f} GB that are free",
            **line,
        )
        return
    workload = DecodeWorkload(model, batch_size, context, args.num_steps)
    for name, make in workload.steps().items():
        named = {**line, "computed_by": name}
        report.attempt(partial(_time_step, report, workload, make, args, named), **named)


def _time_step(
    report: RowReport,
    workload: DecodeWorkload,
    make: Callable[[], Step],
    args: argparse.Namespace,
    line: dict[str, Any],
) -> None:
    from tiny_vllm.cli.step_timing import time_steps

    model = workload.model
    seconds = time_steps(
        make(),
        model.device,
        num_steps=args.num_steps,
        num_rounds=args.num_rounds,
        rewind=workload.rewind,
        capture=False,
    )
    # The context grows by one with each step of a round.
    mean_context = line["context"] + (args.num_steps - 1) / 2
    _add_step(report, model.spec, model.config, seconds, mean_context, **line)


def _add_step(
    report: RowReport, spec: ModelSpec, config: EngineConfig, seconds: float, mean_context: float, **line: Any
) -> None:
    batch_size = line["batch_size"]
    report.add_traffic(
        seconds,
        step_bytes(spec, config.dtype, batch_size, mean_context, kv_cache_dtype=config.kv_cache_dtype),
        **line,
        us_per_step=seconds * 1e6,
        us_per_token=seconds / batch_size * 1e6,
    )


def time_generate(report: RowReport, args: argparse.Namespace) -> None:
    """One line per prompt length and batch size; a step is what a call takes beyond one for a single
    token."""
    start = time.perf_counter()
    with session.open_llm(args) as llm:
        ready = time.perf_counter() - start
        timed_call(llm, 1, min(args.input_lens), 1, seed=0)
        report.add(
            measure="start",
            seconds_to_ready=ready,
            seconds_to_first_token=time.perf_counter() - start,
        )
        for input_len in args.input_lens:
            for batch_size in args.batch_sizes:
                line = {"measure": "generate", "batch_size": batch_size, "input_len": input_len}
                report.attempt(partial(_time_calls, report, llm, args, line), **line)


def _time_calls(report: RowReport, llm: LLM, args: argparse.Namespace, line: dict[str, Any]) -> None:
    batch_size, input_len, output_len = line["batch_size"], line["input_len"], args.output_len
    # Not counted: kernels are compiled and graphs captured when a context first needs them.
    warmup = [
        timed_call(llm, batch_size, input_len, output_len, seed=-1 - index)
        for index in range(args.num_warmup)
    ]
    whole, first = [], []
    for iteration in range(args.num_iters):
        whole.append(timed_call(llm, batch_size, input_len, output_len, seed=2 * iteration + 1))
        first.append(timed_call(llm, batch_size, input_len, 1, seed=2 * iteration + 2))
    total, prompt = statistics.median(whole), statistics.median(first)
    _add_step(
        report,
        llm.spec,
        llm.config,
        (total - prompt) / (output_len - 1),
        input_len + output_len / 2,
        **line,
        output_len=output_len,
        seconds_per_call=total,
        seconds_to_first_token=prompt,
        output_tokens_per_s=batch_size * output_len / total,
        spread=(max(whole) - min(whole)) / total,
        seconds_of_warmup=sum(warmup),
    )


def timed_call(llm: LLM, batch_size: int, input_len: int, output_len: int, *, seed: int) -> float:
    """Seconds of LLM.generate for random prompts; different seeds share no prefix."""
    prompts = random_prompts(llm.spec.vocab_size, batch_size, input_len, seed)
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def random_prompts(vocab_size: int, count: int, length: int, seed: int) -> list[Sequence[int]]:
    generator = random.Random(f"{count} prompts of {length}, {seed}")
    return [generator.choices(range(vocab_size), k=length) for _ in range(count)]
