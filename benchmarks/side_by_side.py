"""How do this engine and vLLM compare on this GPU, in one run?

    PYTHONPATH=. python3 benchmarks/side_by_side.py --json results.json
    PYTHONPATH=. python3 benchmarks/side_by_side.py --batch-sizes "" \\
        --workloads nano-vllm,256x128+512,64x128+512,64x2048+1 --json results.json

Runs `tiny-vllm bench decode --end-to-end`, for --workloads `tiny-vllm bench throughput`, and vllm_generate.py
one after the other, each in a process of its own, with the same shape (dummy weights, BF16), batches, lengths
and workloads, and writes all and their ratios into one file, anew after every line. vLLM comes from a bundle
(--peer) that is installed into a temporary directory first, or into --site, where it stays. Takes about three
minutes on an H200 with the defaults, two of them vLLM's start.

Both engines are warmed up alike: --num-warmup rounds of each line (default: 1) come before the timed ones,
before a workload's also one request alone. What they took is each line's seconds_of_warmup.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# The bundle has no FlashInfer, and nothing may wait for a network.
PEER_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


class Comparison:
    """What is known so far, on disk after every change."""

    def __init__(self, path: Path | None, model: Path, num_warmup: int) -> None:
        self._path = path
        self.content: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(sys.argv),
            "model": model.name,
            "num_warmup": num_warmup,
            "ratios": [],
            "failures": [],
            "throughput_ratios": [],
            "tiny_vllm": {},
            "tiny_vllm_throughput": {},
            "vllm": {"rows": []},
        }

    def take_ours(self, path: Path, name: str) -> None:
        """Read a report of `tiny-vllm bench`. It may be half written at the moment: there will be a next
        time."""
        try:
            self.content[name] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        self.write()

    def take_theirs(self, line: str) -> None:
        """A line that vllm_generate.py printed; vLLM prints others, too."""
        try:
            row = json.loads(line)
        except ValueError:
            return
        if isinstance(row, dict) and "measure" in row:
            self.content["vllm"]["rows"].append(row)
            self.write()

    def fail(self, text: str) -> None:
        print(f"FAILED: {text}", flush=True)
        self.content["failures"].append(text)
        self.write()

    def write(self) -> None:
        self.content["ratios"] = ratios(
            self.content["tiny_vllm"].get("rows", []), self.content["vllm"]["rows"]
        )
        self.content["throughput_ratios"] = throughput_ratios(
            self.content["tiny_vllm_throughput"].get("rows", []), self.content["vllm"]["rows"]
        )
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")


def ratios(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The lines that both have, with how many times longer vLLM's step takes."""

    def steps(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], float]:
        return {
            (row["input_len"], row["batch_size"]): row["us_per_step"]
            for row in rows
            if row.get("measure") == "generate" and "us_per_step" in row
        }

    mine, peers = steps(ours), steps(theirs)
    return [
        {
            "input_len": key[0],
            "batch_size": key[1],
            "us_per_step": mine[key],
            "vllm_us_per_step": peers[key],
            "speedup": peers[key] / mine[key],
        }
        for key in mine
        if key in peers
    ]


