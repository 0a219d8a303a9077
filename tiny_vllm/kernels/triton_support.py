"""The only file that knows whether Triton is here, where its kernels run, and what the GPU can do.

Kernel modules take `jit`, `tl` and `triton` from here, so that they import without Triton. With
TRITON_INTERPRET=1 in the environment of the process, kernels run on CPU tensors, slowly: that is for tests.

Triton compiles a kernel anew, which can take seconds, when an integer is 1, a multiple of 16 or neither for
the first time, or a pointer a multiple of 16 bytes or not. `jit(do_not_specialize=(...))` names the arguments
that change so from step to step: counts, table widths, pointers to parts of an upload or of another tensor.

Programmatic dependent launch (PDL, sm_90 and newer): a kernel may start while its predecessor still runs.
Every kernel of a chain asks for its successor first (`launch_dependents`), loads what no kernel of the chain
writes (weights, older keys and values), and then waits once for its predecessor (`wait_for_predecessor`). All
kernels wait, so a kernel that has waited knows that everything before it is complete. The chain's first two
kernels are launched without PDL: what the first one computes may then be read before any later wait.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
    jit: Any = triton.jit
except ImportError:
    HAS_TRITON = False
    triton = None

    def jit(function: Callable | None = None, **options: Any) -> Callable:
        """Stands for `triton.jit`: the kernel exists, and nothing can launch it."""
        return (lambda kernel: kernel) if function is None else function

    class tl:  # type: ignore[no-redef]
        """Stands for `triton.language` where module-level constants are made."""

        @staticmethod
        def constexpr(value: Any) -> Any:
            return value


def runs_triton(tensor: Tensor) -> bool:
    """Whether kernels can run on this tensor's device."""
    return HAS_TRITON and (tensor.is_cuda or INTERPRETED)


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Whether the device can start a kernel before its predecessor ends."""
    if not HAS_TRITON or INTERPRETED or device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def launch_options(
    num_warps: int, pdl: bool = False, num_stages: int = 1, max_registers: int | None = None
) -> dict[str, Any]:
    """Keyword arguments of a launch; the attribute of PDL and a limit of registers exist on NVIDIA only."""
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
    if pdl:
        options["launch_pdl"] = True
    if max_registers is not None and torch.version.hip is None:
        options["maxnreg"] = max_registers
    return options


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def next_power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()


def with_fallback(
    reference: Callable[..., Result],
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorate a function that launches kernels: where one does not compile, `reference` takes its place, for
    arguments of those shapes and types from then on. Warns once. Both take the same arguments."""

    def decorate(launch: Callable[..., Result]) -> Callable[..., Result]:
        broken: set[tuple[object, ...]] = set()

        @functools.wraps(launch)
        def op(*args: Any, **options: Any) -> Result:
            if broken and _signature(args, options) in broken:
                return reference(*args, **options)
            try:
                return launch(*args, **options)
            except _compile_errors() as error:
                if not broken:
                    warnings.warn(
                        f"the kernel of {launch.__name__} does not compile on this machine; the slower torch "
                        f"version takes its place ({type(error).__name__}: {str(error)[:200]})",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                broken.add(_signature(args, options))
                return reference(*args, **options)

        return op

    return decorate


def _signature(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[object, ...]:
    """Shapes and types of the tensors among the arguments: what kernels are compiled for."""
    values = (*args, *options.values())
    return tuple((tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None for value in values)


@functools.cache
def _compile_errors() -> tuple[type[Exception], ...]:
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return CompilationError, OutOfResources, PTXASError


@jit
def wait_for_predecessor():
    """Wait until the preceding kernel is complete and its stores are visible. Nothing that reads them may
    move
    above this, hence the memory clobber, which Triton's own `gdc_wait` lacks."""
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
    )


@jit
def launch_dependents():
    """Let the next kernel start as soon as every program of this one has come here."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


IS_INTERPRETED = tl.constexpr(INTERPRETED)


@jit
def dot(a, b, total):
    """total + a b, exact products for FP32 too. The interpreter cannot multiply BF16, so it gets FP32."""
    if IS_INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total, input_precision="ieee")
