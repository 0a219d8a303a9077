"""The fused decode step as an object: its tape, its buffers, its threads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tiny_vllm.kernels.cpu_decode import MAX_ROWS
from tiny_vllm.kernels.cpu_decode.pool import Pool
from tiny_vllm.kernels.cpu_decode.step import (
    MAX_CHUNKS,
    MIN_CHUNK,
    Batch,
    Buffers,
    Head,
    Shape,
    Weights,
    decode_head,
    decode_step,
)
from tiny_vllm.kernels.cpu_decode.tape import (
    BLOCK,
    GROUP,
    Array,
    allocate,
    pack,
    padded,
    pair_gate_up,
    pair_rows,
    values_view,
)


class CPUDecode:
    """Hidden states of one new token for each of up to MAX_ROWS sequences.

    Layers are given one by one to `add_layer`, then `compile` is called, then `__call__` as often as
    wanted, by one thread at a time. embedding: [vocab, hidden], BF16 or FP32, kept by reference. cos_sin: see
    `rope_table`. The threads are torch.get_num_threads() at the time of each call.
    """

    def __init__(
        self,
        *,
        intermediate_size: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        embedding: Tensor,
        cos_sin: Tensor,
    ) -> None:
        hidden_size = embedding.shape[1]
        self._dtype = embedding.dtype
        self._shape = Shape(
            hidden=hidden_size,
            intermediate=intermediate_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rotary_dim=cos_sin.shape[1],
            page_size=0,
            eps=np.float32(eps),
            scale=np.float32(head_dim**-0.5),
        )
        q_size = num_heads * head_dim
        self._qkv_size = q_size + 2 * num_kv_heads * head_dim
        gate_up_rows = 2 * (-(-intermediate_size // GROUP) * GROUP)
        layer_rows = padded(self._qkv_size) + 2 * padded(hidden_size) + gate_up_rows
        layer_values = (padded(self._qkv_size) + gate_up_rows) * hidden_size
        layer_values += padded(hidden_size) * (q_size + intermediate_size)
        self._weights = Weights(
            tape=allocate(num_layers * layer_values, self._dtype),
            embedding=values_view(embedding).reshape(-1),
            norms=np.empty(2 * num_layers * hidden_size, np.float32),
            biases=np.zeros(num_layers * layer_rows, np.float32),
            cos_sin=values_view(cos_sin.float().contiguous()).reshape(-1),
        )
        self._head: Head | None = None
        self._tape_len = self._biases_len = self._norms_len = 0
        self._max_chunk = max(MIN_CHUNK, -(-cos_sin.shape[0] // MAX_CHUNKS))
        self._buffers: Buffers | None = None
        self._pool = Pool()

    @property
    def tape_bytes(self) -> int:
        return self._weights.tape.nbytes

    def add_layer(
        self,
        norms: tuple[Tensor, Tensor],
        qkv: Tensor,
        output: Tensor,
        gate_up: Tensor,
        down: Tensor,
        biases: Sequence[Tensor | None],
    ) -> None:
        """Copy the next layer's weights. Matrices [out, in], of the embedding's type; biases likewise."""
        for norm in norms:
            end = self._norms_len + len(norm)
            self._weights.norms[self._norms_len : end] = values_view(norm.float())
            self._norms_len = end
        matrices = (qkv, output, gate_up, down)
        for position, (matrix, bias) in enumerate(zip(matrices, biases, strict=True)):
            assert matrix.dtype == self._dtype
            pair = pair_gate_up if position == 2 else pair_rows
            first, second = pair(matrix)
            end = self._tape_len + 2 * first.numel()
            pack((first, second), self._weights.tape[self._tape_len : end])
            self._tape_len = end
            num_rows = first.shape[0] * BLOCK
            if bias is not None:
                values = torch.cat(pair(bias.float()), -1).flatten()
                self._weights.biases[self._biases_len : self._biases_len + num_rows] = values_view(values)
            self._biases_len += num_rows

    def set_head(self, norm: Tensor, lm_head: Tensor) -> None:
        """Copy the final norm [hidden] and the LM head [vocab, hidden]."""
        groups = pair_rows(lm_head)
        tape = allocate(2 * groups[0].numel(), self._dtype)
        pack(groups, tape)
        zeros = np.zeros(padded(len(lm_head)), np.float32)
        self._vocab_size = len(lm_head)
        self._head = Head(tape, values_view(norm.float()).copy(), zeros)

    def compile(self) -> None:
        """Compile, or read from numba's cache, by a step of no sequences. Call after the last layer."""
        assert self._tape_len == self._weights.tape.size and self._norms_len == self._weights.norms.size
        none = torch.empty(0, dtype=torch.int64)
        shape = (self._shape.num_layers, 1, self._shape.num_kv_heads, 1, self._shape.head_dim)
        cache = torch.zeros(shape, dtype=self._dtype)
        self(none, none, none, none, none.view(0, 1), cache, cache)
        self.logits(torch.zeros(1, self._shape.hidden, dtype=self._dtype))

    def close(self) -> None:
        """End the threads."""
        self._pool.close()

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        cells: Tensor,
        context_lens: Tensor,
        page_table: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> Tensor:
        """Write keys and values of the new tokens to their cells; return [B, hidden], before the final norm.

        token_ids, positions, cells, context_lens: [B] int64, B <= MAX_ROWS. page_table: [B, W] int64.
        k_cache, v_cache: [layers, num_pages, Hkv, page_size, D].
        """
        num_rows = len(token_ids)
        shape = self._shape._replace(page_size=k_cache.shape[3])
        assert num_rows <= MAX_ROWS and page_table.shape[0] == num_rows
        assert len(positions) == len(cells) == len(context_lens) == num_rows
        assert k_cache.shape == v_cache.shape and k_cache.dtype == v_cache.dtype == self._dtype
        assert k_cache.shape[0] == shape.num_layers and k_cache.shape[2] == shape.num_kv_heads
        assert k_cache.shape[4] == shape.head_dim
        batch = Batch(
            token_ids=token_ids.numpy(),
            positions=positions.numpy(),
            cells=cells.numpy(),
            context_lens=context_lens.numpy(),
            page_table=page_table.contiguous().numpy(),
            k_cache=values_view(k_cache).reshape(-1),
            v_cache=values_view(v_cache).reshape(-1),
        )
        hidden = torch.empty(num_rows, shape.hidden, dtype=self._dtype)
        out = values_view(hidden).reshape(-1)
        buffers = self._thread_buffers()
        self._pool.run(buffers.num_threads, decode_step, shape, self._weights, batch, buffers, out)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden], 0 < N <= MAX_ROWS, before the final norm -> FP32 [N, vocab]."""
        assert self._head is not None and 0 < len(hidden) <= MAX_ROWS
        assert hidden.shape[1] == self._shape.hidden and hidden.dtype == self._dtype
        logits = torch.empty(len(hidden), self._vocab_size)
        rows = values_view(hidden.contiguous()).reshape(-1)
        out = values_view(logits).reshape(-1)
        buffers = self._thread_buffers()
        self._pool.run(buffers.num_threads, decode_head, self._shape, self._head, rows, buffers, out)
        return logits

    def _thread_buffers(self) -> Buffers:
        num_threads = torch.get_num_threads()
        if self._buffers is None or self._buffers.num_threads != num_threads:
            self._buffers = self._allocate_buffers(num_threads)
        return self._buffers

    def _allocate_buffers(self, num_threads: int) -> Buffers:
        shape = self._shape
        q_size = shape.num_heads * shape.head_dim
        group = shape.num_heads // shape.num_kv_heads
        pieces = MAX_ROWS * MAX_CHUNKS * shape.num_heads

        def floats(*sizes: int) -> Array:
            return np.zeros(int(np.prod(sizes)), np.float32)

        return Buffers(
            num_threads=num_threads,
            x=floats(MAX_ROWS, shape.hidden),
            qkv=floats(MAX_ROWS, self._qkv_size),
            partial=floats(pieces, shape.head_dim),
            partial_stats=floats(pieces, 2),
            activations=floats(MAX_ROWS, shape.intermediate),
            inputs=floats(num_threads, MAX_ROWS, max(shape.hidden, q_size)),
            queries=floats(num_threads, group, shape.head_dim),
            scores=floats(num_threads, group, self._max_chunk),
            dots=floats(num_threads, MAX_ROWS, BLOCK),
        )
