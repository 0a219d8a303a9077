"""`tiny-vllm bench throughput`: many requests, all at once or as they arrive."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tiny_vllm.cli import session
from tiny_vllm.cli.bench_garbage import GarbageClock
from tiny_vllm.cli.bench_load import LoadResult, run_load, spread, staggered, step_columns, summarize
from tiny_vllm.cli.bench_plot import check_plot, draw, title
from tiny_vllm.cli.bench_rows import RowReport, add_report_options, check_report_options, release_memory
from tiny_vllm.cli.bench_workloads import NAMED, WorkItem, Workload, arrive, make_workload
from tiny_vllm.cli.machine import step_bytes
from tiny_vllm.cli.options import add_common_options, add_engine_options, engine_config
from tiny_vllm.errors import LEAVE_OUT, ConfigError
from tiny_vllm.types import SamplingParams

if TYPE_CHECKING:
    from tiny_vllm.config import EngineConfig
    from tiny_vllm.engine.engine import Engine
    from tiny_vllm.llm import LLM
    from tiny_vllm.models.spec import ModelSpec

DEFAULT_WORKLOAD = "32x128+64"
DEFAULT_NUM_WARMUP = {"cuda": 1, "cpu": 0}
"""A GPU compiles kernels and captures graphs when a batch or a context first needs them."""


def add_parser(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "throughput",
        help="time many requests, at once or arriving",
        usage="%(prog)s [options]",
        description="Time many requests through LLM.generate or, with --request-rate, as they arrive at the "
        "engine. --max-num-seqs sets how many run together. Workloads whose prompts share a prefix run a "
        "second time with prefix caching off. No round finds the prefixes of another, nor of the warm-up.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--workload",
        default=DEFAULT_WORKLOAD,
        metavar="NAME,NAME,...",
        help=f"any of {', '.join(NAMED)}, and shapes PROMPTSxPROMPT_TOKENS+NEW_TOKENS "
        f"(default: {DEFAULT_WORKLOAD})",
    )
    parser.add_argument("--num-prompts", type=int, metavar="N", help="instead of each workload's own number")
    parser.add_argument(
        "--workload-seed", type=int, default=0, metavar="N", help="of lengths, tokens, arrivals (default: 0)"
    )
    parser.add_argument(
        "--num-iters", type=int, default=1, metavar="N", help="timed repetitions of each line (default: 1)"
    )
    parser.add_argument(
        "--num-warmup",
        type=int,
        metavar="N",
        help="rounds of each line before the timed ones (default: 1 on a GPU, 0 on a CPU)",
    )
    parser.add_argument(
        "--request-rate",
        type=rates,
        metavar="R,R,...",
        help="requests per second, a Poisson process; inf: all at once. Without it requests go through "
        "LLM.generate, which does not tell when each token came",
    )
    parser.add_argument(
        "--plot", metavar="FILE.png", help="draw step time, batch, queue and pages; needs --request-rate"
    )
    parser.add_argument(
        "--keep-steps", action="store_true", help="every step into the JSON, for `bench plot`"
    )
    add_report_options(parser)
    add_engine_options(parser)
    add_common_options(parser)
    parser.set_defaults(run=run)


def rates(text: str) -> tuple[float, ...]:
    """A converter for argparse: "0.5,10,inf"."""
    values = tuple(float(part) for part in text.split(","))
    if not all(value > 0 for value in values):  # so written, NaN fails, too
        raise ValueError(text)
    return values


rates.__name__ = "list of positive rates"


def run(args: argparse.Namespace) -> int:
    _check(args)
    config = engine_config(args)
    from tiny_vllm.engine.build import plan_engine

    plan = plan_engine(config)
    if args.num_warmup is None:
        args.num_warmup = DEFAULT_NUM_WARMUP[plan.config.device]
    workloads = [
        make_workload(
            name, plan.checkpoint.spec.vocab_size, num_prompts=args.num_prompts, seed=args.workload_seed
        )
        for name in args.workload.split(",")
    ]
    for workload in workloads:
        _check_length(workload, plan.config)
    bench = _Bench(args, plan.checkpoint.spec, plan.config)
    is_caching = config.enable_prefix_caching
    bench.run(workloads, is_caching)
    sharing = [workload for workload in workloads if workload.shares_prefix]
    if is_caching and sharing:
        bench.run(sharing, False)
        bench.compare_caching(sharing)
    if args.plot:
        draw(args.plot, bench.series)
    return bench.report.finish()


def _check(args: argparse.Namespace) -> None:
    if args.num_iters < 1:
        raise ConfigError(f"num_iters is {args.num_iters}, but must be at least 1", hint=LEAVE_OUT)
    if args.num_warmup is not None and args.num_warmup < 0:
        raise ConfigError(f"num_warmup is {args.num_warmup}, but must be at least 0", hint=LEAVE_OUT)
    for name in ("plot", "keep_steps"):
        if getattr(args, name) and not args.request_rate:
            raise ConfigError(
                f"--{name.replace('_', '-')} needs --request-rate: LLM.generate does not show its steps",
                hint="--request-rate inf starts all at once",
            )
    if args.plot:
        check_plot(args.plot)
    check_report_options(args)


def _check_length(workload: Workload, config: EngineConfig) -> None:
    assert config.max_model_len is not None
    if workload.longest > config.max_model_len:
        raise ConfigError(
            f"the longest request of {workload.name} has {workload.longest} tokens, more than max_model_len "
            f"({config.max_model_len})",
            hint="raise --max-model-len or take another workload",
        )


class _Bench:
    """The report, and what is needed beyond it: series for the plot, seconds with and without caching."""

    def __init__(self, args: argparse.Namespace, spec: ModelSpec, config: EngineConfig) -> None:
        self._args = args
        options = {
            name: getattr(args, name)
            for name in ("workload", "num_prompts", "workload_seed", "num_iters", "num_warmup")
        }
        if args.request_rate:
            options["request_rate"] = [_rate(rate) for rate in args.request_rate]
        self.report = RowReport("throughput", args.json, spec=spec, config=config, options=options)
        self.series: list[tuple[str, dict[str, list[float]]]] = []
        self._seconds: dict[tuple[str, float, bool], list[float]] = defaultdict(list)

    def run(self, workloads: Sequence[Workload], is_caching: bool) -> None:
        args = argparse.Namespace(**{**vars(self._args), "enable_prefix_caching": is_caching})
        release_memory()
        if args.request_rate:
            from tiny_vllm.engine.build import build_engine, plan_engine

            engine = build_engine(plan_engine(engine_config(args)))
            for workload in workloads:
                self.report.attempt(partial(self._serve, engine, workload), workload=workload.name)
            return
        with session.open_llm(args) as llm:
            for workload in workloads:
                self.report.attempt(partial(self._generate, llm, workload), workload=workload.name)

    def compare_caching(self, workloads: Sequence[Workload]) -> None:
        """How many times faster the cache makes it, by the medians; offline and at an infinite rate that is
        throughput, at other rates the time that the last request needs."""
        for workload in workloads:
            for rate in self._args.request_rate or (math.inf,):
                cached, plain = (self._seconds[workload.name, rate, is_on] for is_on in (True, False))
                if cached and plain:
                    speedup = statistics.median(plain) / statistics.median(cached)
                    self.report.add(
                        measure="prefix caching",
                        workload=workload.name,
                        request_rate=_rate(rate),
                        speedup=speedup,
                    )

    def _generate(self, llm: LLM, workload: Workload) -> None:
        """All requests in one call."""
        prompts = [list(item.prompt_token_ids) for item in workload.items]
        params = [
            SamplingParams(
                temperature=workload.temperature,
                max_tokens=item.output_len,
                ignore_eos=True,
                detokenize=False,
            )
            for item in workload.items
        ]
        # The salts differ, so that no call finds the prefixes of another.
        start = time.perf_counter()
        llm.generate(prompts[:1], params[:1], cache_salt="warm-up", use_tqdm=False)
        for index in range(self._args.num_warmup):
            llm.generate(prompts, params, cache_salt=f"{workload.name} warm-up {index}", use_tqdm=False)
        seconds_of_warmup = time.perf_counter() - start
        rounds = []
        garbage = GarbageClock()
        for iteration in range(self._args.num_iters):
            salt = f"{workload.name} {iteration}"
            # Full collections wait for the end of a call, and so may run between two rounds.
            with garbage:
                start = time.perf_counter()
                outputs = llm.generate(prompts, params, cache_salt=salt, use_tqdm=False)
                rounds.append(time.perf_counter() - start)
        seconds = statistics.median(rounds)
        is_caching = llm.config.enable_prefix_caching
        self._seconds[workload.name, math.inf, is_caching] += rounds
        metrics = [output.metrics for output in outputs]
        num_output = sum(metric.num_generated_tokens for metric in metrics)
        assert llm.config.max_num_seqs is not None
        num_bytes = workload_bytes(
            llm.spec,
            llm.config.dtype,
            workload,
            llm.config.max_num_seqs,
            kv_cache_dtype=llm.config.kv_cache_dtype,
        )
        self.report.add_traffic(
            seconds,
            num_bytes,
            measure="generate all",
            **_columns(workload, is_caching),
            seconds=seconds,
            seconds_of_rounds=[round(value, 4) for value in rounds],
            seconds_of_warmup=seconds_of_warmup,
            **garbage.columns(),
            requests_per_s=len(outputs) / seconds,
            prompt_tokens_per_s=workload.num_prompt_tokens / seconds,
            output_tokens_per_s=num_output / seconds,
            total_tokens_per_s=(workload.num_prompt_tokens + num_output) / seconds,
            **spread(
                "first_token", [m.time_to_first_token for m in metrics if m.time_to_first_token is not None]
            ),
            **spread(
                "end_to_end",
                [m.finished_time - m.arrival_time for m in metrics if m.finished_time is not None],
            ),
            cached_share=sum(metric.num_cached_tokens for metric in metrics) / workload.num_prompt_tokens,
        )

    def _serve(self, engine: Engine, workload: Workload) -> None:
        """Requests as they arrive, at every rate. What all rates are warmed up by, requests cut short, counts
        for each of them."""
        is_caching = engine.config.enable_prefix_caching

        def load(items: Sequence[WorkItem], salt: str) -> LoadResult:
            return run_load(engine, items, temperature=workload.temperature, salt=f"{workload.name} {salt}")

        short = load(staggered(workload.items), "short").seconds
        for rate in self._args.request_rate:
            items = arrive(workload.items, rate, self._args.workload_seed)
            rounds = (load(items, f"{rate} warm-up {index}") for index in range(self._args.num_warmup))
            seconds_of_warmup = short + sum(result.seconds for result in rounds)
            for iteration in range(self._args.num_iters):
                result = load(items, f"{rate} {iteration}")
                self._seconds[workload.name, rate, is_caching].append(result.seconds)
                row = {
                    "measure": "serve",
                    **_columns(workload, is_caching),
                    "request_rate": _rate(rate),
                    "seconds_of_warmup": seconds_of_warmup,
                    **summarize(result),
                }
                steps = step_columns(result.steps)
                self.series.append((title(row), steps))
                self.report.add(**row, **({"steps": steps} if self._args.keep_steps else {}))


def _rate(rate: float) -> float | str:
    """As JSON can say it."""
    return "inf" if rate == math.inf else rate


def _columns(workload: Workload, is_caching: bool) -> dict[str, Any]:
    return {
        "workload": workload.name,
        "num_prompts": len(workload.items),
        "prompt_tokens": workload.num_prompt_tokens,
        "output_tokens": workload.num_output_tokens,
        "prefix_caching": is_caching,
    }


def workload_bytes(
    spec: ModelSpec, dtype: str, workload: Workload, max_num_seqs: int, *, kv_cache_dtype: str = "auto"
) -> float:
    """Bytes that decoding must read if all slots are always full: every token's context once, and the weights
    once a step. Prompts read next to nothing but take time, so a full share is out of reach."""
    longest_output = max(item.output_len for item in workload.items)
    num_steps = max(longest_output, math.ceil(workload.num_output_tokens / max_num_seqs))
    mean_batch = workload.num_output_tokens / num_steps
    return num_steps * step_bytes(
        spec, dtype, mean_batch, workload.mean_context, kv_cache_dtype=kv_cache_dtype
    )
