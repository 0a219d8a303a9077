"""A step's tokens from the GPU to page-locked memory of the host.

    target[i] = source[i]

Both int64 [N], contiguous. A kernel stores to the host's memory by itself; the copy engine, which has to be
asked and waited for, kept an H200's multiprocessors idle for some 10 us between two steps.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from torch import Tensor

from tiny_vllm.kernels.triton_support import ceil_div, jit, runs_triton, tl, with_fallback

BLOCK = 256


def write_out_ref(source: Tensor, target: Tensor) -> None:
    target.copy_(source, non_blocking=True)


@jit(do_not_specialize=("source_ptr", "target_ptr", "count"))
def _write_out_kernel(source_ptr, target_ptr, count, BLOCK: tl.constexpr):
    """Grid (N / BLOCK,)."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + place, tl.load(source_ptr + place, mask=place < count), mask=place < count)


@with_fallback(write_out_ref)
def _launch_write_out(source: Tensor, target: Tensor) -> None:
    count = len(source)
    _write_out_kernel[(ceil_div(count, BLOCK),)](source, target, count, BLOCK=BLOCK, num_warps=4)


def write_out(source: Tensor, target: Tensor) -> None:
    """Does not wait. target: on source's device or, on a GPU, in page-locked memory; complete once the stream
    has come so far."""
    op = _launch_write_out if runs_triton(source) else write_out_ref
    op(source, target)
