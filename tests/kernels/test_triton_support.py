"""What happens on machines where a kernel cannot run."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

from tiny_vllm.kernels.triton_support import HAS_TRITON, has_pdl, runs_triton, with_fallback

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from tiny_vllm.kernels.norm_linear import norm_linear
from tiny_vllm.models import decode_chain, decoder
from tiny_vllm.kernels.triton_support import HAS_TRITON
assert not HAS_TRITON
print(*norm_linear(torch.ones(2, 4), torch.ones(3, 4)).shape)
"""


def test_kernel_modules_import_and_compute_without_triton() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["2", "3"]


def test_cpu_tensors_use_the_references() -> None:
    assert not runs_triton(torch.ones(1))
    assert not has_pdl(torch.device("cpu"))


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_a_kernel_that_does_not_compile_warns_once_and_is_replaced_for_its_shapes_alone() -> None:
    from triton.runtime.errors import OutOfResources

    launches = []

    @with_fallback(lambda x: x + 1)
    def sometimes_broken(x: torch.Tensor) -> torch.Tensor:
        launches.append(len(x))
        if len(x) > 2:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return x + 2

    with pytest.warns(RuntimeWarning, match="sometimes_broken does not compile"):
        assert sometimes_broken(torch.zeros(3)).tolist() == [1, 1, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sometimes_broken(torch.zeros(3)).tolist() == [1, 1, 1]
        assert sometimes_broken(torch.zeros(4)).tolist() == [1, 1, 1, 1]
        assert sometimes_broken(torch.zeros(2)).tolist() == [2, 2]
    assert launches == [3, 4, 2]


def test_other_errors_are_not_hidden() -> None:
    @with_fallback(lambda x: x)
    def wrong(x: int) -> int:
        raise AssertionError("a mistake of the caller")

    if HAS_TRITON:
        with pytest.raises(AssertionError, match="a mistake of the caller"):
            wrong(1)
