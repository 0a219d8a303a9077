"""The decode step itself: what every thread of the pool runs, in numba.

All threads run the same function and split each phase by fixed ranges; between phases they meet at a barrier.
What one thread needs whole (the norm of a row, the combined attention) every thread computes for itself: that
costs less than another barrier. Every sum has one order, whatever the number of threads or rows.

Buffers between phases hold float32 numbers already rounded to the storage type, at the same points as the
plain path. Arrays are flat; their shapes are in `CPUDecoder`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numba import njit

from tiny_vllm.kernels.cpu_decode.intrinsics import (
    add_atomically,
    at,
    float_bits,
    float_from_bits,
    load_atomically,
    narrow,
    prefetch,
    put,
    wide,
    yield_core,
)
from tiny_vllm.kernels.cpu_decode.pool import ABORTED, ARRIVALS
from tiny_vllm.kernels.cpu_decode.products import add_scaled, dot, dots_1, dots_2, dots_4
from tiny_vllm.kernels.cpu_decode.tape import BLOCK, GROUP

MIN_CHUNK = 64
"""Context tokens attended as one piece of work, at least."""
MAX_CHUNKS = 32
"""Pieces of one sequence's context at most: longer contexts have longer pieces."""
SPINS_BEFORE_YIELD = 4000
LINES_AHEAD = 64
"""Cache lines of the next phase's weights asked for before waiting."""

