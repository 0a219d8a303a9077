"""What numba cannot say: BF16 bits, atomic counters, prefetches, and the dot products of a block of rows.

Needs numba; import it only where numba is known to be there.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
"""Rows in one vector; a block is two vectors of rows."""
PREFETCH_BYTES = 4096
"""How far ahead weights are asked for. The hardware's own prefetch ends at every 4 KiB page."""

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_F32_LANES, _I32_LANES = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_BYTE_POINTER = ir.IntType(8).as_pointer()


def _item_pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Pointer to item `index` of a contiguous array."""
    data = context.make_array(array_type)(context, builder, value=array).data
    return builder.gep(data, [index])


@intrinsic
def wide(typingctx: Any, value: Any) -> Any:
    """A stored value as float32: BF16 bits (uint16) are its upper half."""
    is_bits = value == types.uint16

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not is_bits:
            return args[0]
        shifted = builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16))
        return builder.bitcast(shifted, _F32)

    return types.float32(value), codegen


@intrinsic
def float_bits(typingctx: Any, value: Any) -> Any:
    """The bits of a float32 as int32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _I32)

    return types.int32(types.float32), codegen


@intrinsic
def float_from_bits(typingctx: Any, value: Any) -> Any:
    """The float32 with these bits (int32)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _F32)

    return types.float32(types.int32), codegen


@intrinsic
def narrow(typingctx: Any, array: Any, value: Any) -> Any:
    """float32 -> what `array` stores: itself, or BF16 bits (nearest, ties to even; NaN stays NaN)."""
    is_bits = array.dtype == types.uint16

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not is_bits:
            return args[1]
        bits = builder.bitcast(args[1], _I32)
        upper = builder.lshr(bits, ir.Constant(_I32, 16))
        odd = builder.and_(upper, ir.Constant(_I32, 1))
        rounded = builder.add(builder.add(bits, ir.Constant(_I32, 0x7FFF)), odd)
        rounded = builder.lshr(rounded, ir.Constant(_I32, 16))
        is_nan = builder.fcmp_unordered("uno", args[1], args[1])
        rounded = builder.select(is_nan, ir.Constant(_I32, 0x7FC0), rounded)
        return builder.trunc(rounded, ir.IntType(16))

    return array.dtype(array, types.float32), codegen


@intrinsic
def at(typingctx: Any, array: Any, index: Any) -> Any:
    """array[index], index >= 0. numba's own indexing tests for negative ones, and such loops stay scalar."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _item_pointer(context, builder, signature.args[0], args[0], args[1])
        return builder.load(pointer)

    return array.dtype(array, types.int64), codegen


@intrinsic
def put(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index] = value, index >= 0; see `at`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _item_pointer(context, builder, signature.args[0], args[0], args[1]))
        return context.get_dummy_value()

    return types.void(array, types.int64, array.dtype), codegen


@intrinsic
def add_atomically(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index] += value, visible to all threads with everything written before; int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _item_pointer(context, builder, signature.args[0], args[0], args[1])
        return builder.atomic_rmw("add", pointer, args[2], "acq_rel")

    return types.int64(array, types.int64, types.int64), codegen


@intrinsic
def load_atomically(typingctx: Any, array: Any, index: Any) -> Any:
    """array[index], with everything that its writer wrote before; int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _item_pointer(context, builder, signature.args[0], args[0], args[1])
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(array, types.int64), codegen


def _prefetch(builder: Any, pointer: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, keep, data = ir.Constant(_I32, 0), ir.Constant(_I32, 3), ir.Constant(_I32, 1)
    builder.call(function, [pointer, read, keep, data])


@intrinsic
def prefetch(typingctx: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of array[index]; harmless past the end."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _item_pointer(context, builder, signature.args[0], args[0], args[1])
        _prefetch(builder, builder.bitcast(pointer, _BYTE_POINTER))
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


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
            weights = _item_pointer(context, builder, signature.args[0], args[0], args[1])
            inputs = _item_pointer(context, builder, signature.args[3], args[3], args[4])
            outputs = _item_pointer(context, builder, signature.args[6], args[6], args[7])
            zero = ir.Constant(_F32_LANES, [0.0] * LANES)
            sums = [cgutils.alloca_once_value(builder, zero) for _ in range(2 * num_rows)]
            width = ir.Constant(_I64, 2 * LANES)
            with cgutils.for_range(builder, columns) as loop:
                pointer = builder.gep(weights, [builder.mul(loop.index, width)])
                ahead = builder.gep(
                    builder.bitcast(pointer, _BYTE_POINTER), [ir.Constant(_I64, PREFETCH_BYTES)]
                )
                _prefetch(builder, ahead)
                if not is_bits:
                    _prefetch(builder, builder.gep(ahead, [ir.Constant(_I64, 64)]))
                halves = _load_weights(builder, pointer, is_bits)
                for row in range(num_rows):
                    offset = builder.add(loop.index, builder.mul(stride, ir.Constant(_I64, row)))
                    value = builder.load(builder.gep(inputs, [offset]))
                    single = builder.insert_element(
                        ir.Constant(_F32_LANES, ir.Undefined), value, ir.Constant(_I32, 0)
                    )
                    lanes = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
                    spread = builder.shuffle_vector(single, ir.Constant(_F32_LANES, ir.Undefined), lanes)
                    for half in range(2):
                        total = sums[2 * row + half]
                        product = builder.fmul(halves[half], spread, flags=("contract",))
                        builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
            vectors = builder.bitcast(outputs, _F32_LANES.as_pointer())
            for position, total in enumerate(sums):
                target = builder.gep(vectors, [ir.Constant(_I64, position)])
                builder.store(builder.load(total), target, align=4)
            return context.get_dummy_value()

        int64 = types.int64
        return types.void(tape, int64, int64, x, int64, int64, out, int64), codegen

    return dots


dots_1, dots_2, dots_4 = _make_dots(1), _make_dots(2), _make_dots(4)

yield_core = types.ExternalFunction("sched_yield", types.int32())
