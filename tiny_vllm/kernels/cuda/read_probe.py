"""How fast can this card be read? The limit of every decode step, measured.

    rate = bytes of a buffer / time of one launch that copies each of them to shared memory once

The buffer is far larger than the L2 cache; 0 FLOPs. One block per SM streams chunks of 16 KB with bulk
copies, which need compute capability 9.0: one thread keeps an SM's share of the bandwidth busy, and a window
of 48 to 64 KB in flight is enough. More in flight gives the same total, and very unequal shares to the SMs.
Sums by torch read 4 to 9% slower on an H200, so they understate the limit. The kernel is in read_probe.cu.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tiny_vllm.kernels.cuda.driver import CudaFunction, architecture, load_function
from tiny_vllm.kernels.cuda.errors import CudaKernelError
from tiny_vllm.kernels.cuda.nvrtc import compile_cubin

CHUNK_BYTES = 16384
WINDOWS = (3, 4, 12)
"""Chunks in flight per SM: 48, 64 and 192 KB."""

NUM_ROUNDS = 7
LAUNCHES_PER_ROUND = 4


@dataclass(frozen=True)
class ReadRate:
    """bytes_per_second: of the best window; window: chunks of 16 KB in flight per SM; num_bytes: read per
    launch; rates: bytes per second of every window that was tried, each the median of several rounds."""

    bytes_per_second: float
    window: int
    num_bytes: int
    rates: Mapping[int, float]


def compile_probe(arch: str) -> bytes:
    """The binary for an architecture of compute capability 9.0 or newer."""
    source = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
    return compile_cubin(source, name="read_probe", defines={"CHUNK_BYTES": CHUNK_BYTES}, arch=arch)


def load_probe(window: int, device: torch.device) -> CudaFunction:
    """The kernel with shared memory for `window` chunks in flight. Raises CudaKernelError where it cannot
    run."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        raise CudaKernelError("bulk copies need a GPU of compute capability 9.0 or newer")
    return load_function(
        compile_probe(architecture(device)),
        "read_probe",
        shared_bytes=(window + 1) * (CHUNK_BYTES + 8),
        device=device,
    )


def read_once(probe: CudaFunction, buffer: Tensor, window: int, first_words: Tensor) -> None:
    """Read a buffer of whole chunks. first_words: [blocks] int32, gets each block's sum of its chunks' first
    words."""
    num_chunks, rest = divmod(buffer.nbytes, CHUNK_BYTES)
    assert rest == 0 and buffer.is_contiguous()
    arguments = (
        ctypes.c_void_p(buffer.data_ptr()),
        ctypes.c_uint(num_chunks),
        ctypes.c_uint(window),
        ctypes.c_void_p(first_words.data_ptr()),
    )
    probe.launch(len(first_words), 32, arguments)


def measure_read_rate(
    num_bytes: int = 2_500_000_000,
    device: torch.device | str = "cuda",
    windows: Sequence[int] = WINDOWS,
) -> ReadRate:
    """Time reading a buffer of about num_bytes, which must be much more than the L2 cache holds.

    Raises CudaKernelError where the kernel cannot run: before compute capability 9.0, or without NVRTC.
    """
    device = torch.device(device)
    num_chunks = max(num_bytes // CHUNK_BYTES, 1)
    probes = {window: load_probe(window, device) for window in windows}
    # Random bits, because what memory and wires do with zeros may cost less.
    buffer = torch.empty(num_chunks * CHUNK_BYTES // 4, dtype=torch.int32, device=device).random_()
    num_blocks = torch.cuda.get_device_properties(device).multi_processor_count
    first_words = torch.empty(num_blocks, dtype=torch.int32, device=device)
    rates = {}
    for window, probe in probes.items():
        read_once(probe, buffer, window, first_words)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        seconds = []
        for _ in range(NUM_ROUNDS):
            torch.cuda.synchronize(device)
            start.record()
            for _ in range(LAUNCHES_PER_ROUND):
                read_once(probe, buffer, window, first_words)
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / LAUNCHES_PER_ROUND / 1e3)
        rates[window] = buffer.nbytes / statistics.median(seconds)
    best = max(rates, key=lambda window: rates[window])
    return ReadRate(rates[best], best, buffer.nbytes, rates)
