"""Small steps with prompts on a GPU as CUDA graphs: one replay in place of some ten launches a layer.

A step of up to MAX_ROWS tokens is padded to one of few shapes, so that a graph recorded for a shape serves
every step that fits it. The padding computes with the null page and is read by nobody. Everything that a
replay reads of the host is one packed tensor.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiny_vllm.engine.batch import BatchShape, build_batch
from tiny_vllm.engine.plan import StepPlan
from tiny_vllm.engine.slot_table import SlotTable
from tiny_vllm.models.decoder import Decoder
from tiny_vllm.models.kv_cache import KVCache

# Rows of a step. Products work through tiles of 128 rows; below, they take as long as reading the weights.
ROW_BUCKETS = (64, 128, 256, 384, 512, 640, 768, 896, 1024)
MAX_ROWS = ROW_BUCKETS[-1]
# Spare sequences cost little, and every size less is a graph less.
DECODE_BUCKETS = (0, 4, 16, 64, 256)
CHUNK_BUCKETS = (4, 16, 64, 256, 1024)
# Chunks whose last rows alone go through the last layer, as decodes do: attention splits their contexts for
# the longest that a page table has room for, and 1,024 of 131,072 tokens would leave half a GB of parts.
MOST_ENDS = 64
# Tokens that the page tables of decodes have room for, times 4 until they suffice: into how many parts
# attention splits contexts depends on it.
MIN_CONTEXT_BUCKET = 1024
# Recording takes about as long as some steps lose without a graph: who waits until as much has been lost
# never pays more than twice what was needed. And a graph takes memory for its launches.
RECORD_AT = 4
MAX_GRAPHS = 128

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Makes a replay of what the function launches. It may run the function, more than once."""


class GraphRecorder:
    """A `Record` for CUDA graphs that share their memory: one of them runs at a time, and what it leaves for
    others lies elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream(self._stream.device)
        # First by itself, where it is recorded: kernels are compiled, and what they keep per stream is made.
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        graph = torch.cuda.CUDAGraph()
        # What another engine's thread does meanwhile is not this recording's business.
        recording = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        # The first context restores the stream, also where the second one fails to.
        with torch.cuda.stream(current), recording:
            run()
        return graph.replay


class _PaddedStep:
    """One shape: a forward pass of what lies in `packed`, into the first rows of `hidden`."""

    def __init__(
        self, shape: BatchShape, decoder: Decoder, kv_cache: KVCache, table: SlotTable, hidden: Tensor
    ) -> None:
        self._shape = shape
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._table = table
        self._hidden = hidden
        self.packed = hidden.new_zeros(sum(shape.parts), dtype=torch.int64)

    def fill_with_padding(self) -> None:
        slots, *_, chunk_slots, _, context_lens = self.packed.split(self._shape.parts)
        self.packed.zero_()
        slots.fill_(self._table.padding_slot)
        chunk_slots.fill_(self._table.padding_slot)
        context_lens.fill_(1)

    def run(self) -> None:
        batch = build_batch(self.packed, self._shape, self._table, self._kv_cache.page_size, is_padded=True)
        self._hidden.copy_(self._decoder.forward(batch, self._kv_cache))


@dataclass(frozen=True, slots=True)
class _Replay:
    """run: computes what lies in `packed`."""

    packed: Tensor
    run: Callable[[], None]


class ForwardGraphs:
    """A graph per shape of small steps with prompts.

    record: see `Record`. Once it fails, no more shapes are recorded. record_at: a shape is recorded when it
    comes for this time; before, its steps run as they are.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        table: SlotTable,
        record: Record,
        *,
        record_at: int = RECORD_AT,
    ) -> None:
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._table = table
        self._record: Record | None = record
        self._record_at = record_at
        self._occurrences: Counter[BatchShape] = Counter()
        self._replays: dict[BatchShape, _Replay] = {}
        self._hidden: Tensor | None = None

    def choose_shape(self, plan: StepPlan) -> BatchShape | None:
        """What to pad the step to for `forward`; None where it is to run as it is."""
        if not plan.chunks:
            return None
        shape = self._pad(BatchShape.of(plan, self._table))
        if shape is None or shape in self._replays:
            return shape
        self._occurrences[shape] += 1
        is_due = self._occurrences[shape] >= self._record_at and len(self._replays) < MAX_GRAPHS
        return shape if self._record is not None and is_due else None

    @torch.inference_mode()
    def forward(self, shape: BatchShape, packed: Tensor) -> Tensor:
        """The decoder's hidden states, [shape.num_outputs, hidden], valid until the next call.

        packed: of `pack_batch` for this shape, on the device.
        """
        replay = self._replays.get(shape)
        if replay is None:
            replay = self._make(shape)
        replay.packed.copy_(packed)
        replay.run()
        assert self._hidden is not None
        return self._hidden[: shape.num_outputs]

    def _pad(self, shape: BatchShape) -> BatchShape | None:
        num_decodes = _round_up(shape.num_decodes, DECODE_BUCKETS)
        num_chunks = _round_up(shape.num_chunks, CHUNK_BUCKETS)
        if num_decodes is None or num_chunks is None:
            return None
        num_rows = _round_up(num_decodes + shape.num_tokens, ROW_BUCKETS)
        if num_rows is None:
            return None
        widest = self._table.all_page_table.shape[1]
        width = 0
        if num_decodes:
            width = -(-MIN_CONTEXT_BUCKET // self._kv_cache.page_size)
            while width < shape.decode_width:
                width *= 4
        ends_only = shape.ends_only and num_chunks <= MOST_ENDS
        num_tokens = num_rows - num_decodes
        return BatchShape(num_decodes, num_tokens, num_chunks, min(width, widest), widest, ends_only)

    def _make(self, shape: BatchShape) -> _Replay:
        if self._hidden is None:
            embedding = self._decoder.embedding
            self._hidden = embedding.new_empty(MAX_ROWS, embedding.shape[1])
        hidden = self._hidden[: shape.num_outputs]
        step = _PaddedStep(shape, self._decoder, self._kv_cache, self._table, hidden)
        # Padding alone: nobody's pages may be written before their step.
        step.fill_with_padding()
        assert self._record is not None
        try:
            replay = self._replays[shape] = _Replay(step.packed, self._record(step.run))
        except RuntimeError as error:
            self._record = None
            warnings.warn(
                f"a step with prompts cannot be recorded as a CUDA graph; no more are ({str(error)[:300]})",
                RuntimeWarning,
                stacklevel=2,
            )
            return _Replay(step.packed, step.run)
        return replay


def _round_up(value: int, buckets: tuple[int, ...]) -> int | None:
    """The first bucket that holds the value; None if none does."""
    return next((bucket for bucket in buckets if bucket >= value), None)
