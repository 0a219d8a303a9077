"""Compiles a kernel's source, with what stands for the device, into a library of this process.

What was compiled is kept in build/emulated, which all test processes share and `make clean` removes:
neither they nor a later run compile it again. A folder's name tells everything that its library is made of.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
KEPT = HERE.parents[1] / "build" / "emulated"
# Inline variables of one name would be one variable in all libraries of the process, whatever their types.
KEPT_APART = "-fno-gnu-unique"
# Coroutines jump between stacks, which the checks of longjmp take for an error.
UNCHECKED = "-U_FORTIFY_SOURCE"
# The C++ of the kernels: with that of 2020 the standard library takes twice as long. -O2 runs no faster.
OPTIONS = ("-std=c++17", "-O1", "-w", "-fPIC", KEPT_APART, UNCHECKED)
STANDARD_LIBRARY = HERE / "standard_library.h"


class Written(ctypes.Structure):
    """`emulated::Written`: bytes of `source` that the preceding kernel writes to `target`."""

    _fields_ = (("target", ctypes.c_void_p), ("source", ctypes.c_void_p), ("bytes", ctypes.c_uint64))


def compile_library(text: str, macros: Mapping[str, int | str] | None = None) -> ctypes.CDLL:
    """text: C++ that may include the headers of this folder."""
    standard = STANDARD_LIBRARY.read_text(encoding="utf-8")
    header = _compile(["-x", "c++-header"], standard, f"{STANDARD_LIBRARY.name}.gch")
    # A compiled header that the compiler cannot use is read from this folder.
    folders = [f"-I{header.parent}", f"-I{HERE}", "-include", STANDARD_LIBRARY.name]
    defines = [f"-D{name}={value}" for name, value in (macros or {}).items()]
    options = ["-shared", *folders, *defines, "-x", "c++"]
    return ctypes.CDLL(str(_compile(options, text, "emulated.so", _headers())))


@functools.cache
def _headers() -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8") for path in sorted(HERE.glob("*.h")))


@functools.cache
def _compiler() -> str:
    return subprocess.run(["g++", "-v"], capture_output=True, text=True, check=True).stderr


def _compile(options: Sequence[str], text: str, name: str, included: Sequence[str] = ()) -> Path:
    """Where the compiler's result is, a file of that name."""
    # Lengths keep two different lists of parts from reading as the same text.
    parts = [_compiler(), *OPTIONS, *options, text, *included]
    key = hashlib.sha256("".join(f"{len(part)}:{part}" for part in parts).encode()).hexdigest()
    path = KEPT / key[:32] / name
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        source, result = Path(folder) / "source", Path(folder) / name
        source.write_text(text, encoding="utf-8")
        compiled = subprocess.run(
            ["g++", *OPTIONS, *options, str(source), "-o", str(result)], capture_output=True, text=True
        )
        assert compiled.returncode == 0, compiled.stderr[:4000]
        # Other processes see the whole of it or nothing.
        os.replace(result, path)
    return path


def load_emulator(text: str, macros: Mapping[str, int | str], params: type[ctypes.Structure]) -> ctypes.CDLL:
    """A library with run_emulated, which returns an empty text or what went wrong, and size_of_params.
    params: the kernel's argument."""
    library = compile_library(text, macros)
    library.run_emulated.restype = ctypes.c_char_p
    assert library.size_of_params() == ctypes.sizeof(params)
    return library
