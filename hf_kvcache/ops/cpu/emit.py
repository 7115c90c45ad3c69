"""Small pieces of LLVM IR that the kernels are made of. Addresses are 64-bit integers throughout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llvmlite import ir

I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F32, F16 = ir.FloatType(), ir.HalfType()
POINTER = ir.PointerType()
Value = ir.Value

EXP2 = (1.0000000, 0.69314718, 0.24022651, 0.055504109, 0.0096181291, 0.0013333558, 0.00015403530)
FLOOR = -1e30  # stands for minus infinity: the running maximum of a row that has seen no token
LEAST = -100.0  # smaller powers of two weigh nothing beside 1, and slow a CPU down once they leave the normal range


def vector(element: ir.Type, lanes: int) -> ir.VectorType:
    return ir.VectorType(element, lanes)


def i64(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def constant(element: ir.Type, lanes: int, value: float) -> ir.Constant:
    """A vector with the same value in every lane."""
    return ir.Constant(vector(element, lanes), [ir.Constant(element, value)] * lanes)


def columns(count: int, lanes: int) -> list[tuple[int, int]]:
    """Cut `count` columns into vectors: (offset, lanes), whole vectors first, then ever narrower ones."""
    out, at = [], 0
    while at < count:
        while at + lanes > count:
            lanes //= 2
        out.append((at, lanes))
        at += lanes
    return out


def new_kernel(name: str, arguments: int, floats: int = 0) -> tuple[ir.Module, ir.IRBuilder, list[Value]]:
    """A void function of `arguments` 64-bit integers, then `floats` float32 numbers, and a builder inside it."""
    module = ir.Module(name)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * arguments + [F32] * floats), name)
    return module, ir.IRBuilder(function.append_basic_block()), list(function.args)


def intrinsic(b: ir.IRBuilder, name: str, result: ir.Type, arguments: list[Value]) -> Value:
    found = b.module.globals.get(name)
    if found is None:
        found = ir.Function(b.module, ir.FunctionType(result, [a.type for a in arguments]), name)
    return b.call(found, arguments)


def load(b: ir.IRBuilder, address: Value, kind: ir.Type, align: int = 1) -> Value:
    return b.load(b.inttoptr(address, POINTER), align=align, typ=kind)


def store(b: ir.IRBuilder, value: Value, address: Value) -> None:
    b.store(value, b.inttoptr(address, POINTER), align=4)


def offset(b: ir.IRBuilder, address: Value, nbytes: int) -> Value:
    return b.add(address, i64(nbytes)) if nbytes else address


def splat(b: ir.IRBuilder, scalar: Value, lanes: int) -> Value:
    kind = vector(scalar.type, lanes)
    one = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(vector(I32, lanes), [0] * lanes))


def fma(b: ir.IRBuilder, x: Value, y: Value, z: Value) -> Value:
    suffix = f"v{x.type.count}f32" if isinstance(x.type, ir.VectorType) else "f32"
    return intrinsic(b, f"llvm.fma.{suffix}", x.type, [x, y, z])


def maximum(b: ir.IRBuilder, x: Value, y: Value) -> Value:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def reduce(b: ir.IRBuilder, parts: list[Value], combine: Callable[[ir.IRBuilder, Value, Value], Value]) -> Value:
    """All lanes of all vectors combined into one number; the vectors get narrower from first to last, if at all."""
    total: Value | None = None
    for lanes in sorted({part.type.count for part in parts}, reverse=True):
        same = [part for part in parts if part.type.count == lanes]
        while len(same) > 1:
            same = [combine(b, *same[i : i + 2]) if i + 1 < len(same) else same[i] for i in range(0, len(same), 2)]
        x, width = same[0], lanes
        while width > 1:
            width //= 2
            high = ir.Constant(vector(I32, width), list(range(width, 2 * width)))
            low = ir.Constant(vector(I32, width), list(range(width)))
            empty = ir.Constant(x.type, ir.Undefined)
            x = combine(b, b.shuffle_vector(x, empty, low), b.shuffle_vector(x, empty, high))
        scalar = b.extract_element(x, ir.Constant(I32, 0))
        total = scalar if total is None else combine(b, total, scalar)
    assert total is not None
    return total


def add(b: ir.IRBuilder, x: Value, y: Value) -> Value:
    return b.fadd(x, y)


def exp2(b: ir.IRBuilder, x: Value) -> Value:
    """`2 ** x` for `-126 <= x <= 0`, to about 3 units in the last place; anything below."""
    lanes = x.type.count
    whole = intrinsic(b, f"llvm.roundeven.v{lanes}f32", x.type, [x])
    part = b.fsub(x, whole)
    y = constant(F32, lanes, EXP2[-1])
    for coefficient in EXP2[-2::-1]:
        y = fma(b, y, part, constant(F32, lanes, coefficient))
    power = b.add(b.fptosi(whole, vector(I32, lanes)), constant(I32, lanes, 127))
    return b.fmul(y, b.bitcast(b.shl(power, constant(I32, lanes, 23)), x.type))


def bfloat16(b: ir.IRBuilder, address: Value, lanes: int) -> Value:
    wide = b.zext(load(b, address, vector(I16, lanes), 2), vector(I32, lanes))
    return b.bitcast(b.shl(wide, constant(I32, lanes, 16)), vector(F32, lanes))


def float16(b: ir.IRBuilder, address: Value, lanes: int) -> Value:
    return b.fpext(load(b, address, vector(F16, lanes), 2), vector(F32, lanes))


def prefetch(b: ir.IRBuilder, address: Value) -> None:
    arguments = [b.inttoptr(address, POINTER), ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1)]
    intrinsic(b, "llvm.prefetch.p0", ir.VoidType(), arguments)


class Loop:
    """What a loop's body sees: its index, the values carried into this turn; it sets `following` for the next."""

    def __init__(self, index: Value, carried: list[Value]) -> None:
        self.index, self.carried, self.following = index, carried, list[Value]()


@contextmanager
def loop(b: ir.IRBuilder, count: Value, start: list[Value]) -> Iterator[Loop]:
    """`for index in range(count)`; after it, `carried` holds the values that the last turn left."""
    before = b.block
    head, body, done = (b.append_basic_block() for _ in range(3))
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(I64)
    state = Loop(index, [b.phi(value.type) for value in start])
    b.cbranch(b.icmp_signed("<", index, count), body, done)
    b.position_at_end(body)
    yield state
    again = b.add(index, i64(1))
    last = b.block
    b.branch(head)
    for phi, first, following in zip([index, *state.carried], [i64(0), *start], [again, *state.following], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(following, last)
    b.position_at_end(done)