def throughput_ratios(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The workloads that both have, by their medians, with how many times longer vLLM takes. Both ask for the
    same tokens, so this is the ratio of every rate."""

    def workloads(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        # vLLM runs without prefix caching; ours is on, but of these workloads only one shares any prefix.
        return {
            row["workload"]: row
            for row in rows
            if row.get("measure") == "generate all" and not row.get("cached_share")
        }

    mine, peers = workloads(ours), workloads(theirs)
    rates = ("output_tokens_per_s", "prompt_tokens_per_s")
    return [
        {
            "workload": name,
            **{rate: mine[name][rate] for rate in rates},
            **{f"vllm_{rate}": peers[name][rate] for rate in rates},
            "speedup": peers[name]["seconds"] / mine[name]["seconds"],
        }
        for name in mine
        if name in peers
    ]


def output_lines(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> Iterator[str]:
    """Run a command and yield what it prints, line by line. Raises RuntimeError if it fails.

    After limit_s seconds the command is ended, with the processes it has started.
    """
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    timer = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    try:
        assert process.stdout is not None
        yield from (line.rstrip("\n") for line in process.stdout)
        code = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0:
        raise RuntimeError(f"{shlex.join(command[:4])} ... ended with {code} (limit: {limit_s:.0f} s)")


def run_ours(comparison: Comparison, args: argparse.Namespace, folder: Path) -> None:
    if args.batch_sizes:
        lines = ["--no-step", "--end-to-end", *line_options(args)]
        bench_ours(comparison, args, folder / "decode.json", "decode", lines, "tiny_vllm")
    if args.workloads:
        lines = ["--workload", args.workloads, *round_options(args)]
        bench_ours(comparison, args, folder / "throughput.json", "throughput", lines, "tiny_vllm_throughput")


def bench_ours(
    comparison: Comparison,
    args: argparse.Namespace,
    report: Path,
    benchmark: str,
    options: Sequence[str],
    name: str,
) -> None:
    command = [sys.executable, "-m", "tiny_vllm", "bench", benchmark, "--model", str(args.model)]
    command += ["--load-format", "dummy", "--json", str(report), *options]
    command += ["--max-model-len", str(max_model_len(args)), *shlex.split(args.options)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    try:
        for line in output_lines(command, {"PYTHONPATH": path}, args.limit):
            print(f"  tiny-vllm: {line}", flush=True)
            comparison.take_ours(report, name)
    finally:
        # The report is written just after the line is printed.
        comparison.take_ours(report, name)


def run_vllm(comparison: Comparison, args: argparse.Namespace, folder: Path) -> None:
    site = args.site or folder / "site"
    if not (site / "vllm").is_dir():
        start = time.perf_counter()
        install = ["bash", str(args.peer / "install.sh"), str(site)]
        for line in output_lines(install, {"PYTHON": sys.executable}, args.limit):
            print(f"  install: {line}", flush=True)
        comparison.content["vllm"]["seconds_to_install"] = time.perf_counter() - start
    script = str(ROOT / "benchmarks" / "vllm_generate.py")
    command = [sys.executable, script, "--model", str(args.model), *line_options(args)]
    command += ["--workloads", args.workloads]
    # Of this project it only imports what the workloads are.
    environment = {**PEER_ENVIRONMENT, "PYTHONPATH": os.pathsep.join((str(site), str(ROOT)))}
    for line in output_lines(command, environment, args.limit):
        print(f"  vllm: {line}", flush=True)
        comparison.take_theirs(line)


def line_options(args: argparse.Namespace) -> list[str]:
    return [
        *("--batch-sizes", args.batch_sizes),
        *("--input-lens", args.input_lens),
        *("--output-len", str(args.output_len)),
        *round_options(args),
    ]


def round_options(args: argparse.Namespace) -> list[str]:
    return ["--num-iters", str(args.num_iters), "--num-warmup", str(args.num_warmup)]


def max_model_len(args: argparse.Namespace) -> int:
    return max(4096, max(map(int, args.input_lens.split(","))) + args.output_len)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument(
        "--model",
        type=Path,
        default=ROOT / "benchmarks" / "shapes" / "llama-3.2-1b",
        help="directory with a config.json (default: Llama-3.2-1B's shape, beside this script)",
    )
    parser.add_argument(
        "--peer",
        type=Path,
        default=ROOT.parent / "shared" / "peers" / "vllm-0.21.0",
        help="directory with vLLM's install.sh (default: ../shared/peers/vllm-0.21.0)",
    )
    parser.add_argument("--site", type=Path, help="where the bundle is, or is to be installed for good")
    parser.add_argument("--engines", default="tiny-vllm,vllm", help="which to run, in this order")
    parser.add_argument("--batch-sizes", default="1,2,4,8,64", help='of decode lines; "" for none')
    parser.add_argument("--workloads", default="", help="those of `bench throughput`; default: none")
    parser.add_argument("--input-lens", default="128")
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--num-iters", type=int, default=3)
    parser.add_argument("--num-warmup", type=int, default=1, help="rounds of each line before the timed ones")
    parser.add_argument("--limit", type=float, default=280, help="seconds that each engine may take")
    parser.add_argument("--options", default="", help="more options for tiny-vllm, as one string")
    args = parser.parse_args()
    runs = {"tiny-vllm": run_ours, "vllm": run_vllm}
    engines = args.engines.split(",")
    if unknown := set(engines) - runs.keys():
        parser.error(f"--engines names {', '.join(sorted(unknown))}, but there are {', '.join(runs)}")
    if not (args.batch_sizes or args.workloads):
        parser.error("--batch-sizes and --workloads are empty: there is nothing to compare")
    if args.num_warmup < 0:
        parser.error(f"--num-warmup is {args.num_warmup}, but must be at least 0")
    if not (args.model / "config.json").is_file():
        parser.error(f"{args.model} has no config.json")
    comparison = Comparison(args.json, args.model, args.num_warmup)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for engine in engines:
            print(f"== {engine}", flush=True)
            start = time.perf_counter()
            try:
                runs[engine](comparison, args, folder)
            except RuntimeError as error:
                comparison.fail(f"{engine}: {error}")
            print(f"== {engine} took {time.perf_counter() - start:.1f} s", flush=True)
    comparison.write()
    for row in comparison.content["ratios"]:
        print(
            f"prompt {row['input_len']}, batch {row['batch_size']}: {row['us_per_step']:.1f} us per step, "
            f"vLLM {row['vllm_us_per_step']:.1f}, ratio {row['speedup']:.2f}",
            flush=True,
        )
    for row in comparison.content["throughput_ratios"]:
        print(
            f"{row['workload']}: {row['output_tokens_per_s']:.0f} output and "
            f"{row['prompt_tokens_per_s']:.0f} prompt tokens/s, "
            f"vLLM {row['vllm_output_tokens_per_s']:.0f} and {row['vllm_prompt_tokens_per_s']:.0f}, "
            f"ratio {row['speedup']:.2f}",
            flush=True,
        )
    return 1 if comparison.content["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
