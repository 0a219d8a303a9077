"""Products in vectors of 16 floats, written as LLVM code: their speed must not hang on what a compiler sees.

A CPU with narrower vectors splits each into two or four. Needs numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tiny_vllm.kernels.cpu_decode.intrinsics import emit_prefetch, item_pointer

LANES = 16
PREFETCH_BYTES = 4096
"""How far ahead weights are asked for. The hardware's own prefetch ends at every 4 KiB page."""

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_BYTE_POINTER = ir.IntType(8).as_pointer()
_F32_LANES, _I32_LANES = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_I16_LANES = ir.VectorType(_I16, LANES)


def _spread(builder: Any, value: Any) -> Any:
    """One float in all lanes."""
    undefined = ir.Constant(_F32_LANES, ir.Undefined)
    single = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(single, undefined, ir.Constant(_I32_LANES, [0] * LANES))


def _multiply_add(builder: Any, a: Any, b: Any, total: Any) -> Any:
    product = builder.fmul(a, b, flags=("contract",))
    return builder.fadd(total, product, flags=("contract",))


def _load_floats(builder: Any, pointer: Any, num_lanes: int) -> Any:
    """num_lanes stored values, BF16 bits or FP32, as floats: a vector, or a scalar for one lane."""
    is_bits = pointer.type.pointee == _I16
    kinds = (_I16_LANES, _I32_LANES, _F32_LANES) if num_lanes > 1 else (_I16, _I32, _F32)
    if not is_bits:
        return builder.load(builder.bitcast(pointer, kinds[2].as_pointer()), align=4)
    bits = builder.load(builder.bitcast(pointer, kinds[0].as_pointer()), align=2)
    sixteen = ir.Constant(kinds[1], [16] * LANES if num_lanes > 1 else 16)
    return builder.bitcast(builder.shl(builder.zext(bits, kinds[1]), sixteen), kinds[2])


def _load_weights(builder: Any, pointer: Any, is_bits: bool) -> tuple[Any, Any]:
    """One column of a block: 16 values of its first rows, 16 of its second, as FP32 vectors."""
    if is_bits:
        # A 32-bit word holds a first row's value below a second row's, and FP32's upper half is BF16:
        # one operation each, where widening 16-bit words would take two.
        words = builder.load(builder.bitcast(pointer, _I32_LANES.as_pointer()))
        words.align = 4
        first = builder.shl(words, ir.Constant(_I32_LANES, [16] * LANES))
        second = builder.and_(words, ir.Constant(_I32_LANES, [-65536] * LANES))
        return builder.bitcast(first, _F32_LANES), builder.bitcast(second, _F32_LANES)
    vectors = builder.bitcast(pointer, _F32_LANES.as_pointer())
    first, second = builder.load(vectors), builder.load(builder.gep(vectors, [ir.Constant(_I32, 1)]))
    first.align = second.align = 4
    return first, second


def _make_dots(num_rows: int) -> Any:
    """The product of a block with num_rows inputs. Each of its sums runs over the columns in order, so that
    an input's result has the same bits however many are computed beside it."""

    @intrinsic
    def dots(
        typingctx: Any, tape: Any, start: Any, num_columns: Any, x: Any, x_start: Any, x_stride: Any,
        out: Any, out_start: Any,
    ) -> Any:  # fmt: skip
        is_bits = tape.dtype == types.uint16

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, _, columns, _, _, stride, _, _ = args
            weights = item_pointer(context, builder, signature.args[0], args[0], args[1])
            inputs = item_pointer(context, builder, signature.args[3], args[3], args[4])
            outputs = item_pointer(context, builder, signature.args[6], args[6], args[7])
            zero = ir.Constant(_F32_LANES, [0.0] * LANES)
            sums = [cgutils.alloca_once_value(builder, zero) for _ in range(2 * num_rows)]
            width = ir.Constant(_I64, 2 * LANES)
            with cgutils.for_range(builder, columns) as loop:
                pointer = builder.gep(weights, [builder.mul(loop.index, width)])
                ahead = builder.gep(
                    builder.bitcast(pointer, _BYTE_POINTER), [ir.Constant(_I64, PREFETCH_BYTES)]
                )
                emit_prefetch(builder, ahead)
                if not is_bits:
                    emit_prefetch(builder, builder.gep(ahead, [ir.Constant(_I64, 64)]))
                halves = _load_weights(builder, pointer, is_bits)
                for row in range(num_rows):
                    offset = builder.add(loop.index, builder.mul(stride, ir.Constant(_I64, row)))
                    value = builder.load(builder.gep(inputs, [offset]))
                    spread = _spread(builder, value)
                    for half in range(2):
                        total = sums[2 * row + half]
                        added = _multiply_add(builder, halves[half], spread, builder.load(total))
                        builder.store(added, total)
            vectors = builder.bitcast(outputs, _F32_LANES.as_pointer())
            for position, total in enumerate(sums):
                target = builder.gep(vectors, [ir.Constant(_I64, position)])
                builder.store(builder.load(total), target, align=4)
            return context.get_dummy_value()

        int64 = types.int64
        return types.void(tape, int64, int64, x, int64, int64, out, int64), codegen

    return dots


