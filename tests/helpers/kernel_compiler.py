"""Compiles kernels for a GPU that is not here: launches on meta tensors stop after the compiler."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch


@dataclass(frozen=True)
class CompiledKernel:
    """name; key: equal for launches that one compilation serves; shapes: the constants the launch was made
    with; registers per thread; bytes of stack that each thread spills to; shared: bytes of shared memory;
    ptx: assembly text."""

    name: str
    key: str
    constants: dict[str, Any]
    num_warps: int
    num_registers: int
    stack_bytes: int
    shared_bytes: int
    ptx: str


class _Driver:
    """Answers what the compiler asks of a driver."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)
        # Compiled kernels are remembered by device.
        self._device = capability

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(capability: int = 90) -> Iterator[list[CompiledKernel]]:
    """Inside, a kernel launch only compiles, for the compute capability (90: Hopper), and adds to a list."""
    import triton
    from triton.runtime.jit import JITFunction

    compiled: list[CompiledKernel] = []

    def launch(function: Any, grid: Any) -> Any:
        def compile_only(*args: Any, **options: Any) -> None:
            kernel = function.run(*args, grid=grid, warmup=True, **options)
            compiled.append(_describe(function.__name__, kernel, options))

        return compile_only

    previous = triton.runtime.driver._active
    triton.runtime.driver.set_active(_Driver(capability))
    try:
        with (
            mock.patch.object(JITFunction, "__getitem__", launch),
            mock.patch.object(torch.Tensor, "is_cuda", True),
        ):
            yield compiled
    finally:
        triton.runtime.driver._active = previous


def _describe(name: str, kernel: Any, options: dict[str, Any]) -> CompiledKernel:
    registers, stack = _resources(kernel.asm["cubin"])
    return CompiledKernel(
        name=name,
        key=kernel.hash,
        constants={key: value for key, value in options.items() if key.isupper()},
        num_warps=options["num_warps"],
        num_registers=registers,
        stack_bytes=stack,
        shared_bytes=kernel.metadata.shared,
        ptx=kernel.asm["ptx"],
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def missing_tools() -> str | None:
    """Why kernels cannot be compiled here, or None."""
    try:
        import triton
    except ImportError:
        return "Triton is not installed"
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return None if (tools / "ptxas").exists() and (tools / "cuobjdump").exists() else "Triton lacks ptxas"


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def decode_chain(
    rows: int, dtype: torch.dtype = torch.bfloat16, *, use_pdl: bool = True, **changes: int
) -> None:
    """Launch a decode step of Llama-3.2-1B's shape, two layers, for `rows` sequences."""
    from tiny_vllm.kernels.slot_inputs import SlotState
    from tiny_vllm.models.decode_chain import DecodeChain
    from tiny_vllm.models.spec import ModelSpec, RopeSpec
    from tiny_vllm.models.weights import LayerWeights, ModelWeights

    shape = dict(hidden=2048, heads=32, kv_heads=8, head_dim=64, intermediate=8192, vocab=128256, page=16)
    shape.update(changes)
    hidden, head_dim, vocab = shape["hidden"], shape["head_dim"], shape["vocab"]
    qkv_size = (shape["heads"] + 2 * shape["kv_heads"]) * head_dim
    layer = LayerWeights(
        input_norm=meta(hidden, dtype=torch.float32),
        qkv=meta(qkv_size, hidden, dtype=dtype),
        output=meta(hidden, shape["heads"] * head_dim, dtype=dtype),
        post_attention_norm=meta(hidden, dtype=torch.float32),
        gate_up=meta(2 * shape["intermediate"], hidden, dtype=dtype),
        down=meta(hidden, shape["intermediate"], dtype=dtype),
    )
    table = meta(vocab, hidden, dtype=dtype)
    cache = meta(100, shape["kv_heads"], shape["page"], head_dim, dtype=dtype)
    spec = ModelSpec(
        family="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=shape["intermediate"],
        num_layers=2,
        num_heads=shape["heads"],
        num_kv_heads=shape["kv_heads"],
        head_dim=head_dim,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope=RopeSpec(theta=1e4, rotary_dim=head_dim),
    )
    chain = DecodeChain(
        spec,
        ModelWeights(table, [layer, layer], meta(hidden, dtype=torch.float32), table),
        meta(4096, head_dim, dtype=torch.float32),
        SimpleNamespace(page_size=shape["page"], layers=[(cache, cache)] * 2),  # type: ignore[arg-type]
        use_pdl=use_pdl,
    )
    column = meta(64, dtype=torch.int64)
    state = SlotState(meta(64, 4096 // shape["page"], dtype=torch.int64), *([column] * 4))
    chain.step(state, meta(rows, dtype=torch.int64), meta(64, dtype=torch.float32))
