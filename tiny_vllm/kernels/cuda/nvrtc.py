"""CUDA C++ source to a GPU binary, through NVIDIA's run-time compiler (NVRTC, 12.4 and newer).

CUDA builds of torch bring NVRTC as a pip package; a system-wide one is found by the loader's search path. No
CUDA toolkit is needed. The library is opened at the first compilation.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tiny_vllm.kernels.cuda.cubin_cache import read_entry, write_entry
from tiny_vllm.kernels.cuda.errors import CompileError

MIN_VERSION = (12, 4)
OPTIONS = ("--std=c++17", "-default-device")
SYSTEM_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


def compile_cubin(
    source: str, *, name: str, defines: Mapping[str, int | str] | None = None, arch: str = "sm_90a"
) -> bytes:
    """The binary of `source` for one architecture, from the disk cache where it was compiled before.

    source: CUDA C++17 without any #include; functions without a qualifier are device functions. name: a word
    for messages and file names. defines: preprocessor macros. arch: as `driver.architecture` names it; the
    suffix `a` allows instructions of that architecture only.
    Raises CompileError with the compiler's log if the source is refused, or if there is no usable NVRTC.
    """
    options = [*OPTIONS, f"--gpu-architecture={arch}"]
    options += [f"-D{macro}={value}" for macro, value in sorted((defines or {}).items())]
    library = _library()
    version = ".".join(map(str, _version(library)))
    # Lengths keep two different lists of parts from reading as the same text.
    parts = [version, *options, source]
    key = hashlib.sha256("".join(f"{len(part)}:{part}" for part in parts).encode()).hexdigest()
    entry = f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)}-{arch}-{key[:32]}.cubin"
    cubin = read_entry(entry)
    if cubin is None:
        cubin = _compile(library, source, name, options)
        write_entry(entry, cubin)
    return cubin


def nvrtc_version() -> tuple[int, int]:
    """Version of the NVRTC in use. Raises CompileError if there is none, or if it is too old."""
    return _version(_library())


def _compile(library: ctypes.CDLL, source: str, name: str, options: list[str]) -> bytes:
    program = ctypes.c_void_p()
    _check(
        library,
        library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None
        ),
    )
    try:
        texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = library.nvrtcCompileProgram(program, len(options), texts)
        if status != 0:
            raise CompileError(
                f"NVRTC cannot compile the kernel {name} ({_error_text(library, status)})",
                log=_fetch(library, "nvrtcGetProgramLog", program)
                .rstrip(b"\0")
                .decode(errors="replace")
                .strip(),
            )
        return _fetch(library, "nvrtcGetCUBIN", program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _fetch(library: ctypes.CDLL, function: str, program: ctypes.c_void_p) -> bytes:
    """What a pair of functions, one for the size and one for the bytes, says about a program."""
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"{function}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, function)(program, buffer))
    return buffer.raw


def _check(library: ctypes.CDLL, status: int) -> None:
    if status != 0:
        raise CompileError(f"NVRTC fails: {_error_text(library, status)}")


def _error_text(library: ctypes.CDLL, status: int) -> str:
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    text: bytes = library.nvrtcGetErrorString(status)
    return text.decode()


def _version(library: ctypes.CDLL) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library, library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


@functools.cache
def _library() -> ctypes.CDLL:
    for path in _packaged_libraries():
        # NVRTC asks the loader for this second library by its bare name, which only works once it is loaded.
        for builtins in sorted(path.parent.glob("libnvrtc-builtins.so.*")):
            with suppress(OSError):
                ctypes.CDLL(str(builtins))
        with suppress(OSError):
            return _refuse_old(ctypes.CDLL(str(path)))
    for name in SYSTEM_NAMES:
        with suppress(OSError):
            return _refuse_old(ctypes.CDLL(name))
    raise CompileError(
        "the CUDA compiler library NVRTC is not on this machine",
        hint="a CUDA build of torch brings it; otherwise: pip install nvidia-cuda-nvrtc",
    )


def _refuse_old(library: ctypes.CDLL) -> ctypes.CDLL:
    version = _version(library)
    if version < MIN_VERSION:
        raise CompileError(
            "NVRTC is version {}.{}, but {}.{} or newer is needed".format(*version, *MIN_VERSION),
            hint="use a torch build for a newer CUDA",
        )
    return library


def _packaged_libraries() -> list[Path]:
    """NVRTC in pip packages (nvidia/cu13/lib, nvidia/cuda_nvrtc/lib, torch/lib), the best first: the CUDA
    version torch was built for, because the driver is sure to take its binaries, then the newest."""
    import torch

    folders = [Path(torch.__file__).parent / "lib"]
    specification = importlib.util.find_spec("nvidia")
    if specification is not None:
        for root in specification.submodule_search_locations or ():
            folders += Path(root).glob("*/lib")
    preferred = (torch.version.cuda or "0").split(".")[0]
    ranked = []
    for path in (path for folder in folders for path in folder.glob("libnvrtc.so.*")):
        if version := re.fullmatch(r"libnvrtc\.so\.(\d+(?:\.\d+)*)", path.name):
            numbers = [int(number) for number in version[1].split(".")]
            ranked.append((numbers[0] == int(preferred), numbers, path))
    return [path for *_, path in sorted(ranked, reverse=True)]
