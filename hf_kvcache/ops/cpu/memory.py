"""Numbers at addresses, for numba functions: one instruction each, with neither arrays nor bounds."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hf_kvcache.ops.cpu.emit import F16, F32, I8, I16, I32, I64, POINTER

_KINDS = {
    types.float32: F32,
    types.float16: F16,
    types.uint8: I8,
    types.uint16: I16,
    types.int32: I32,
    types.int64: I64,
}


def _place(b: ir.IRBuilder, address: Any, index: Any, kind: Any) -> Any:
    return b.gep(b.inttoptr(address, POINTER), [index], source_etype=_KINDS[kind])


def _loader(kind: Any, convert: Any = None, result: Any = None) -> Any:
    width = kind.bitwidth // 8

    @intrinsic
    def load(typingctx: Any, address: Any, index: Any) -> Any:
        def codegen(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
            value = b.load(_place(b, *args, kind), align=width, typ=_KINDS[kind])
            return convert(b, value) if convert else value

        return (result or kind)(types.int64, types.int64), codegen

    return load


def _storer(kind: Any) -> Any:
    width = kind.bitwidth // 8

    @intrinsic
    def store(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
        def codegen(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
            b.store(args[2], _place(b, *args[:2], kind), align=width)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, kind), codegen

    return store


def _widen(b: ir.IRBuilder, bits: Any) -> Any:
    return b.bitcast(b.shl(b.zext(bits, I32), ir.Constant(I32, 16)), F32)


get_float, put_float = _loader(types.float32), _storer(types.float32)
get_int, put_int = _loader(types.int32), _storer(types.int32)
get_long, put_long = _loader(types.int64), _storer(types.int64)
get_byte, put_byte = _loader(types.uint8), _storer(types.uint8)
get_bits, put_bits = _loader(types.uint16), _storer(types.uint16)
get_bfloat16 = _loader(types.uint16, _widen, types.float32)
get_half = _loader(types.float16, lambda b, value: b.fpext(value, F32), types.float32)


@intrinsic
def address_of(typingctx: Any, pointer: Any) -> Any:
    """An untyped pointer as an integer address."""
    return types.int64(types.voidptr), lambda context, b, signature, args: b.ptrtoint(args[0], I64)


@intrinsic
def float_of_bits(typingctx: Any, bits: Any) -> Any:
    """A 32-bit pattern as a float32."""
    return types.float32(types.int32), lambda context, b, signature, args: b.bitcast(args[0], F32)


@intrinsic
def bits_of_float(typingctx: Any, value: Any) -> Any:
    """The 32-bit pattern of a float32."""
    return types.int32(types.float32), lambda context, b, signature, args: b.bitcast(args[0], I32)


@intrinsic
def bits_of_half(typingctx: Any, value: Any) -> Any:
    """A float32 rounded to the nearest float16 (ties to even), as bits."""
    return types.uint16(types.float32), lambda context, b, signature, args: b.bitcast(b.fptrunc(args[0], F16), I16)


@intrinsic
def fetch_add(typingctx: Any, address: Any) -> Any:
    """Add one to the 64-bit counter at an address; what it held before."""

    def codegen(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(args[0], POINTER), ir.Constant(I64, 1), "monotonic")

    return types.int64(types.int64), codegen


@intrinsic
def call(typingctx: Any, kernel: Any, arguments: Any) -> Any:
    """Call the kernel at an address with a tuple of 64-bit integers and float32 numbers."""

    def codegen(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        values = [b.extract_value(args[1], i) for i in range(len(arguments))]
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        b.call(b.inttoptr(args[0], kind.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), codegen
