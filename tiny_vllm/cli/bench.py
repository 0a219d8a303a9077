"""`tiny-vllm bench`: how fast the engine is on this machine, and how near to what its memory allows."""

from __future__ import annotations

from typing import Any

from tiny_vllm.cli import bench_decode, bench_kernels, bench_latency, bench_plot, bench_throughput


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("bench", help="measure speed on this machine", allow_abbrev=False)
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    bench_latency.add_parser(benchmarks)
    bench_throughput.add_parser(benchmarks)
    bench_decode.add_parser(benchmarks)
    bench_kernels.add_parser(benchmarks)
    bench_plot.add_parser(benchmarks)
