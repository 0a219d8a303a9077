"""Which prefill policy and token budgets serve requests best as they arrive?

    PYTHONPATH=. python3 benchmarks/arrivals.py --json results.json [--model DIRECTORY] [--device cpu]

First the capacity is measured: the requests per second that the first case completes when all come at once.
Then every case meets the same requests as Poisson processes at shares of it. Lengths are log-normal
(cli/bench_workloads.py). One request in ten is urgent; every few seconds a long prompt of the least urgent
kind comes on top. The pool holds half of what full slots need, so that urgent requests and growth preempt.

Before a case is measured it is warmed up: full slots that empty one by one, a long prompt beside others and
alone, then the arrivals at the highest and at the lowest share, up to ten seconds of each. What that took is
seconds_of_warmup of the case's lines.

A case is POLICY:BUDGET[:LIMIT]: prefill_policy, max_num_batched_tokens, max_prefill_tokens_per_decode.

Of every run: throughput, time to first token (all but the long prompts', and the urgent ones'), gaps between
the tokens of a request, and stalls: how long nobody of those who run got a further token while a long prompt
waited for its first one. With --stall-bound-ms: the share of long prompts with a longer stall.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tiny_vllm.cli.bench_load import LoadResult, latencies, percentile, run_load, spread, staggered, summarize
from tiny_vllm.cli.bench_rows import RowReport, check_report_options, release_memory
from tiny_vllm.cli.bench_workloads import (
    LOG_NORMAL_LIMITS,
    LOG_NORMAL_OUTPUT,
    LOG_NORMAL_PROMPT,
    WorkItem,
    arrive,
    log_normal_len,
)
from tiny_vllm.config import EngineConfig
from tiny_vllm.engine.build import build_engine, plan_engine
from tiny_vllm.engine.engine import Engine

ROOT = Path(__file__).resolve().parents[1]
URGENT, NORMAL, LONG = 0, 1, 2
URGENT_SHARE = 0.1
LONG_OUTPUT_LEN = 32
POOL_SHARE = 0.5
WARM_UP_SECONDS = 10.0
"""Of arrivals at one share, at most."""


def parse_case(text: str) -> dict[str, Any]:
    """A converter for argparse: "mixed:8192:512" as engine options."""
    policy, budget, *limit = text.split(":")
    if policy not in ("mixed", "exclusive") or len(limit) > 1:
        raise ValueError(text)
    options: dict[str, Any] = {"prefill_policy": policy, "max_num_batched_tokens": int(budget)}
    if limit:
        options["max_prefill_tokens_per_decode"] = int(limit[0])
    return options


parse_case.__name__ = "POLICY:BUDGET[:LIMIT]"


def case_name(options: dict[str, Any]) -> str:
    return ":".join(map(str, options.values()))


def make_items(count: int, vocab_size: int, scale: float, seed: int) -> list[WorkItem]:
    """Requests of log-normal lengths, one in ten urgent. scale: of the medians."""
    rng = random.Random(seed)
    items = []
    for _ in range(count):
        (prompt_median, prompt_sigma), (output_median, output_sigma) = LOG_NORMAL_PROMPT, LOG_NORMAL_OUTPUT
        prompt_len = log_normal_len(rng, prompt_median * scale, prompt_sigma)
        output_len = log_normal_len(rng, output_median * scale, output_sigma)
        priority = URGENT if rng.random() < URGENT_SHARE else NORMAL
        items.append(WorkItem(tuple(rng.choices(range(vocab_size), k=prompt_len)), output_len, priority))
    return items


def with_long_prompts(items: Sequence[WorkItem], args: argparse.Namespace, vocab_size: int) -> list[WorkItem]:
    """The same with a long prompt every long_every seconds, in the order of arrival."""
    rng = random.Random(args.seed)
    long = []
    arrival = args.long_every / 2
    while arrival < args.seconds:
        prompt = tuple(rng.choices(range(vocab_size), k=args.long_prompt_len))
        long.append(WorkItem(prompt, LONG_OUTPUT_LEN, LONG, arrival))
        arrival += args.long_every
    return sorted([*items, *long], key=lambda item: item.arrival)


def arriving_items(rate: float, args: argparse.Namespace, vocab_size: int) -> list[WorkItem]:
    """A process of `rate` requests per second for args.seconds, and the long prompts."""
    count = max(round(rate * args.seconds), 4)
    items = arrive(make_items(count, vocab_size, args.length_scale, args.seed), rate, args.seed)
    return with_long_prompts(items, args, vocab_size)


def stalls_during_long_prompts(result: LoadResult) -> list[float]:
    """Of every long prompt: the longest stall of the others between its arrival and its first token."""
    stalls = result.stalls()
    longest = []
    for request in result.requests:
        if request.item.priority == LONG:
            start, end = request.item.arrival, request.token_times[0]
            longest.append(max((b - a for a, b in stalls if a < end and b > start), default=0.0))
    return longest


def measure(
    engine: Engine, rate: float, args: argparse.Namespace, vocab_size: int, salt: str
) -> dict[str, Any]:
    """One row: a process of `rate` requests per second for args.seconds."""
    result = run_load(engine, arriving_items(rate, args, vocab_size), temperature=0.0, salt=salt)
    stalls = stalls_during_long_prompts(result)
    urgent = [request for request in result.requests if request.item.priority == URGENT]
    short = [request for request in result.requests if request.item.priority != LONG]
    row = summarize(result) | latencies(short)
    row |= spread("urgent_first_token", [request.time_to_first_token for request in urgent])
    row |= spread("stall", stalls)
    row["num_long_prompts"] = len(stalls)
    if args.stall_bound_ms is not None and stalls:
        row["share_beyond_bound"] = sum(s * 1e3 > args.stall_bound_ms for s in stalls) / len(stalls)
    return row


def warm_up_batches(engine: Engine, args: argparse.Namespace, vocab_size: int) -> float:
    """Meet every batch size, contexts of all lengths, a long prompt beside others, and the largest chunks.
    Returns the seconds that it took."""
    items = make_items(args.max_num_seqs, vocab_size, args.length_scale, args.seed + 1)
    long = WorkItem((1,) * args.long_prompt_len, LONG_OUTPUT_LEN, LONG)
    loads = {"short": staggered(items), "whole": [*items, long], "long": [long]}
    return sum(
        run_load(engine, load, temperature=0.0, salt=f"{name} warm-up").seconds
        for name, load in loads.items()
    )


def warm_up_arrivals(engine: Engine, capacity: float, args: argparse.Namespace, vocab_size: int) -> float:
    """The highest share meets the most. But requests pile up while kernels are compiled: small steps with
    prompts are left to the lowest. Returns the seconds that it took."""
    bounded = argparse.Namespace(**{**vars(args), "seconds": min(args.seconds, WARM_UP_SECONDS)})
    return sum(
        run_load(
            engine,
            arriving_items(share * capacity, bounded, vocab_size),
            temperature=0.0,
            salt=f"{share} warm-up",
        ).seconds
        for share in sorted({max(args.shares), min(args.shares)}, reverse=True)
    )


def measure_capacity(engine: Engine, args: argparse.Namespace, vocab_size: int) -> float:
    """Requests per second when there are always more than enough: those completed between a fifth and four
    fifths of them, so that neither the empty start nor the tail counts."""
    items = make_items(args.capacity_requests, vocab_size, args.length_scale, args.seed + 1)
    result = run_load(engine, items, temperature=0.0, salt="capacity")
    ends = [request.token_times[-1] for request in result.requests]
    between = percentile(ends, 0.8) - percentile(ends, 0.2)
    return 0.6 * len(items) / between


def engine_config(args: argparse.Namespace, case: dict[str, Any]) -> EngineConfig:
    page_size = 16
    mean_len = args.length_scale * (LOG_NORMAL_PROMPT[0] + LOG_NORMAL_OUTPUT[0]) * 1.8
    # Whoever is alone must be able to end, and the longest of the others beside a long prompt.
    longest = max(args.long_prompt_len + LONG_OUTPUT_LEN, 2 * LOG_NORMAL_LIMITS[1])
    needed = max(POOL_SHARE * args.max_num_seqs * mean_len, 2 * longest)
    return EngineConfig(
        model=str(args.model),
        load_format="dummy",
        device=args.device,
        max_num_seqs=args.max_num_seqs,
        max_model_len=max(4096, args.long_prompt_len + 1024),
        num_pages=args.num_pages or math.ceil(needed / page_size),
        page_size=page_size,
        ageing_seconds=2.0,
        **case,
    )


def run_case(
    report: RowReport, args: argparse.Namespace, case: dict[str, Any], known: dict[str, float]
) -> None:
    plan = plan_engine(engine_config(args, case))
    engine = build_engine(plan)
    vocab_size = plan.checkpoint.spec.vocab_size
    seconds_of_warmup = warm_up_batches(engine, args, vocab_size)
    if "capacity" not in known:
        known["capacity"] = args.capacity or measure_capacity(engine, args, vocab_size)
        report.add(measure="capacity", case=case_name(case), requests_per_s=known["capacity"])
    seconds_of_warmup += warm_up_arrivals(engine, known["capacity"], args, vocab_size)
    for share in args.shares:
        rate = share * known["capacity"]
        row = measure(engine, rate, args, vocab_size, f"{case_name(case)} {share}")
        report.add(
            measure="arrivals",
            case=case_name(case),
            share_of_capacity=share,
            request_rate=rate,
            seconds_of_warmup=seconds_of_warmup,
            **row,
        )


TABLE = {
    "output_tokens_per_s": "tokens/s",
    "first_token_p50_ms": "first p50",
    "first_token_p95_ms": "p95",
    "first_token_p99_ms": "p99",
    "urgent_first_token_p95_ms": "urgent p95",
    "inter_token_p50_ms": "gap p50",
    "inter_token_p95_ms": "p95",
    "inter_token_p99_ms": "p99",
    "stall_p50_ms": "stall p50",
    "stall_max_ms": "max",
    "num_preemptions": "preempted",
    "mean_running": "running",
}
"""Column -> heading; times in ms."""


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line per share and case, the cases of one share below each other."""
    lines = ["| capacity | case | " + " | ".join(TABLE.values()) + " |", "|---" * (len(TABLE) + 2) + "|"]
    for row in sorted(rows, key=lambda row: row["share_of_capacity"]):
        cells = [f"{row[name]:.4g}" if name in row else "-" for name in TABLE]
        lines.append(f"| {row['share_of_capacity']:.0%} | {row['case']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", help="where the results go")
    parser.add_argument("--model", type=Path, default=ROOT / "benchmarks" / "shapes" / "llama-3.2-1b")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument(
        "--cases",
        type=parse_case,
        nargs="+",
        default=[parse_case(text) for text in ("mixed:8192", "mixed:8192:1024", "exclusive:8192")],
        metavar="POLICY:BUDGET[:LIMIT]",
    )
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 0.75, 0.9])
    parser.add_argument("--seconds", type=float, default=5.0, help="of arrivals at each rate (default: 5)")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--num-pages", type=int, help="instead of half of what full slots need")
    parser.add_argument("--length-scale", type=float, default=1.0, help="of the medians of both lengths")
    parser.add_argument("--long-prompt-len", type=int, default=8000)
    parser.add_argument(
        "--long-every", type=float, default=1.5, help="seconds between two long prompts (default: 1.5)"
    )
    parser.add_argument("--stall-bound-ms", type=float)
    parser.add_argument("--capacity", type=float, help="requests per second, instead of measuring")
    parser.add_argument("--capacity-requests", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    positive = (
        "seconds",
        "max_num_seqs",
        "length_scale",
        "long_prompt_len",
        "long_every",
        "capacity_requests",
    )
    for name in positive:
        if not getattr(args, name) > 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, but must be more than 0")
    if not all(share > 0 for share in args.shares):
        parser.error(f"--shares are {args.shares}, but must be more than 0")
    check_report_options(args)
    return args


def main() -> int:
    args = parse_arguments()
    start = time.perf_counter()
    plan = plan_engine(engine_config(args, args.cases[0]))
    options = {name: value for name, value in vars(args).items() if name not in ("json", "model")}
    report = RowReport(
        "arrivals",
        args.json,
        spec=plan.checkpoint.spec,
        config=plan.config,
        options=options,
        program="arrivals.py",
    )
    known: dict[str, float] = {}
    for case in args.cases:
        report.attempt(partial(run_case, report, args, case, known), case=case_name(case))
        release_memory()
    out = sys.stderr if args.json == "-" else sys.stdout
    rows = [row for row in report.rows if row["measure"] == "arrivals"]
    print(f"\n{table(rows)}\n\n{time.perf_counter() - start:.0f} s", file=out)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
