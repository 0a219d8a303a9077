"""Loads binaries of kernels and launches them, through the CUDA driver and in the context that torch uses.

Streams, memory and CUDA graphs are torch's: a launch goes to torch's current stream, so it is ordered with
torch's own kernels there, and a graph captures it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tiny_vllm.kernels.cuda.errors import DriverError

# Numbers of CUfunction_attribute and CUdevice_attribute in cuda.h.
LOCAL_SIZE_BYTES = 3
NUM_REGS = 4
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97
# Number of a CUlaunchAttributeID, see `LaunchConfig`.
PROGRAMMATIC_STREAM_SERIALIZATION = 6


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h; of its union of 64 bytes only an int is used."""

    _fields_ = (("id", ctypes.c_int), ("gap", ctypes.c_int), ("value", ctypes.c_int * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


def architecture(device: torch.device) -> str:
    """The name that `compile_cubin` takes: sm_80 for capability 8.0, sm_90a (all it has) for 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


class CudaFunction:
    """One kernel, loaded on one device.

    name; device; shared_bytes: dynamic shared memory of every launch; num_registers: per thread; local_bytes:
    stack of each thread, where registers spill to: 0 is what a fast kernel should have.
    A kernel stays loaded until the process ends, because captured graphs may still call it.
    """

    def __init__(self, handle: ctypes.c_void_p, name: str, shared_bytes: int, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.shared_bytes = shared_bytes
        self.num_registers = _attribute(handle, NUM_REGS)
        self.local_bytes = _attribute(handle, LOCAL_SIZE_BYTES)
        self._handle = handle

    def launch(
        self,
        grid: int,
        block: int,
        arguments: Sequence[Any],
        *,
        cooperative: bool = False,
        pdl: bool = False,
        stream: int | None = None,
    ) -> None:
        """Run the kernel once on `grid` blocks of `block` threads.

        arguments: ctypes values or structures, one for each parameter of the kernel, of exactly its type (a
        pointer is a `c_void_p` of `tensor.data_ptr()`): nothing checks them. cooperative: all blocks run at
        the same time, or the launch is refused; kernels whose blocks wait for one another need it. pdl: may
        start before the preceding kernel ends (see `triton_support`), not with cooperative. stream: default
        torch's current one. The calling thread must use this device at the time.
        Raises DriverError if the driver refuses; faults inside the kernel show up later, in torch.
        """
        self.prepare(arguments, grid=grid, block=block, cooperative=cooperative, pdl=pdl).launch(stream)

    def prepare(
        self,
        arguments: Sequence[Any],
        *,
        grid: int,
        block: int,
        cooperative: bool = False,
        pdl: bool = False,
    ) -> PreparedLaunch:
        """The same launch to be made many times; see PreparedLaunch."""
        return PreparedLaunch(self, self._handle, tuple(arguments), grid, block, cooperative, pdl)


class PreparedLaunch:
    """A launch whose argument list is already in the driver's form: a call costs a few microseconds.

    The ctypes objects stay alive with it, and each launch takes their values of that moment: set
    `argument.value`, or a structure's field, to change one. A graph keeps the values it was captured with.
    """

    def __init__(
        self,
        function: CudaFunction,
        handle: ctypes.c_void_p,
        arguments: tuple[Any, ...],
        grid: int,
        block: int,
        cooperative: bool,
        pdl: bool,
    ) -> None:
        self.function = function
        self.arguments = arguments
        driver = _driver()
        pointers = [ctypes.cast(ctypes.byref(argument), ctypes.c_void_p) for argument in arguments]
        parameters = (ctypes.c_void_p * len(arguments))(*pointers)
        self._device = function.device
        self._config = None
        if pdl:
            assert not cooperative
            self._attribute = LaunchAttribute(id=PROGRAMMATIC_STREAM_SERIALIZATION)
            self._attribute.value[0] = 1
            sizes = (grid, 1, 1, block, 1, 1, function.shared_bytes)
            self._config = LaunchConfig(*sizes, None, ctypes.pointer(self._attribute), 1)
            self._launch_configured, self._handle = driver.cuLaunchKernelEx, handle
            self._parameters = parameters
        self._entry = driver.cuLaunchCooperativeKernel if cooperative else driver.cuLaunchKernel
        self._head = (handle, *map(ctypes.c_uint, (grid, 1, 1, block, 1, 1, function.shared_bytes)))
        self._tail = (parameters,) if cooperative else (parameters, None)

    def launch(self, stream: int | None = None) -> None:
        """Launch with the arguments' present values. stream: default torch's current one."""
        if stream is None:
            stream = torch.cuda.current_stream(self._device).cuda_stream
        if self._config is None:
            status = self._entry(*self._head, ctypes.c_void_p(stream), *self._tail)
        else:
            self._config.stream = stream
            config = ctypes.byref(self._config)
            status = self._launch_configured(config, self._handle, self._parameters, None)
        if status != 0:
            raise _error(f"the kernel {self.function.name} cannot be launched", status)


def load_function(cubin: bytes, name: str, *, shared_bytes: int, device: torch.device) -> CudaFunction:
    """Load the kernel `name` of a binary.

    shared_bytes: dynamic shared memory of a block, beyond 48 KiB as far as the device has it. device: a CUDA
    device.
    Raises DriverError if the binary is not for this device, has no such kernel, or asks for too much.
    """
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    driver = _driver()
    with _context(device):
        module, handle = ctypes.c_void_p(), ctypes.c_void_p()
        _check(driver.cuModuleLoadData(ctypes.byref(module), cubin), f"the kernel {name} cannot be loaded")
        _check(
            driver.cuModuleGetFunction(ctypes.byref(handle), module, name.encode()),
            f"the binary has no kernel {name}",
        )
        available = shared_memory_limit(device)
        if shared_bytes > available:
            raise DriverError(
                f"the kernel {name} needs {shared_bytes} bytes of shared memory per block, "
                f"but the device has {available}"
            )
        _check(
            driver.cuFuncSetAttribute(handle, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
            f"the kernel {name} cannot have {shared_bytes} bytes of shared memory",
        )
        return CudaFunction(handle, name, shared_bytes, device)


@contextmanager
def _context(device: torch.device) -> Iterator[None]:
    """Inside, torch's (primary) context of the device is this thread's current one."""
    torch.cuda.init()
    driver, what = _driver(), f"the context of {device} cannot be used"
    ordinal, context = ctypes.c_int(), ctypes.c_void_p()
    _check(driver.cuDeviceGet(ctypes.byref(ordinal), device.index), what)
    # Retained for good: the functions loaded in it stay, too.
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal), what)
    _check(driver.cuCtxPushCurrent_v2(context), what)
    try:
        yield
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(context))


def shared_memory_limit(device: torch.device) -> int:
    """Bytes of shared memory that one block can have."""
    torch.cuda.init()
    ordinal = torch.cuda.current_device() if device.index is None else device.index
    value = ctypes.c_int()
    status = _driver().cuDeviceGetAttribute(ctypes.byref(value), MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, ordinal)
    _check(status, f"the shared memory of {device} is unknown")
    return value.value


def _attribute(handle: ctypes.c_void_p, attribute: int) -> int:
    value = ctypes.c_int()
    _check(
        _driver().cuFuncGetAttribute(ctypes.byref(value), attribute, handle),
        f"attribute {attribute} of a kernel is unknown",
    )
    return value.value


def _check(status: int, message: str) -> None:
    if status != 0:
        raise _error(message, status)


def _error(message: str, status: int) -> DriverError:
    driver, name, text = _driver(), ctypes.c_char_p(), ctypes.c_char_p()
    driver.cuGetErrorName(status, ctypes.byref(name))
    driver.cuGetErrorString(status, ctypes.byref(text))
    code = (name.value or f"CUDA error {status}".encode()).decode()
    return DriverError(f"{message}: {code} ({(text.value or b'unknown').decode()})", code=code)


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(
            "the CUDA driver libcuda.so.1 is not on this machine", hint="is a GPU here?"
        ) from error
