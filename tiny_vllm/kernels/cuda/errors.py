"""What can go wrong between CUDA C++ source and a running kernel.

    CudaKernelError
    ├── CompileError     NVRTC is missing, too old, or refuses the source
    └── DriverError      the driver is missing, or refuses to load or launch the binary

Whoever chooses between a kernel and its fallback catches CudaKernelError, warns once and falls back.
"""

from __future__ import annotations

from tiny_vllm.errors import TinyVLLMError


class CudaKernelError(TinyVLLMError):
    """A CUDA C++ kernel cannot be made to run on this machine."""


class CompileError(CudaKernelError):
    """log: what the compiler said; empty if it did not get that far."""

    def __init__(self, message: str, *, log: str = "", hint: str | None = None) -> None:
        super().__init__(f"{message}\n{log}" if log else message, hint=hint)
        self.log = log


class DriverError(CudaKernelError):
    """code: the driver's error by name, such as CUDA_ERROR_INVALID_VALUE; empty without a driver."""

    def __init__(self, message: str, *, code: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code
