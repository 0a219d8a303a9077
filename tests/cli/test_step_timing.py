from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tiny_vllm.cli import step_timing
from tiny_vllm.cli.step_timing import time_steps


def test_the_median_round_counts_and_rewinding_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    durations: Iterator[float] = iter([100.0, *[1.0] * 2, *[5.0] * 2, *[2.0] * 2])
    diary: list[str] = []

    def step() -> None:
        nonlocal now
        now += next(durations)
        diary.append("step")

    def rewind() -> None:
        nonlocal now
        now += 1000
        diary.append("rewind")

    monkeypatch.setattr(step_timing.time, "perf_counter", lambda: now)
    seconds = time_steps(step, torch.device("cpu"), num_steps=2, num_rounds=3, rewind=rewind)
    assert seconds == 2.0
    assert diary == ["rewind", "step", *["rewind", "step", "step"] * 3]


@pytest.mark.gpu
def test_a_gpu_is_timed_without_the_host() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    buffer = torch.zeros(1 << 28, device="cuda")
    count = torch.zeros((), dtype=torch.int64, device="cuda")

    def step() -> None:
        buffer.add_(1)
        count.add_(1)

    seconds = time_steps(step, torch.device("cuda"), num_steps=5, num_rounds=3, rewind=count.zero_)
    # 2 GiB are read and written; no GPU does that at 20 TB/s, and one that runs these tests at more than 0.1.
    assert 0.1e12 < 2 * buffer.nbytes / seconds < 20e12
    assert count.item() == 5
