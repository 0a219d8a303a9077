"""Decode steps on a GPU as CUDA graphs: from the slots' last tokens to their next ones in one replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiny_vllm.kernels.slot_inputs import SlotState
from tiny_vllm.models.decode_chain import ChainResult, DecodeChain

MIN_CONTEXT_BUCKET = 1024


@dataclass(frozen=True, slots=True)
class _Graph:
    """slots [rows] int64 is what a replay reads; result is what it writes."""

    graph: torch.cuda.CUDAGraph
    slots: Tensor
    result: ChainResult | Tensor


class DecodeGraphs:
    """One graph per number of rows and longest context, both rounded up to powers of two, and per kind: with
    the draw, or logits alone. Captured when first needed, so that starting costs nothing; rows beyond a
    step's own are padding.

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
        self._pool: Any = None

    def draw(self, slots: Sequence[int], max_context_len: int) -> tuple[list[int], list[bool]]:
        """Next tokens of these slots, written to the state, and whether each row's logits were usable.

        max_context_len: at least the longest context of the step, this step's tokens included.
        """
        result = self._run(slots, max_context_len, with_draw=True)
        assert isinstance(result, ChainResult)
        both = torch.stack((result.tokens, result.is_valid.long()))[:, : len(slots)].tolist()
        return both[0], [bool(valid) for valid in both[1]]

    def logits(self, slots: Sequence[int], max_context_len: int) -> Tensor:
        """FP32 [len(slots), vocab]; the state stays as it is. Valid until the next call."""
        result = self._run(slots, max_context_len, with_draw=False)
        assert isinstance(result, Tensor)
        return result[: len(slots)]

    def _run(self, slots: Sequence[int], max_context_len: int, *, with_draw: bool) -> ChainResult | Tensor:
        num_rows = 1 << (len(slots) - 1).bit_length()
        context = max(MIN_CONTEXT_BUCKET, 1 << (max_context_len - 1).bit_length())
        padded = torch.tensor([*slots] + [self._num_slots] * (num_rows - len(slots)), dtype=torch.int64)
        if not self._capture:
            return self._step(padded.to(self._temperature.device), context, with_draw)
        key = (num_rows, context, with_draw)
        if key not in self._graphs:
            self._graphs[key] = self._record(*key)
        graph = self._graphs[key]
        graph.slots.copy_(padded)
        graph.graph.replay()
        return graph.result

    def _step(self, slots: Tensor, context: int, with_draw: bool) -> ChainResult | Tensor:
        if with_draw:
            return self._chain.step(self._state, slots, self._temperature, max_context_len=context)
        return self._chain.logits(self._state, slots, max_context_len=context)

    def _record(self, num_rows: int, context: int, with_draw: bool) -> _Graph:
        # Padding alone: compiling and capturing must not advance anybody.
        slots = torch.full((num_rows,), self._num_slots, dtype=torch.int64, device=self._temperature.device)
        self._step(slots, context, with_draw)
        torch.cuda.synchronize()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # One graph runs at a time and its result is read before the next replay, so they share their memory.
        with torch.cuda.graph(graph, pool=self._pool):
            result = self._step(slots, context, with_draw)
        return _Graph(graph, slots, result)
