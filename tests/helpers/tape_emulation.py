"""Runs the weight-tape kernel on the CPU, see tape_emulator.h, for a model of few small layers."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.helpers.emulator import load_emulator
from tiny_vllm.kernels.slot_inputs import SlotState
from tiny_vllm.kernels.weight_tape import layout as tape_layout
from tiny_vllm.kernels.weight_tape import pack
from tiny_vllm.kernels.weight_tape.layout import TapeLayout, TapeShape, plan_block
from tiny_vllm.kernels.weight_tape.pack import TapeMatrices, pack_tape
from tiny_vllm.kernels.weight_tape.step import NUM_THREADS, TapeModel, TapeStep, _Params, macros, source

HERE = Path(__file__).parent
NUM_BLOCKS = 8
# fmt: off
INSTRUCTIONS = (
    "shared_address", "now_ns", "barrier_init", "barrier_expect", "barrier_arrive", "barrier_try",
    "barrier_wait", "copy_bulk", "consumers_sync", "load_words4", "load_pair", "store_pair", "store_half",
    "has_nan", "pack_bf16", "multiply_pair", "exp2_fast", "multiply_add", "transpose8", "prefetch_l2",
)
# fmt: on


def _emulated_source(mistake: tuple[str, str] | None) -> str:
    """The kernel's source without what only the device can do."""
    text = source()
    if mistake is not None:
        assert text.count(mistake[0]) == 1, f"not once in the kernel: {mistake[0]}"
        text = text.replace(*mistake)
    for name in INSTRUCTIONS:
        # Of overloaded functions, that whose body is an instruction.
        found = [
            part.group(0)
            for part in re.finditer(rf"(?m)^DEV [\w ]+ {name}\((?:[^\n]*\}}\n|.*?^\}}\n)", text, re.S)
            if "asm" in part.group(0) or name in ("shared_address", "barrier_wait")
        ]
        assert len(found) == 1, f"{name}: {len(found)} definitions"
        text = text.replace(found[0], "")
    text = re.sub(r"(?m)^struct Watch \{.*?^\};\n", "", text, flags=re.S)
    text = re.sub(
        r'asm volatile\("bar\.(\w+) (\d), (\d+);" ::: "memory"\);', r"emulated::named_\1(\2, \3);", text
    )
    text = re.sub(r'asm volatile\("fence\.[\w.:]+;" ::: "memory"\);', "", text)
    text = re.sub(r'asm volatile\("mov\.u32 %0, %%tid\.x;" : "=r"\((\w+)\)\);', r"\1 = threadIdx.x;", text)
    text = re.sub(r'asm volatile\("mov\.u32 %0, %%ctaid\.x;" : "=r"\((\w+)\)\);', r"\1 = blockIdx.x;", text)
    text = re.sub(r'asm volatile\("createpolicy[^;]*;" : "=l"\(policy\)\);', "policy = 0;", text)
    text = re.sub(r"extern __shared__ [^;]*;", "u8* const memory = emulated::memory();", text)
    left = [line for line in text.splitlines() if re.search(r"\basm\b", line.split("//")[0])]
    assert not left, f"not emulated: {left}"
    return text


@functools.cache
def _library(defines: tuple[tuple[str, int | str], ...], mistake: tuple[str, str] | None) -> ctypes.CDLL:
    parts = [
        (HERE / name).read_text(encoding="utf-8") for name in ("tape_emulator.h", "tape_emulator_entry.h")
    ]
    parts.insert(1, _emulated_source(mistake))
    return load_emulator("\n".join(parts), dict(defines), _Params)


@dataclass(frozen=True)
class Launch:
    """Stands in for a prepared launch: a step's parameters are in `parameters`."""

    parameters: ctypes.Structure
    library: ctypes.CDLL
    shared_bytes: int
    seed: int

    def launch(self) -> None:
        problem = self.library.run_emulated(ctypes.byref(self.parameters), self.shared_bytes, self.seed)
        if problem:
            raise RuntimeError(problem.decode())


@dataclass(frozen=True)
class Function:
    """Stands in for a loaded kernel."""

    library: ctypes.CDLL
    shared_bytes: int
    seed: int

    def prepare(self, arguments: tuple[ctypes.Structure], **_: Any) -> Launch:
        return Launch(arguments[0], self.library, self.shared_bytes, self.seed)


