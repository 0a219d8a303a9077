"""`tiny-vllm bench throughput`: many requests handed over at once, as an offline job sees it."""

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
    waiting_times,
)
from tiny_vllm.cli.options import add_common_options, add_engine_options


def add_parser(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "throughput",
        help="time many requests at once",
        usage="%(prog)s [options]",
        description="Time many equal requests at once. --max-num-seqs sets how many run together.",
        allow_abbrev=False,
    )
    parser.add_argument("--num-prompts", type=int, default=32, metavar="N", help="requests (default: 32)")
    add_workload_options(parser, input_len=128, output_len=64)
    add_engine_options(parser)
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_workload(args, ("num_prompts",))
    with session.open_llm(args) as llm:
        max_num_seqs = llm.config.max_num_seqs
        assert max_num_seqs is not None
        batch_size = min(args.num_prompts, max_num_seqs)
        # The seeds differ, so that the timed run finds no prefix of the warm-up.
        run_batch(llm, args, 1, seed=0)
        start = time.perf_counter()
        outputs = run_batch(llm, args, args.num_prompts, seed=1)
        seconds = time.perf_counter() - start
        prompt_tokens = args.num_prompts * args.input_len
        output_tokens = sum(output.metrics.num_generated_tokens for output in outputs)
        publish(
            llm,
            args,
            name="throughput",
            workload={
                **{name: getattr(args, name) for name in ("num_prompts", "input_len", "output_len")},
                "max_num_seqs": max_num_seqs,
            },
            results={
                "seconds": seconds,
                "requests_per_second": args.num_prompts / seconds,
                "output_tokens_per_second": output_tokens / seconds,
                "total_tokens_per_second": (prompt_tokens + output_tokens) / seconds,
                **waiting_times(outputs),
            },
            # The prompts' own time counts as well, so a full share is out of reach.
            limit=memory_limit(llm, args, batch_size=batch_size, tokens_per_second=output_tokens / seconds),
        )
    return 0
