"""What cannot be loaded is None, and is told once."""

from __future__ import annotations

from typing import Any

import pytest

from tiny_vllm.kernels.cuda.errors import CompileError, DriverError
from tiny_vllm.kernels.cuda.fallback import load_or_warn


def test_what_can_be_loaded_is_returned() -> None:
    function: Any = object()
    assert load_or_warn(lambda: function, "the kernel", "another") is function


def test_a_problem_is_told_once_for_a_kind_of_kernel() -> None:
    def refuse() -> Any:
        raise CompileError("NVRTC is not here")

    def refuse_otherwise() -> Any:
        raise DriverError("no driver")

    with pytest.warns(RuntimeWarning, match=r"^the kernel A cannot be .*: Triton \(.*NVRTC is not here\)$"):
        assert load_or_warn(refuse, "the kernel A", "Triton") is None
    # Warnings are errors.
    assert load_or_warn(refuse, "the kernel A", "Triton") is None
    with pytest.warns(RuntimeWarning, match="kernel B"):
        assert load_or_warn(refuse, "the kernel B", "Triton") is None
    with pytest.warns(RuntimeWarning, match="no driver"):
        assert load_or_warn(refuse_otherwise, "the kernel A", "Triton") is None


def test_other_errors_are_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        load_or_warn(lambda: 1 // 0, "the kernel", "another")  # type: ignore[arg-type, return-value]
