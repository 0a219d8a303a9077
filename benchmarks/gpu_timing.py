"""What the GPU benchmarks share: timing by graph replay, the card's read rate, guarded sections, results."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

# Twice the L2 cache of an H200 and more: inputs rotated through so many bytes are read from memory.
COLD_BYTES = 400_000_000


def time_graph(launch: Callable[[], Any], *, rounds: int = 7, replays: int = 20) -> float:
    """Seconds that `launch`, captured as a CUDA graph, takes per replay: the median over rounds."""
    launch()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = launch()
        graph.replay()
        return time_replays(graph, rounds=rounds, replays=replays, keep=kept)


def time_replays(
    graph: torch.cuda.CUDAGraph,
    *,
    rounds: int,
    replays: int,
    before_round: Callable[[], None] | None = None,
    keep: Any = None,
) -> float:
    """Seconds per replay, the median over rounds. `keep`: tensors that must outlive the replays."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    seconds = []
    for _ in range(rounds):
        if before_round is not None:
            before_round()
        torch.cuda.synchronize()
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / replays / 1e3)
    del keep
    return statistics.median(seconds)


def measure_read_rate(num_bytes: int = 4_000_000_000) -> dict[str, float]:
    """Bytes per second of torch.sum (reads) and of a copy (reads and writes)."""
    source = torch.empty(num_bytes // 4, device="cuda").normal_()
    target = torch.empty_like(source)
    return {
        "sum": source.nbytes / time_graph(source.sum, replays=5),
        "copy": 2 * source.nbytes / time_graph(lambda: target.copy_(source), replays=5),
    }


def rotate(make: Callable[[], torch.Tensor], least: int = 2) -> list[torch.Tensor]:
    """As many tensors as it takes to push each other out of the cache."""
    first = make()
    return [first] + [make() for _ in range(max(least, -(-COLD_BYTES // first.nbytes)) - 1)]


class Report:
    """Rows of results, printed as they come and written to a file after every section."""

    def __init__(self, path: Path | None) -> None:
        import triton

        self._path = path
        self.rows: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.machine = {
            "date": date.today().isoformat(),
            "command": " ".join(sys.argv),
            "driver": _driver_version(),
            "python": platform.python_version(),
            "gpu": torch.cuda.get_device_name(),
            "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
        }
        print(self.machine, flush=True)

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        cells = (
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in row.items()
        )
        print("  ".join(cells), flush=True)

    def section(self, name: str, run: Callable[[], None]) -> None:
        """Run a part; if it fails, say so and go on."""
        print(f"== {name}", flush=True)
        try:
            run()
        except Exception:
            self.failures.append(name)
            print(f"FAILED: {name}\n{traceback.format_exc()[-1500:]}", flush=True)
        finally:
            torch.cuda.empty_cache()
            self.write()

    def write(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            content = {"machine": self.machine, "failures": self.failures, "rows": self.rows}
            self._path.write_text(json.dumps(content, indent=1) + "\n")


def _driver_version() -> str:
    """As nvidia-smi says it; "unknown" where that is not to be had."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return output.split()[0] if output.split() else "unknown"