dots_1, dots_2, dots_4 = _make_dots(1), _make_dots(2), _make_dots(4)


@intrinsic
def dot(typingctx: Any, a: Any, a_start: Any, b: Any, b_start: Any, length: Any) -> Any:
    """Sum of a[a_start + i] * b[b_start + i]; a, b: float32 or BF16 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = item_pointer(context, builder, signature.args[0], args[0], args[1])
        second = item_pointer(context, builder, signature.args[2], args[2], args[3])
        lanes = cgutils.alloca_once_value(builder, ir.Constant(_F32_LANES, [0.0] * LANES))
        rest = cgutils.alloca_once_value(builder, ir.Constant(_F32, 0.0))

        def add(index: Any, total: Any, num_lanes: int) -> None:
            left = _load_floats(builder, builder.gep(first, [index]), num_lanes)
            right = _load_floats(builder, builder.gep(second, [index]), num_lanes)
            builder.store(_multiply_add(builder, left, right, builder.load(total)), total)

        _walk(builder, args[4], lambda i: add(i, lanes, LANES), lambda i: add(i, rest, 1))
        kind = ir.FunctionType(_F32, [_F32, _F32_LANES])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.fadd.v16f32")
        arguments = [builder.load(rest), builder.load(lanes)]
        return builder.call(function, arguments, fastmath=("reassoc",))

    return types.float32(a, types.int64, b, types.int64, types.int64), codegen


@intrinsic
def add_scaled(
    typingctx: Any, out: Any, out_start: Any, factor: Any, values: Any, start: Any, length: Any
) -> Any:
    """out[out_start + i] += factor * values[start + i]; out float32, values float32 or BF16 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target = item_pointer(context, builder, signature.args[0], args[0], args[1])
        source = item_pointer(context, builder, signature.args[3], args[3], args[4])
        factors = _spread(builder, args[2])

        def add(index: Any, factor: Any, num_lanes: int) -> None:
            place = builder.gep(target, [index])
            total = _load_floats(builder, place, num_lanes)
            value = _load_floats(builder, builder.gep(source, [index]), num_lanes)
            place = builder.bitcast(place, total.type.as_pointer())
            builder.store(_multiply_add(builder, factor, value, total), place, align=4)

        _walk(builder, args[5], lambda i: add(i, factors, LANES), lambda i: add(i, args[2], 1))
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(out, int64, types.float32, values, int64, int64), codegen


def _walk(builder: Any, length: Any, vector: Callable[[Any], None], scalar: Callable[[Any], None]) -> None:
    """Loops over [0, length): in steps of a whole vector, then one by one."""
    width = ir.Constant(_I64, LANES)
    count = builder.sdiv(length, width)
    with cgutils.for_range(builder, count) as loop:
        vector(builder.mul(loop.index, width))
    with cgutils.for_range(builder, length, start=builder.mul(count, width)) as loop:
        scalar(loop.index)
