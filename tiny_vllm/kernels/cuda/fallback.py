"""Loads a kernel, or warns that something slower takes its place."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

from tiny_vllm.kernels.cuda.driver import CudaFunction
from tiny_vllm.kernels.cuda.errors import CudaKernelError


def load_or_warn(load: Callable[[], CudaFunction], kind: str, substitute: str) -> CudaFunction | None:
    """What `load` returns; None where it raises CudaKernelError, after a warning.

    kind: of kernel, with its article. A problem is told once, not for each kernel of a kind that has it."""
    try:
        return load()
    except CudaKernelError as error:
        _warn(kind, substitute, str(error)[:300])
        return None


@functools.cache
def _warn(kind: str, substitute: str, problem: str) -> None:
    message = f"{kind} cannot be used on this machine; instead of it: {substitute} ({problem})"
    warnings.warn(message, RuntimeWarning, stacklevel=3)
