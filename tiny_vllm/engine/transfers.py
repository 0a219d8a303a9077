"""A step's small data on its way between host and device, without either waiting for the other.

On a GPU everything travels through pinned memory on the stream that computes: an upload is in place before
the kernels launched after it, a fetch sees what those launched before it wrote. On a CPU both are plain
copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

MIN_BUFFER_SIZE = 1024


class HostBuffer(Protocol):
    """Host memory that the device reads or writes. array: [size] int64."""

    array: np.ndarray

    def is_idle(self) -> bool:
        """Whether the device is done with it."""
        ...


Buffer = TypeVar("Buffer", bound=HostBuffer)


class PinnedBuffer:
    """Page-locked memory, as a tensor and as an array, and the event after its latest copy."""

    def __init__(self, size: int) -> None:
        self.tensor = torch.empty(size, dtype=torch.int64, pin_memory=True)
        self.array = self.tensor.numpy()
        self.event = torch.cuda.Event()

    def is_idle(self) -> bool:
        return self.event.query()


class BufferPool(Generic[Buffer]):
    """Buffers that the device may still be using when they are given back: the oldest is used again once it
    is idle, and a new one is made before anybody waits."""

    def __init__(self, make: Callable[[int], Buffer]) -> None:
        self._make = make
        self._buffers: deque[Buffer] = deque()

    def take(self, size: int) -> Buffer:
        """A buffer of at least this many integers."""
        if self._buffers and self._buffers[0].is_idle():
            buffer = self._buffers.popleft()
            if len(buffer.array) >= size:
                return buffer
        return self._make(max(MIN_BUFFER_SIZE, 1 << (size - 1).bit_length()))

    def give_back(self, buffer: Buffer) -> None:
        self._buffers.append(buffer)


class Fetch(Protocol):
    """Integers on their way to the host."""

    def read(self) -> list[int]:
        """Wait for them. May be called again."""
        ...


@dataclass(frozen=True, slots=True)
class _Fetched:
    values: list[int]

    def read(self) -> list[int]:
        return self.values


class _PinnedFetch:
    def __init__(self, buffer: PinnedBuffer, count: int, pool: BufferPool[PinnedBuffer]) -> None:
        self._buffer: PinnedBuffer | None = buffer
        self._count = count
        self._pool = pool
        self._values: list[int] = []

    def read(self) -> list[int]:
        if self._buffer is not None:
            self._buffer.event.synchronize()
            self._values = self._buffer.array[: self._count].tolist()
            self._pool.give_back(self._buffer)
            self._buffer = None
        return self._values


class Transfers(Protocol):
    """The way to one device and back."""

    def send(self, parts: Sequence[np.ndarray], size: int) -> Tensor:
        """One copy of int64 arrays, one after the other, `size` integers in all -> [size] on the device."""
        ...

    def fetch(self, values: Tensor) -> Fetch:
        """values: [N] int64 on the device; may be overwritten by what is launched next."""
        ...

    def receive(self, count: int, write: Callable[[Tensor], object]) -> Fetch:
        """Fetch what `write` has the device write to the [count] int64 tensor that it is given; see
        `DecodeStepper.draw`."""
        ...


class PlainTransfers:
    """To and from a CPU, or a device that is waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, parts: Sequence[np.ndarray], size: int) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self._device)

    def fetch(self, values: Tensor) -> Fetch:
        return _Fetched(values.tolist())

    def receive(self, count: int, write: Callable[[Tensor], object]) -> Fetch:
        values = torch.empty(count, dtype=torch.int64, device=self._device)
        write(values)
        return self.fetch(values)


class PinnedTransfers:
    """To and from a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._uploads = BufferPool(PinnedBuffer)
        self._fetches = BufferPool(PinnedBuffer)

    def send(self, parts: Sequence[np.ndarray], size: int) -> Tensor:
        buffer = self._uploads.take(size)
        np.concatenate(parts, out=buffer.array[:size])
        sent = buffer.tensor[:size].to(self._device, non_blocking=True)
        buffer.event.record()
        self._uploads.give_back(buffer)
        return sent

    def fetch(self, values: Tensor) -> Fetch:
        return self.receive(values.shape[0], lambda target: target.copy_(values, non_blocking=True))

    def receive(self, count: int, write: Callable[[Tensor], object]) -> Fetch:
        buffer = self._fetches.take(count)
        write(buffer.tensor[:count])
        buffer.event.record()
        return _PinnedFetch(buffer, count, self._fetches)


def transfers_to(device: torch.device) -> Transfers:
    return PinnedTransfers(device) if device.type == "cuda" else PlainTransfers(device)


class Arriving:
    """A part of an upload; `tensor` exists once the upload has been sent."""

    __slots__ = ("_tensor",)

    def __init__(self) -> None:
        self._tensor: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        assert self._tensor is not None, "the upload has not been sent"
        return self._tensor


class Upload:
    """Everything one step tells the device: collected part by part, then sent as one copy.

    Whoever adds a part may also leave a function that uses it; these run in order once the parts are there.
    """

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []
        self._parts: list[tuple[Arriving, int, bool]] = []
        self._size = 0
        self._actions: list[Callable[[], object]] = []

    def integers(self, values: Sequence[int] | np.ndarray) -> Arriving:
        """Arrives as int64 [len(values)]."""
        return self._add(np.asarray(values, dtype=np.int64), is_real=False)

    def reals(self, values: Sequence[float] | np.ndarray) -> Arriving:
        """Arrives as FP32 [len(values)]."""
        return self._add(np.asarray(values, dtype=np.float64).view(np.int64), is_real=True)

    def then(self, action: Callable[[], object]) -> None:
        """Run this once the parts are there."""
        self._actions.append(action)

    @torch.inference_mode()
    def send(self, transfers: Transfers) -> None:
        """Send the parts and start the actions. Does nothing if there are none."""
        if not self._parts:
            return
        sent = transfers.send(self._arrays, self._size)
        start = 0
        for arriving, size, is_real in self._parts:
            part = sent[start : start + size]
            arriving._tensor = part.view(torch.float64).to(torch.float32) if is_real else part
            start += size
        for action in self._actions:
            action()

    def _add(self, array: np.ndarray, *, is_real: bool) -> Arriving:
        arriving = Arriving()
        self._arrays.append(array)
        self._parts.append((arriving, len(array), is_real))
        self._size += len(array)
        return arriving
