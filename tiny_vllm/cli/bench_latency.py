"""`tiny-vllm bench latency`: one batch at a time, as a person waiting for an answer sees it."""

from __future__ import annotations

import argparse
import time
from typing import Any

from tiny_vllm.cli import session
from tiny_vllm.cli.bench_report import (
    add_workload_options,
    check_workload,
    memory_limit,
    publish,
    run_batch,
    spread_ms,
    waiting_times,
)
from tiny_vllm.cli.options import add_common_options, add_engine_options


def add_parser(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "latency",
        help="time one batch at a time",
        usage="%(prog)s [options]",
        description="Time one batch of equal requests, several times over.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--batch-size", type=int, default=1, metavar="N", help="requests at a time (default: 1)"
    )
    parser.add_argument(
        "--num-iters", type=int, default=3, metavar="N", help="timed repetitions (default: 3)"
    )
    add_workload_options(parser, input_len=32, output_len=128)
    add_engine_options(parser)
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_workload(args, ("batch_size", "num_iters"))
    with session.open_llm(args) as llm:
        # Warm up once; the seeds differ, so that no run finds another's prefix.
        run_batch(llm, args, args.batch_size, seed=0)
        seconds: list[float] = []
        outputs = []
        for iteration in range(args.num_iters):
            start = time.perf_counter()
            outputs += run_batch(llm, args, args.batch_size, seed=iteration + 1)
            seconds.append(time.perf_counter() - start)
        times = waiting_times(outputs)
        per_token = times.get("time_per_output_token_ms", {"mean": sum(seconds) / len(seconds) * 1000})
        decode_rate = args.batch_size / per_token["mean"] * 1000
        publish(
            llm,
            args,
            name="latency",
            workload={
                name: getattr(args, name) for name in ("batch_size", "input_len", "output_len", "num_iters")
            },
            results={
                "latency_ms": spread_ms(seconds),
                **times,
                "decode_tokens_per_second": decode_rate,
            },
            limit=memory_limit(llm, args, batch_size=args.batch_size, tokens_per_second=decode_rate),
        )
    return 0
