"""What numba cannot say about single values: BF16 bits, unchecked indexing, atomic counters, prefetches.

Needs numba; import it only where numba is known to be there.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I32, _F32 = ir.IntType(32), ir.FloatType()
_BYTE_POINTER = ir.IntType(8).as_pointer()


def item_pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
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
        pointer = item_pointer(context, builder, signature.args[0], args[0], args[1])
        return builder.load(pointer)

    return array.dtype(array, types.int64), codegen


@intrinsic
def put(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index] = value, index >= 0; see `at`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], item_pointer(context, builder, signature.args[0], args[0], args[1]))
        return context.get_dummy_value()

    return types.void(array, types.int64, array.dtype), codegen


@intrinsic
def add_atomically(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index] += value, visible to all threads with everything written before; int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = item_pointer(context, builder, signature.args[0], args[0], args[1])
        return builder.atomic_rmw("add", pointer, args[2], "acq_rel")

    return types.int64(array, types.int64, types.int64), codegen


@intrinsic
def load_atomically(typingctx: Any, array: Any, index: Any) -> Any:
    """array[index], with everything that its writer wrote before; int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = item_pointer(context, builder, signature.args[0], args[0], args[1])
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(array, types.int64), codegen


def emit_prefetch(builder: Any, pointer: Any) -> None:
    """pointer: to bytes."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, keep, data = ir.Constant(_I32, 0), ir.Constant(_I32, 3), ir.Constant(_I32, 1)
    builder.call(function, [pointer, read, keep, data])


@intrinsic
def prefetch(typingctx: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of array[index]; harmless past the end."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = item_pointer(context, builder, signature.args[0], args[0], args[1])
        emit_prefetch(builder, builder.bitcast(pointer, _BYTE_POINTER))
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


yield_core = types.ExternalFunction("sched_yield", types.int32())
