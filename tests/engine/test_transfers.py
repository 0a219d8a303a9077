"""Parts of an upload arrive whole and in order; buffers in flight are left alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tiny_vllm.config import Choice, EngineConfig, ModelFacts, resolve
from tiny_vllm.engine.transfers import MIN_BUFFER_SIZE, BufferPool, PlainTransfers, Upload

CPU = torch.device("cpu")


class CountedTransfers(PlainTransfers):
    num_sent = 0

    def send(self, parts: list[np.ndarray], size: int) -> torch.Tensor:
        self.num_sent += 1
        return super().send(parts, size)


def test_many_parts_travel_as_one_copy_and_keep_their_types_and_values() -> None:
    transfers = CountedTransfers(CPU)
    upload = Upload()
    integers = upload.integers([3, -(2**63), 2**63 - 1])
    nothing = upload.integers([])
    reals = upload.reals([0.1, float("inf"), 1e-30])
    array = upload.integers(np.arange(5))
    seen: list[str] = []
    upload.then(lambda: seen.append(f"first {integers.tensor.tolist()[0]}"))
    upload.then(lambda: seen.append(f"second {array.tensor.tolist()[4]}"))
    upload.send(transfers)
    assert transfers.num_sent == 1
    assert integers.tensor.tolist() == [3, -(2**63), 2**63 - 1]
    assert nothing.tensor.shape == (0,)
    assert reals.tensor.dtype == torch.float32
    assert torch.equal(reals.tensor, torch.tensor([0.1, float("inf"), 1e-30], dtype=torch.float32))
    assert array.tensor.tolist() == [0, 1, 2, 3, 4]
    assert seen == ["first 3", "second 4"]


def test_an_upload_without_parts_sends_nothing() -> None:
    transfers = CountedTransfers(CPU)
    Upload().send(transfers)
    assert transfers.num_sent == 0


def test_a_part_cannot_be_used_before_it_is_sent() -> None:
    part = Upload().integers([1])
    with pytest.raises(AssertionError, match="not been sent"):
        _ = part.tensor


class FakeBuffer:
    def __init__(self, size: int) -> None:
        self.array = np.zeros(size, dtype=np.int64)
        self.idle = False

    def is_idle(self) -> bool:
        return self.idle


def test_a_buffer_in_flight_is_not_used_again_and_nobody_waits_for_it() -> None:
    pool = BufferPool(FakeBuffer)
    first = pool.take(10)
    assert len(first.array) == MIN_BUFFER_SIZE
    pool.give_back(first)
    second = pool.take(10)
    assert second is not first
    pool.give_back(second)
    first.idle = True
    assert pool.take(10) is first
    assert pool.take(10) is not second
    second.idle = True
    assert pool.take(10) is second


def test_a_buffer_that_became_too_small_is_replaced() -> None:
    pool = BufferPool(FakeBuffer)
    small = pool.take(1)
    small.idle = True
    pool.give_back(small)
    large = pool.take(MIN_BUFFER_SIZE + 1)
    assert len(large.array) == 2 * MIN_BUFFER_SIZE
    large.idle = True
    pool.give_back(large)
    assert pool.take(1) is large


@pytest.mark.parametrize(("device", "expected"), [("cpu", False), ("cuda", True)])
@pytest.mark.parametrize("asked", [None, True, False])
def test_planning_ahead_is_the_default_on_a_gpu_alone(
    device: str, expected: bool, asked: bool | None
) -> None:
    facts = ModelFacts(128, 128, 1000, 10)
    config, choices = resolve(
        EngineConfig(async_scheduling=asked),
        facts,
        device=Choice("device", device, "as asked"),
        dtype=Choice("dtype", "float32", "as asked"),
        free_bytes=2**30 if device == "cuda" else None,
        gpu_bytes=2**31 if device == "cuda" else None,
    )
    assert config.async_scheduling is (expected if asked is None else asked)
    assert any(choice.name == "async_scheduling" for choice in choices) == (asked is None)


def test_what_the_device_writes_itself_arrives_like_a_copy() -> None:
    values = torch.tensor([5, -1, 7])
    fetch = PlainTransfers(CPU).receive(3, lambda target: target.copy_(values))
    values.zero_()
    assert fetch.read() == [5, -1, 7] == fetch.read()
