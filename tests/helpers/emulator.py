"""Compiles a kernel's source, with what stands for the device, into a library of this process."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
# Inline variables of one name would be one variable in all libraries of the process, whatever their types.
KEPT_APART = "-fno-gnu-unique"
# Coroutines jump between stacks, which the checks of longjmp take for an error.
UNCHECKED = "-U_FORTIFY_SOURCE"


class Written(ctypes.Structure):
    """`emulated::Written`: bytes of `source` that the preceding kernel writes to `target`."""

    _fields_ = (("target", ctypes.c_void_p), ("source", ctypes.c_void_p), ("bytes", ctypes.c_uint64))


def compile_library(
    text: str, macros: Mapping[str, int | str] | None = None, *, optimise: str = "-O1"
) -> ctypes.CDLL:
    """text: C++ that may include the headers of this folder."""
    options = [f"-D{name}={value}" for name, value in (macros or {}).items()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "emulated.so"
        compiled = subprocess.run(
            ["g++", "-std=c++20", optimise, "-w", "-shared", "-fPIC", KEPT_APART, UNCHECKED, f"-I{HERE}",
             "-x", "c++", "-", "-o", str(path), *options],
            input=text, capture_output=True, text=True,
        )  # fmt: skip
        assert compiled.returncode == 0, compiled.stderr[:4000]
        return ctypes.CDLL(str(path))


def load_emulator(
    text: str,
    macros: Mapping[str, int | str],
    params: type[ctypes.Structure],
    *,
    optimise: str = "-O1",
) -> ctypes.CDLL:
    """A library with run_emulated, which returns an empty text or what went wrong, and size_of_params.
    params: the kernel's argument."""
    library = compile_library(text, macros, optimise=optimise)
    library.run_emulated.restype = ctypes.c_char_p
    assert library.size_of_params() == ctypes.sizeof(params)
    return library
