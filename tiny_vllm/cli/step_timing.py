"""Times work that is done over and over: by CUDA graph replays and events on a GPU, by the clock
elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

# Cycles for which the GPU is kept waiting at the start of a round (about half a millisecond), so that the
# host is well ahead when the clock starts and its launches cost nothing.
HEAD_START_CYCLES = 1_000_000


def time_steps(
    step: Callable[[], Any],
    device: torch.device,
    *,
    num_steps: int,
    num_rounds: int,
    rewind: Callable[[], None] = lambda: None,
) -> float:
    """Seconds per call of `step`, the median over rounds of num_steps calls each.

    On a GPU `step` is captured as a CUDA graph after one call, and its replays are timed: it must do the same
    with every replay, apart from values in tensors. rewind: called before each round, and not timed.
    """
    if device.type == "cuda":
        return _time_replays(step, num_steps, num_rounds, rewind)
    rewind()
    step()
    seconds = []
    for _ in range(num_rounds):
        rewind()
        start = time.perf_counter()
        for _ in range(num_steps):
            step()
        seconds.append((time.perf_counter() - start) / num_steps)
    return statistics.median(seconds)


def _time_replays(
    step: Callable[[], Any], num_steps: int, num_rounds: int, rewind: Callable[[], None]
) -> float:
    rewind()
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # What a step allocates must outlive the replays.
        kept = step()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    rewind()
    graph.replay()
    seconds = []
    for _ in range(num_rounds):
        rewind()
        torch.cuda._sleep(HEAD_START_CYCLES)
        start.record()
        for _ in range(num_steps):
            graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / num_steps / 1e3)
    del kept
    return statistics.median(seconds)
