"""These tests run on a GPU at real sizes or, with TRITON_INTERPRET=1, on the CPU at small ones.

All are marked `gpu`, because Triton decides how to run kernels when it is imported: the default run starts
them in processes of their own, see test_interpreted.py.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch

from tiny_vllm.kernels.triton_support import HAS_TRITON, INTERPRETED


@pytest.fixture(autouse=True)
def needs_kernels() -> None:
    if not HAS_TRITON or not (INTERPRETED or torch.cuda.is_available()):
        pytest.skip("needs Triton, and a GPU or TRITON_INTERPRET=1")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(autouse=True, scope="session")
def settings_of_the_interpreter() -> None:
    """Triton 3.6's interpreter converts arrays of one element to loop bounds in a way NumPy 2.4 refuses. And
    whenever a kernel calls a function, it looks through all of Triton's language for what it replaces, which
    took more than half of the time: here it looks once, and then only whether what it found is in place."""
    if not INTERPRETED:
        return
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    @functools.cache
    def names_of_builtins(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(package: Any, *interpretation: Any) -> None:
        for name in names_of_builtins(package):
            member = getattr(package, name)
            if is_builtin(member):
                interpreter._patch_attr(package, name, member, *interpretation)

    interpreter._patch_lang_tensor = patch
    interpreter._patch_builtin = patch_builtin
