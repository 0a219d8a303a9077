from __future__ import annotations

import pytest
import torch

from tests.helpers.cubin import resource_usage
from tiny_vllm.kernels.cuda.read_probe import (
    CHUNK_BYTES,
    WINDOWS,
    compile_probe,
    load_probe,
    measure_read_rate,
    read_once,
)


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.parametrize("arch", ["sm_90", "sm_90a", "sm_100a"])
def test_the_kernel_compiles_without_spills(arch: str) -> None:
    usage = resource_usage(compile_probe(arch))
    assert set(usage) == {"read_probe"}
    assert usage["read_probe"].registers <= 64
    assert usage["read_probe"].stack_bytes == 0


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0 or newer")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("num_chunks", [1, 7, 128, 1000, 4099])
@pytest.mark.parametrize("num_blocks", [1, 128, 132])
def test_every_chunk_is_read_once(
    window: int, num_chunks: int, num_blocks: int, device: torch.device
) -> None:
    buffer = torch.full((num_chunks, CHUNK_BYTES // 4), -1, dtype=torch.int32, device=device)
    buffer[:, 0] = torch.randint(0, 100_000, (num_chunks,), device=device)
    sums = torch.full((num_blocks,), -1, dtype=torch.int32, device=device)
    read_once(load_probe(window, device), buffer, window, sums)
    expected = [int(buffer[block::num_blocks, 0].sum()) for block in range(num_blocks)]
    assert sums.tolist() == expected


@pytest.mark.gpu
def test_the_rate_is_that_of_memory_and_not_of_the_cache(device: torch.device) -> None:
    measured = measure_read_rate(device=device)
    assert measured.bytes_per_second == max(measured.rates.values()) == measured.rates[measured.window]
    assert set(measured.rates) == set(WINDOWS)
    buffer = torch.ones(measured.num_bytes // 4, device=device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    buffer.sum()
    start.record()
    for _ in range(5):
        buffer.sum()
    end.record()
    end.synchronize()
    sum_rate = 5 * buffer.nbytes / (start.elapsed_time(end) / 1e3)
    # A sum reads a little slower than the limit; a cache is several times faster than memory.
    assert 0.9 * sum_rate < measured.bytes_per_second < 2 * sum_rate
