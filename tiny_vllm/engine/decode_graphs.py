"""Decode steps on a GPU as CUDA graphs: from the slots' last tokens to their next ones in one replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiny_vllm.kernels.slot_inputs import SlotState
from tiny_vllm.kernels.write_out import write_out
from tiny_vllm.models.decode_chain import DecodeChain

MIN_CONTEXT_BUCKET = 1024
# Up to the first number of rows in powers of two, beyond in steps: (most rows, step). A padding row costs
# attention, where that does not skip it, as much as some hundred tokens, and products of more than a hundred
# rows their arithmetic.
POWERS_OF_TWO = 32
STEPS = ((256, 32), (1 << 40, 64))


def row_bucket(num_rows: int) -> int:
    """Rows of the graph that serves a step of so many."""
    if num_rows <= POWERS_OF_TWO:
        return 1 << (num_rows - 1).bit_length()
    step = next(step for most, step in STEPS if num_rows <= most)
    return -(-num_rows // step) * step


@dataclass(frozen=True, slots=True)
class _Graph:
    """result is what a replay writes."""

    graph: torch.cuda.CUDAGraph
    result: Tensor


@dataclass(slots=True)
class _PaddedSlots:
    """What the graphs of one number of rows read: [rows] int64. source: the slots that stand in it."""

    tensor: Tensor
    source: Tensor | None = None


class DecodeGraphs:
    """One graph per number of rows, rounded up by `row_bucket`, and longest context, rounded up to a power of
    two, and per kind: with the draw, or logits alone. Captured when first needed, so that starting costs
    nothing; rows beyond a step's own are padding. A `DecodeStepper`.

    state: columns of the slot tables; temperature: [slots] FP32. capture: False runs the same kernels one by
    one (enforce_eager).
    """

    def __init__(self, chain: DecodeChain, state: SlotState, temperature: Tensor, *, capture: bool) -> None:
        self._chain = chain
        self._state = state
        self._temperature = temperature
        self._capture = capture
        self._num_slots = temperature.shape[0]
        self._graphs: dict[tuple[int, int, bool], _Graph] = {}
        self._padded: dict[int, _PaddedSlots] = {}
        self._pool: Any = None

    @property
    def max_rows(self) -> int:
        return self._num_slots

    def draw(self, slots: Tensor, max_context_len: int, tokens: Tensor) -> None:
        result = self._run(slots, max_context_len, with_draw=True)
        write_out(result[: slots.shape[0]], tokens)

    def logits(self, slots: Tensor, max_context_len: int) -> Tensor:
        return self._run(slots, max_context_len, with_draw=False)[: slots.shape[0]]

    def _run(self, slots: Tensor, max_context_len: int, *, with_draw: bool) -> Tensor:
        num_rows = row_bucket(slots.shape[0])
        context = max(MIN_CONTEXT_BUCKET, 1 << (max_context_len - 1).bit_length())
        padded = self._pad(slots, num_rows)
        if not self._capture:
            return self._step(padded, context, with_draw)
        key = (num_rows, context, with_draw)
        if key not in self._graphs:
            self._graphs[key] = self._record(*key)
            padded = self._pad(slots, num_rows)
        graph = self._graphs[key]
        graph.graph.replay()
        return graph.result

    def _pad(self, slots: Tensor, num_rows: int) -> Tensor:
        padded = self._padded.get(num_rows)
        if padded is None:
            tensor = torch.full((num_rows,), self._num_slots, dtype=torch.int64, device=slots.device)
            padded = self._padded[num_rows] = _PaddedSlots(tensor)
        if padded.source is not slots:
            count = slots.shape[0]
            padded.tensor[:count].copy_(slots)
            padded.tensor[count:].fill_(self._num_slots)
            padded.source = slots
        return padded.tensor

    def _step(self, slots: Tensor, context: int, with_draw: bool) -> Tensor:
        if with_draw:
            return self._chain.step(self._state, slots, self._temperature, max_context_len=context)
        return self._chain.logits(self._state, slots, max_context_len=context)

    def _record(self, num_rows: int, context: int, with_draw: bool) -> _Graph:
        # Padding alone: compiling and capturing must not advance anybody.
        padded = self._padded[num_rows]
        padded.tensor.fill_(self._num_slots)
        padded.source = None
        self._step(padded.tensor, context, with_draw)
        torch.cuda.synchronize()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # One graph runs at a time and its result is copied before the next replay: they share their memory.
        # What another engine's thread does meanwhile is not this capture's business.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = self._step(padded.tensor, context, with_draw)
        return _Graph(graph, result)