# NaN and infinity mean what they mean; sums may be split over vector lanes, which fixes their order at
# compile time.
INNER = dict(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
FAST = {"contract", "reassoc", "nsz"}
ACCURATE = {"contract", "nsz"}


class Shape(NamedTuple):
    """Sizes of the model, in values."""

    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    page_size: int
    eps: np.float32
    scale: np.float32


class Weights(NamedTuple):
    """tape, embedding: uint16 (BF16 bits) or float32; the others float32."""

    tape: np.ndarray
    embedding: np.ndarray
    norms: np.ndarray
    biases: np.ndarray
    cos_sin: np.ndarray


class Head(NamedTuple):
    """The LM head: its tape, the final norm before it, and zeros for the biases it does not have."""

    tape: np.ndarray
    norm: np.ndarray
    biases: np.ndarray


class Batch(NamedTuple):
    """Rows of a ForwardBatch, int64, and the caches."""

    token_ids: np.ndarray
    positions: np.ndarray
    cells: np.ndarray
    context_lens: np.ndarray
    page_table: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray


class Buffers(NamedTuple):
    """Working memory, float32. The last four arrays have one part for each of num_threads threads."""

    num_threads: int
    x: np.ndarray
    qkv: np.ndarray
    partial: np.ndarray
    partial_stats: np.ndarray
    activations: np.ndarray
    inputs: np.ndarray
    queries: np.ndarray
    scores: np.ndarray
    dots: np.ndarray


@njit(fastmath=FAST, **INNER)
def rounded(array, value):
    """float32 value as it would read back from `array`."""
    return wide(narrow(array, value))


@njit(fastmath=FAST, **INNER)
def meet(control, target, tape, next_start, next_end):
    """Barrier: True when all threads have arrived, False when the run is aborted."""
    add_atomically(control, ARRIVALS, 1)
    step = 64 // tape.itemsize
    for line in range(min(LINES_AHEAD, (next_end - next_start) // step)):
        prefetch(tape, next_start + line * step)
    spins = 0
    while load_atomically(control, ARRIVALS) < target:
        if load_atomically(control, ABORTED) != 0:
            return False
        spins += 1
        if spins > SPINS_BEFORE_YIELD:
            yield_core()
    return True


@njit(fastmath=ACCURATE, **INNER)
def exponential(x):
    """e^x within 2 ulp for x in [-87, 88], beyond which it stays at the border. After Cephes' expf."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    # Adding 1.5 * 2^23 rounds to an integer and leaves it in the lowest bits.
    shifted = x * np.float32(1.44269504) + np.float32(12582912.0)
    power = shifted - np.float32(12582912.0)
    x = x - power * np.float32(0.693359375)
    x = x - power * np.float32(-2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * x + np.float32(1.3981999507e-3)
    y = y * x + np.float32(8.3334519073e-3)
    y = y * x + np.float32(4.1665795894e-2)
    y = y * x + np.float32(1.6666665459e-1)
    y = y * x + np.float32(5.0000001201e-1)
    y = y * (x * x) + x + np.float32(1.0)
    return float_from_bits(float_bits(y) + (float_bits(shifted) << np.int32(23)))


@njit(fastmath=FAST, **INNER)
def normalize(x, size, num_rows, norms, norm_start, eps, tape, inputs, start):
    for row in range(num_rows):
        total = np.float32(0.0)
        for i in range(size):
            value = at(x, row * size + i)
            total += value * value
        scale = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
        for i in range(size):
            value = at(x, row * size + i) * scale * at(norms, norm_start + i)
            put(inputs, start + row * size + i, rounded(tape, value))


@njit(fastmath=FAST, **INNER)
def multiply(tape, start, num_columns, x, x_start, num_rows, out, out_start):
    """Dot products of one block of 32 rows with each input: out [num_rows, 32]."""
    if num_rows == 1:
        dots_1(tape, start, num_columns, x, x_start, num_columns, out, out_start)
    elif num_rows == 2:
        dots_2(tape, start, num_columns, x, x_start, num_columns, out, out_start)
    else:
        # Three rows are four, of which the last is whatever the buffer holds.
        for row in range(0, num_rows, 4):
            row_start = x_start + row * num_columns
            dots_4(tape, start, num_columns, x, row_start, num_columns, out, out_start + row * BLOCK)


@njit(fastmath=FAST, **INNER)
def project(
    tape, start, num_columns, biases, bias_start, blocks, x, x_start, num_rows, out, out_size, adds,
    dots, dots_start,
):  # fmt: skip
    """out[row, r] = x W^T + b, plus what out holds already if `adds`; rows of W in `blocks` only."""
    for block in range(blocks[0], blocks[1]):
        multiply(
            tape, start + block * BLOCK * num_columns, num_columns, x, x_start, num_rows, dots, dots_start
        )
        first = block * BLOCK
        count = min(BLOCK, out_size - first)
        for row in range(num_rows):
            for r in range(count):
                value = at(dots, dots_start + row * BLOCK + r) + at(biases, bias_start + first + r)
                place = row * out_size + first + r
                if adds:
                    value += at(out, place)
                put(out, place, rounded(tape, value))


@njit(fastmath=FAST, **INNER)
def project_gate_up(
    tape, start, num_columns, biases, bias_start, blocks, x, x_start, num_rows, out, out_size,
    dots, dots_start,
):  # fmt: skip
    """out[row, i] = silu(gate) * up; a block has 16 rows of either."""
    for block in range(blocks[0], blocks[1]):
        multiply(
            tape, start + block * BLOCK * num_columns, num_columns, x, x_start, num_rows, dots, dots_start
        )
        first = block * GROUP
        bias = bias_start + block * BLOCK
        count = min(GROUP, out_size - first)
        for row in range(num_rows):
            place = dots_start + row * BLOCK
            for r in range(count):
                gate = rounded(tape, at(dots, place + r) + at(biases, bias + r))
                up = rounded(tape, at(dots, place + GROUP + r) + at(biases, bias + GROUP + r))
                gate = gate / (np.float32(1.0) + exponential(-gate))
                put(out, row * out_size + first + r, rounded(tape, gate * up))


@njit(fastmath=FAST, **INNER)
def rotate(source, start, shape, cos_sin, position, tape, out, out_start):
    """One head of qkv, turned by its position's angles and rounded."""
    half = shape.rotary_dim // 2
    angles = position * shape.rotary_dim
    for i in range(half):
        cos, sin = at(cos_sin, angles + i), at(cos_sin, angles + half + i)
        low, high = at(source, start + i), at(source, start + half + i)
        put(out, out_start + i, rounded(tape, low * cos - high * sin))
        put(out, out_start + half + i, rounded(tape, high * cos + low * sin))
    for i in range(shape.rotary_dim, shape.head_dim):
        put(out, out_start + i, at(source, start + i))


@njit(**INNER)
def chunk_len(context_len):
    """Context tokens of one piece of work. Depends on nothing but the sequence itself."""
    return max(MIN_CHUNK, -(-context_len // MAX_CHUNKS))


@njit(fastmath=FAST, **INNER)
def write_key_and_value(shape, row, head, layer_start, weights, batch, buffers):
    """Rotate the new token's key and put key and value into their cell."""
    dim = shape.head_dim
    size = (shape.num_heads + 2 * shape.num_kv_heads) * dim
    key = row * size + (shape.num_heads + head) * dim
    value = key + shape.num_kv_heads * dim
    cell = batch.cells[row]
    page, offset = cell // shape.page_size, cell % shape.page_size
    place = layer_start + ((page * shape.num_kv_heads + head) * shape.page_size + offset) * dim
    half = shape.rotary_dim // 2
    angles = batch.positions[row] * shape.rotary_dim
    for i in range(half):
        cos, sin = at(weights.cos_sin, angles + i), at(weights.cos_sin, angles + half + i)
        low, high = at(buffers.qkv, key + i), at(buffers.qkv, key + half + i)
        put(batch.k_cache, place + i, narrow(batch.k_cache, low * cos - high * sin))
        put(batch.k_cache, place + half + i, narrow(batch.k_cache, high * cos + low * sin))
    for i in range(shape.rotary_dim, dim):
        put(batch.k_cache, place + i, narrow(batch.k_cache, at(buffers.qkv, key + i)))
    for i in range(dim):
        put(batch.v_cache, place + i, narrow(batch.v_cache, at(buffers.qkv, value + i)))


@njit(**INNER)
def find_run(shape, table, row, head, token, end, layer_start):
    """Where this token's key or value lies in a cache, and how many tokens before `end` follow it there."""
    offset = token % shape.page_size
    page = table[row, token // shape.page_size]
    place = (page * shape.num_kv_heads + head) * shape.page_size + offset
    return layer_start + place * shape.head_dim, min(shape.page_size - offset, end - token)


@njit(fastmath=FAST, **INNER)
def attend(shape, row, head, start, end, layer_start, batch, queries, q_start, scores, s_start,
           partial, p_start, stats, stats_start):  # fmt: skip
    """Query heads of one KV head against context tokens [start, end): weighted values, maximum and sum."""
    dim = shape.head_dim
    group = shape.num_heads // shape.num_kv_heads
    count = end - start
    k_cache, v_cache = batch.k_cache, batch.v_cache
    table = batch.page_table
    token = start
    while token < end:
        place, run = find_run(shape, table, row, head, token, end, layer_start)
        for t in range(token - start, token - start + run):
            prefetch(v_cache, place)
            for g in range(group):
                score = dot(queries, q_start + g * dim, k_cache, place, dim)
                put(scores, s_start + g * count + t, score * shape.scale)
            place += dim
        token += run
    for g in range(group):
        place = s_start + g * count
        maximum = at(scores, place)
        for t in range(1, count):
            maximum = max(maximum, at(scores, place + t))
        total = np.float32(0.0)
        for t in range(count):
            weight = exponential(at(scores, place + t) - maximum)
            put(scores, place + t, weight)
            total += weight
        put(stats, stats_start + 2 * g, maximum)
        put(stats, stats_start + 2 * g + 1, total)
        for i in range(dim):
            put(partial, p_start + g * dim + i, np.float32(0.0))
    token = start
    while token < end:
        place, run = find_run(shape, table, row, head, token, end, layer_start)
        for t in range(token - start, token - start + run):
            for g in range(group):
                weight = at(scores, s_start + g * count + t)
                add_scaled(partial, p_start + g * dim, weight, v_cache, place, dim)
            place += dim
        token += run


@njit(fastmath=FAST, **INNER)
def attend_share(index, num_threads, shape, layer, weights, batch, buffers):
    """This thread's pieces of attention: a row, a KV head and a chunk of the context each."""
    dim, num_heads, num_kv_heads = shape.head_dim, shape.num_heads, shape.num_kv_heads
    group = num_heads // num_kv_heads
    size = (num_heads + 2 * num_kv_heads) * dim
    layer_start = layer * (batch.k_cache.size // shape.num_layers)
    q_start = index * group * dim
    s_start = index * (buffers.scores.size // buffers.num_threads)
    piece = 0
    for row in range(batch.context_lens.size):
        context_len = batch.context_lens[row]
        length = chunk_len(context_len)
        for start in range(0, context_len, length):
            end = min(start + length, context_len)
            for head in range(num_kv_heads):
                piece += 1
                if piece % num_threads != index:
                    continue
                if end == context_len:
                    write_key_and_value(shape, row, head, layer_start, weights, batch, buffers)
                for g in range(group):
                    rotate(
                        buffers.qkv, row * size + (head * group + g) * dim, shape, weights.cos_sin,
                        batch.positions[row], weights.tape, buffers.queries, q_start + g * dim,
                    )  # fmt: skip
                place = (row * MAX_CHUNKS + start // length) * num_heads + head * group
                attend(
                    shape, row, head, start, end, layer_start, batch, buffers.queries, q_start,
                    buffers.scores, s_start, buffers.partial, place * dim, buffers.partial_stats, 2 * place,
                )  # fmt: skip


@njit(fastmath=FAST, **INNER)
def combine(shape, batch, partial, stats, tape, inputs, inputs_start):
    """Join the chunks of each row and head: the attention's output, [rows, q_size]."""
    dim, num_heads = shape.head_dim, shape.num_heads
    for row in range(batch.context_lens.size):
        context_len = batch.context_lens[row]
        chunks = -(-context_len // chunk_len(context_len))
        for head in range(num_heads):
            first = row * MAX_CHUNKS * num_heads + head
            out = inputs_start + (row * num_heads + head) * dim
            maximum = at(stats, 2 * first)
            for chunk in range(1, chunks):
                maximum = max(maximum, at(stats, 2 * (first + chunk * num_heads)))
            for i in range(dim):
                put(inputs, out + i, np.float32(0.0))
            total = np.float32(0.0)
            for chunk in range(chunks):
                place = first + chunk * num_heads
                weight = exponential(at(stats, 2 * place) - maximum)
                total += weight * at(stats, 2 * place + 1)
                add_scaled(inputs, out, weight, partial, place * dim, dim)
            for i in range(dim):
                put(inputs, out + i, rounded(tape, at(inputs, out + i) / total))


@njit(**INNER)
def share(index, num_threads, num_blocks):
    """Blocks [first, end) of a matrix that are this thread's."""
    return num_blocks * index // num_threads, num_blocks * (index + 1) // num_threads


@njit(**INNER)
def is_valid(shape, weights, batch):
    """Whether every index lies within its array: nothing below is checked again."""
    max_len = weights.cos_sin.size // shape.rotary_dim
    page_values = shape.num_kv_heads * shape.page_size * shape.head_dim
    num_pages = batch.k_cache.size // (shape.num_layers * page_values)
    vocab = weights.embedding.size // shape.hidden
    for row in range(batch.token_ids.size):
        length = batch.context_lens[row]
        if not (0 <= batch.token_ids[row] < vocab and 0 <= batch.positions[row] < max_len):
            return False
        if not (0 <= batch.cells[row] < num_pages * shape.page_size):
            return False
        if not (1 <= length <= min(max_len, batch.page_table.shape[1] * shape.page_size)):
            return False
        for i in range(-(-length // shape.page_size)):
            if not 0 <= batch.page_table[row, i] < num_pages:
                return False
    return True


def _build_steps() -> tuple[Callable[..., bool], Callable[..., bool]]:
    # numba keeps the code on disk, but notices only changes of this file and of what a function captures:
    # so they capture a stamp of the other files that the code is made from.
    sources = (Path(__file__).with_name(f"{name}.py") for name in ("intrinsics", "products", "pool", "tape"))
    stamp = crc32(b"".join(source.read_bytes() for source in sources))

    @njit(fastmath=FAST, error_model="numpy", nogil=True, cache=True)
    def decode_step(index, num_threads, arrivals, control, shape, weights, batch, buffers, out):
        """One thread's part of a step. Returns False when the run was aborted.

        out: [rows, hidden] of the storage type, written by thread 0.
        """
        if not is_valid(shape, weights, batch):
            return False
        hidden, q_size = shape.hidden, shape.num_heads * shape.head_dim
        qkv_size = q_size + 2 * shape.num_kv_heads * shape.head_dim
        num_rows = batch.token_ids.size
        tape, biases, x = weights.tape, weights.biases, buffers.x
        inputs, dots = buffers.inputs, buffers.dots
        inputs_start = index * (inputs.size // buffers.num_threads)
        dots_start = index * (dots.size // buffers.num_threads)

        qkv_blocks = -(-qkv_size // BLOCK)
        hidden_blocks = -(-hidden // BLOCK)
        gate_up_blocks = -(-shape.intermediate // GROUP)
        qkv_share = share(index, num_threads, qkv_blocks)
        hidden_share = share(index, num_threads, hidden_blocks)
        gate_up_share = share(index, num_threads, gate_up_blocks)
        output_start = qkv_blocks * BLOCK * hidden
        gate_up_start = output_start + hidden_blocks * BLOCK * q_size
        down_start = gate_up_start + gate_up_blocks * BLOCK * hidden
        layer_values = down_start + hidden_blocks * BLOCK * shape.intermediate
        layer_biases = (qkv_blocks + 2 * hidden_blocks + gate_up_blocks) * BLOCK

        for row in range(num_rows):
            token = batch.token_ids[row] * hidden
            for i in range(hidden * index // num_threads, hidden * (index + 1) // num_threads):
                put(x, row * hidden + i, wide(at(weights.embedding, token + i)))
        target = arrivals + num_threads
        if not meet(control, target, tape, 0, 0):
            return False

        for layer in range(shape.num_layers):
            start = layer * layer_values
            bias = layer * layer_biases
            norm = 2 * layer * hidden
            normalize(x, hidden, num_rows, weights.norms, norm, shape.eps, tape, inputs, inputs_start)
            project(
                tape, start, hidden, biases, bias, qkv_share, inputs, inputs_start, num_rows,
                buffers.qkv, qkv_size, False, dots, dots_start,
            )  # fmt: skip
            target += num_threads
            next_start = start + output_start + hidden_share[0] * BLOCK * q_size
            next_end = start + output_start + hidden_share[1] * BLOCK * q_size
            if not meet(control, target, tape, next_start, next_end):
                return False

            attend_share(index, num_threads, shape, layer, weights, batch, buffers)
            target += num_threads
            if not meet(control, target, tape, next_start, next_end):
                return False

            combine(shape, batch, buffers.partial, buffers.partial_stats, tape, inputs, inputs_start)
            bias += qkv_blocks * BLOCK
            project(
                tape, start + output_start, q_size, biases, bias, hidden_share,
                inputs, inputs_start, num_rows, x, hidden, True, dots, dots_start,
            )  # fmt: skip
            target += num_threads
            next_start = start + gate_up_start + gate_up_share[0] * BLOCK * hidden
            next_end = start + gate_up_start + gate_up_share[1] * BLOCK * hidden
            if not meet(control, target, tape, next_start, next_end):
                return False

            normalize(
                x, hidden, num_rows, weights.norms, norm + hidden, shape.eps, tape, inputs, inputs_start
            )
            bias += hidden_blocks * BLOCK
            project_gate_up(
                tape, start + gate_up_start, hidden, biases, bias, gate_up_share,
                inputs, inputs_start, num_rows, buffers.activations, shape.intermediate, dots, dots_start,
            )  # fmt: skip
            target += num_threads
            next_start = start + down_start + hidden_share[0] * BLOCK * shape.intermediate
            next_end = start + down_start + hidden_share[1] * BLOCK * shape.intermediate
            if not meet(control, target, tape, next_start, next_end):
                return False

            bias += gate_up_blocks * BLOCK
            project(
                tape, start + down_start, shape.intermediate, biases, bias, hidden_share,
                buffers.activations, 0, num_rows, x, hidden, True, dots, dots_start,
            )  # fmt: skip
            target += num_threads
            next_start = start + layer_values + qkv_share[0] * BLOCK * hidden
            next_end = start + layer_values + qkv_share[1] * BLOCK * hidden
            if layer == shape.num_layers - 1:
                next_end = next_start
            if not meet(control, target, tape, next_start, next_end):
                return False

        if index == 0:
            for i in range(num_rows * hidden):
                put(out, i, narrow(out, at(x, i)))
        return stamp >= 0

    @njit(fastmath=FAST, error_model="numpy", nogil=True, cache=True)
    def decode_head(index, num_threads, arrivals, control, shape, head, hidden, buffers, out):
        """One thread's part of the final norm and the LM head: hidden [rows, hidden] -> out [rows, vocab]."""
        size, x = shape.hidden, buffers.x
        num_rows = hidden.size // size
        vocab = out.size // num_rows
        for i in range(hidden.size * index // num_threads, hidden.size * (index + 1) // num_threads):
            put(x, i, wide(at(hidden, i)))
        blocks = share(index, num_threads, -(-vocab // BLOCK))
        first = blocks[0] * BLOCK * size
        if not meet(control, arrivals + num_threads, head.tape, first, blocks[1] * BLOCK * size):
            return False
        inputs, dots = buffers.inputs, buffers.dots
        inputs_start = index * (inputs.size // buffers.num_threads)
        dots_start = index * (dots.size // buffers.num_threads)
        normalize(x, size, num_rows, head.norm, 0, shape.eps, head.tape, inputs, inputs_start)
        project(
            head.tape, 0, size, head.biases, 0, blocks, inputs, inputs_start, num_rows,
            out, vocab, False, dots, dots_start,
        )  # fmt: skip
        return meet(control, arrivals + 2 * num_threads, head.tape, 0, 0) and stamp >= 0

    return decode_step, decode_head


decode_step, decode_head = _build_steps()