class EmulatedModel:
    """A random Llama of two layers, with pages of `num_slots` contexts of up to `max_len` tokens.

    Page 0 and the last page are NaN; entries of the page table behind a context lead to the last one.
    """

    def __init__(self, *, head_dim: int, page_size: int, num_slots: int, max_len: int) -> None:
        self.shape = TapeShape(
            hidden_size=256, intermediate_size=256, num_layers=2, num_heads=4, num_kv_heads=2,
            head_dim=head_dim, vocab_size=200, page_size=page_size,
        )  # fmt: skip
        shape = self.shape
        torch.manual_seed(1)

        def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(rows, columns) * columns**-0.5 * scale).to(torch.bfloat16)

        hidden, inner = shape.hidden_size, shape.intermediate_size
        self.layers = [
            TapeMatrices(
                # Large queries and keys: few positions count, and each is noticed.
                matrix(shape.qkv_size, hidden, 2.0), matrix(hidden, shape.q_size), matrix(2 * inner, hidden),
                matrix(hidden, inner),
            )
            for _ in range(shape.num_layers)
        ]  # fmt: skip
        self.lm_head = matrix(shape.vocab_size, hidden, 2.0)
        self.embedding = matrix(shape.vocab_size, hidden, 16.0)
        self.norms = (1 + 0.1 * torch.randn(2 * shape.num_layers + 1, hidden)).to(torch.bfloat16)
        angles = torch.outer(torch.arange(max_len), 1e4 ** (-torch.arange(0, head_dim, 2) / head_dim))
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), 1).float().contiguous()
        pages_per_slot = -(-max_len // page_size)
        num_pages = num_slots * pages_per_slot + 2
        self.k_cache, self.v_cache = torch.randn(
            2, shape.num_layers, num_pages, shape.num_kv_heads, page_size, head_dim
        ).to(torch.bfloat16)
        self.pages = (torch.randperm(num_pages - 2) + 1).view(num_slots, -1)
        self.last_page = num_pages - 1

    def step(
        self,
        positions: list[int],
        *,
        num_rows: int,
        changes: Mapping[str, int | str] | None = None,
        direct_limit: int = 0,
        kv_stream_limit: int = 0,
        kv_window: int = 3,
        seed: int = 0,
        mistake: tuple[str, str] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [rows, vocab] of slots 0, 1, ... at these positions; rows without one are padding. The
        caches after the step. changes: of macros. mistake: a text of the kernel and what to put there.

        Raises RuntimeError when a rule of the device is broken."""
        num_slots = self.pages.shape[0]
        k_cache, v_cache, table = self.k_cache.clone(), self.v_cache.clone(), self.pages.clone()
        for cache in (k_cache, v_cache):
            cache[:, 0] = cache[:, -1] = torch.nan
            for slot, position in enumerate(positions):
                page, offset = divmod(position, self.shape.page_size)
                cache[:, table[slot, page], :, offset:] = torch.nan
        for slot, position in enumerate(positions):
            table[slot, position // self.shape.page_size + 1 :] = self.last_page
        zeros = torch.zeros(num_slots, dtype=torch.int64)
        state = SlotState(table, zeros.clone(), zeros.clone(), zeros.clone(), zeros.clone())
        state.computed_len[: len(positions)] = torch.tensor(positions)
        state.last_token[: len(positions)] = torch.arange(len(positions)) + 7
        with (
            mock.patch.object(tape_layout, "NUM_BLOCKS", NUM_BLOCKS),
            mock.patch.object(pack, "NUM_BLOCKS", NUM_BLOCKS),
        ):
            layout = TapeLayout.of(self.shape)
            plan = plan_block(layout, num_rows)
            assert plan is not None
            defines = {**macros(layout, num_rows), "NUM_THREADS": NUM_THREADS, **(changes or {})}
            function = Function(_library(tuple(defines.items()), mistake), plan.shared_bytes, seed)
            model = TapeModel(
                layout,
                tape=pack_tape(layout, self.layers, self.lm_head),
                norms=self.norms,
                embedding=self.embedding,
                cos_sin=self.cos_sin,
                k_cache=k_cache,
                v_cache=v_cache,
                rms_norm_eps=1e-5,
                scale=self.shape.head_dim**-0.5,
            )
            step = TapeStep(function, model, state, torch.zeros(num_slots), num_rows)  # type: ignore[arg-type]
        step.slots[: len(positions)] = torch.arange(len(positions))
        step.set_tuning(direct_limit=direct_limit, kv_stream_limit=kv_stream_limit, kv_window=kv_window)
        step.logits.fill_(torch.nan)
        step.compute_logits()
        return step.logits, k_cache, v_cache

    def reference(self, slot: int, position: int) -> Tensor:
        """Logits [vocab] in FP32."""
        shape, half = self.shape, self.shape.head_dim // 2
        cos, sin = self.cos_sin[position].split(half)

        def rms(x: Tensor, weight: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean() + 1e-5) * weight.float()

        def rotate(x: Tensor) -> Tensor:
            a, b = x[..., :half], x[..., half:]
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        x = self.embedding[slot + 7].float()
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv.float() @ rms(x, self.norms[2 * index])
            kv_size = shape.num_kv_heads * shape.head_dim
            q, k, v = (t.view(-1, shape.head_dim) for t in qkv.split([shape.q_size, kv_size, kv_size]))
            past = [
                cache[index, self.pages[slot]].transpose(1, 2).flatten(0, 1)[:position].float()
                for cache in (self.k_cache, self.v_cache)
            ]
            k_all = torch.cat((past[0], rotate(k)[None])).repeat_interleave(shape.group, 1)
            v_all = torch.cat((past[1], v[None])).repeat_interleave(shape.group, 1)
            scores = torch.einsum("hd,thd->ht", rotate(q), k_all) * shape.head_dim**-0.5
            x = x + layer.output.float() @ torch.einsum("ht,thd->hd", scores.softmax(-1), v_all).flatten()
            gate, up = (layer.gate_up.float() @ rms(x, self.norms[2 * index + 1])).chunk(2)
            x = x + layer.down.float() @ (torch.nn.functional.silu(gate) * up)
        return self.lm_head.float() @ rms(x, self.norms[-1])
