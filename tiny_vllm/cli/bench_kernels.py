"""`tiny-vllm bench kernels`: each kernel of a decode step by itself, reading memory and not a cache."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from tiny_vllm.cli.bench_decode import DEFAULT_BATCH_SIZES, add_line_options
from tiny_vllm.cli.bench_rows import RowReport, check_report_options
from tiny_vllm.cli.options import add_common_options, add_engine_options, engine_config

if TYPE_CHECKING:
    from tiny_vllm.cli.kernel_cases import KernelCase, KernelCases

# A round takes milliseconds on a GPU already: a launch of a case is a launch for each copy.
STEPS_PER_ROUND = {"cuda": 10, "cpu": 1}
NUM_ROUNDS = {"cuda": 7, "cpu": 3}


def add_parser(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "kernels",
        help="time each kernel of a decode step alone",
        usage="%(prog)s [options]",
        description="Time each kernel of a decode step alone, in the model's shapes and with weights that no "
        "cache holds, beside the rate at which this machine can read memory. Weights are random: a "
        "configuration is enough (--load-format dummy).",
        allow_abbrev=False,
    )
    add_line_options(parser)
    add_engine_options(parser)
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_report_options(args)
    config = engine_config(args)
    import torch

    from tiny_vllm.cli.kernel_cases import KernelCases
    from tiny_vllm.engine.build import plan_engine

    plan = plan_engine(config)
    spec, config = plan.checkpoint.spec, plan.config
    batch_sizes = args.batch_sizes or DEFAULT_BATCH_SIZES[config.device]
    report = RowReport(
        "kernels",
        args.json,
        spec=spec,
        config=config,
        options={"batch_sizes": batch_sizes, "contexts": args.contexts},
    )
    cases = KernelCases(
        spec,
        getattr(torch, config.dtype),
        torch.device(config.device),
        config.page_size,
        is_fp8=config.kv_cache_dtype == "fp8",
    )
    for name in cases.matrices():
        report.attempt(partial(_time_products, report, cases, name, batch_sizes), kernel=name)
    for batch_size in batch_sizes:
        for context in args.contexts:
            line = {"kernel": "attention", "batch_size": batch_size, "context": context}
            report.attempt(partial(_time_attention, report, cases, batch_size, context), **line)
    for batch_size in batch_sizes:
        report.attempt(partial(_time_draw, report, cases, batch_size), kernel="draw", batch_size=batch_size)
    return report.finish()


def _time_products(report: RowReport, cases: KernelCases, name: str, batch_sizes: tuple[int, ...]) -> None:
    for case in cases.products(name, batch_sizes):
        _time_case(report, cases, case)


def _time_attention(report: RowReport, cases: KernelCases, batch_size: int, context: int) -> None:
    _time_case(report, cases, cases.attention(batch_size, context))


def _time_draw(report: RowReport, cases: KernelCases, batch_size: int) -> None:
    _time_case(report, cases, cases.draw(batch_size))


def _time_case(report: RowReport, cases: KernelCases, case: KernelCase) -> None:
    """One line: as the engine launches the kernel, and where that is a chain, also without."""
    chained = cases.can_chain()
    seconds = _time(case, cases, partial(case.launch, chained))
    more: dict[str, Any] = {"us": seconds * 1e6}
    if chained:
        more["us_without_pdl"] = _time(case, cases, partial(case.launch, False)) * 1e6
    if case.rival is not None:
        more["us_torch"] = _time(case, cases, case.rival) * 1e6
    report.add_traffic(seconds, case.num_bytes, **case.line, **more, is_cold=case.is_cold)


def _time(case: KernelCase, cases: KernelCases, launch: Any) -> float:
    """Seconds per launch of the kernel."""
    import torch

    from tiny_vllm.cli.step_timing import time_steps

    kind = cases.device.type
    with torch.inference_mode():
        seconds = time_steps(
            launch, cases.device, num_steps=STEPS_PER_ROUND[kind], num_rounds=NUM_ROUNDS[kind]
        )
    return seconds / case.num_launches
