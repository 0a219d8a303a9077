"""Times work that is done over and over: by CUDA graph replays and events on a GPU, by the clock
elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
    capture: bool = True,
) -> float:
    """Seconds per call of `step`, the median over rounds of num_steps calls each.

    rewind: called before each round, and not timed. capture: on a GPU, time the replays of a CUDA graph that
    is captured after one call, so that `step` must do the same every time, apart from values in tensors;
    otherwise its calls are timed, which the host must be fast enough to keep ahead of.
    """
    rewind()
    step()
    if device.type == "cuda":
        with _captured(step) if capture else nullcontext(step) as run:
            return _time_on_gpu(run, num_steps, num_rounds, rewind)
    seconds = []
    for _ in range(num_rounds):
        rewind()
        start = time.perf_counter()
        for _ in range(num_steps):
            step()
        seconds.append((time.perf_counter() - start) / num_steps)
    return statistics.median(seconds)


@contextmanager
def _captured(step: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # What a step allocates must outlive the replays.
        kept = step()
    yield graph.replay
    del kept


def _time_on_gpu(
    run: Callable[[], Any], num_steps: int, num_rounds: int, rewind: Callable[[], None]
) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    rewind()
    run()
    seconds = []
    for _ in range(num_rounds):
        rewind()
        torch.cuda._sleep(HEAD_START_CYCLES)
        start.record()
        for _ in range(num_steps):
            run()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / num_steps / 1e3)
    return statistics.median(seconds)
