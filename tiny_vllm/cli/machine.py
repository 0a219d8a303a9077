"""What this machine is and how fast it reads memory: the limit of every decode step."""

from __future__ import annotations

import platform
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from tiny_vllm.config import DTYPE_BYTES, kv_bytes
from tiny_vllm.engine.available_memory import available_memory

if TYPE_CHECKING:
    from tiny_vllm.models.spec import ModelSpec


def describe_machine(device: str) -> dict[str, Any]:
    """Processor or GPU, threads, memory in bytes, versions."""
    import torch

    facts: dict[str, Any] = {
        "device": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        facts |= {
            "name": torch.cuda.get_device_name(),
            "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
            "memory_bytes": total,
            "free_memory_bytes": free,
            "driver": _driver_version(),
            "cuda": torch.version.cuda,
            "triton": _package_version("triton"),
        }
    else:
        facts |= {"name": _processor_name(), **_main_memory()}
    return facts


def free_memory_bytes(device: str) -> int | None:
    """What can be allocated now; None where the system does not say."""
    if device != "cuda":
        return _main_memory()["free_memory_bytes"]
    import torch

    return torch.cuda.mem_get_info()[0]


def _driver_version() -> str | None:
    """Of NVIDIA's kernel module, from Linux's /proc or from nvidia-smi; None where neither says."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            text = file.read()
    except OSError:
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return None
    found = re.search(r"\b\d{3,}(\.\d+)+", text)
    return found[0] if found else None


def _package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _main_memory() -> dict[str, int | None]:
    """Bytes the machine has, and those that this process may still take; None where that is unknown."""
    total = None
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                name, _, rest = line.partition(":")
                if name == "MemTotal":
                    total = int(rest.split()[0]) * 1024
    except OSError:
        pass
    available = available_memory()
    return {"memory_bytes": total, "free_memory_bytes": None if available is None else available.num_bytes}


def measure_read_bandwidth(device: str, *, num_bytes: int | None = None, repeats: int = 10) -> float:
    """Bytes per second of summing a buffer far larger than the caches, the best of several passes.

    All of torch's threads take part on a CPU. num_bytes: default 512 MiB on a CPU and 2 GiB on a GPU.
    """
    import torch

    if num_bytes is None:
        num_bytes = 2 << 30 if device == "cuda" else 512 << 20
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    seconds = float("inf")
    for _ in range(repeats + 1):
        start = time.perf_counter()
        # .item() waits for the device.
        buffer.sum().item()
        seconds = min(seconds, time.perf_counter() - start)
    return num_bytes / seconds


@dataclass(frozen=True)
class ReadLimit:
    """bytes_per_second; method: how it was measured, and if that is not the best method, why; details: per
    variant."""

    bytes_per_second: float
    method: str
    details: Mapping[str, float]


def measure_read_limit(device: str) -> ReadLimit:
    """The rate that no step can beat: on a GPU a kernel of bulk copies, elsewhere the sum of a buffer."""
    if device != "cuda":
        return ReadLimit(measure_read_bandwidth(device), "sum of a buffer by all of torch's threads", {})
    from tiny_vllm.kernels.cuda.errors import CudaKernelError
    from tiny_vllm.kernels.cuda.read_probe import CHUNK_BYTES, measure_read_rate

    try:
        rate = measure_read_rate(device=device)
    except CudaKernelError as error:
        method = f"sum of a buffer, some percent below the limit: {error.message}"
        return ReadLimit(measure_read_bandwidth(device), method, {})
    details = {
        f"{window * CHUNK_BYTES // 1024} KiB in flight per multiprocessor": bytes_per_second
        for window, bytes_per_second in rate.rates.items()
    }
    return ReadLimit(rate.bytes_per_second, "bulk copies to shared memory", details)


def step_bytes(
    spec: ModelSpec, dtype: str, batch_size: float, context_len: float, *, kv_cache_dtype: str = "auto"
) -> float:
    """Bytes that one decode step must read: the weights once, and every sequence's keys and values.

    The embedding is read as a whole only where it is also the LM head; otherwise a step looks up single rows.
    Of experts, as many are read as the sequences can pick at most; layers with a window read no more than
    that. context_len: tokens in the cache of each of the batch_size sequences, on average.
    """
    parameters: float = spec.num_parameters
    if not spec.tie_word_embeddings:
        parameters -= spec.vocab_size * spec.hidden_size
    if spec.experts is not None:
        num_idle = max(spec.experts.num_experts - batch_size * spec.experts.num_active, 0)
        num_layers = sum(spec.has_experts(layer) for layer in range(spec.num_layers))
        parameters -= num_layers * num_idle * 3 * spec.hidden_size * spec.experts.intermediate_size
    tokens = sum(
        min(context_len, spec.layer_window(layer) or context_len) for layer in range(spec.num_layers)
    )
    token_bytes = kv_bytes(2 * spec.kv_size, spec.head_dim, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    return DTYPE_BYTES[dtype] * parameters + batch_size * tokens * token_bytes
