"""The inner kernels, written as LLVM IR for one shape each and compiled in milliseconds.

Weights and results are float32; codes become float32 in registers and are never stored so. Sizes that are not
arguments are fixed in the code.
"""

from __future__ import annotations

import functools

from llvmlite import ir

from hf_kvcache.ops.cpu import emit
from hf_kvcache.ops.cpu.emit import F32, I8, I16, I32, Value, constant, vector
from hf_kvcache.ops.cpu.machine import compile_kernel, vectors

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of a stored value; every other kind has one byte
PLANES = {"bits4": 2, "bits2": 4, "bits1": 8, "bits1_high": 8}  # values in a byte; every other kind has one
FACTOR = {"fp8_e4m3": 2.0**8}  # true value / value that a kernel computes with


def decode(b: ir.IRBuilder, kind: str, address: Value, lanes: int) -> list[Value]:
    """Read `lanes` stored items; one float32 vector for each plane."""
    if kind == "float32":
        return [emit.load(b, address, vector(F32, lanes), 4)]
    if kind == "bfloat16":
        return [emit.bfloat16(b, address, lanes)]
    if kind == "float16":
        return [emit.float16(b, address, lanes)]
    raw = emit.load(b, address, vector(I8, lanes))
    floats, halves, wide = vector(F32, lanes), vector(emit.F16, lanes), vector(I32, lanes)
    if kind == "fp8_e4m3":  # the byte's exponent and mantissa moved into a half's: 2^-8 of the value, subnormals too
        moved = b.shl(b.sext(raw, vector(I16, lanes)), constant(I16, lanes, 7))
        return [b.fpext(b.bitcast(b.and_(moved, constant(I16, lanes, 0xBFFF)), halves), floats)]
    if kind == "fp8_e5m2":  # the upper byte of a half
        return [b.fpext(b.bitcast(b.shl(b.zext(raw, vector(I16, lanes)), constant(I16, lanes, 8)), halves), floats)]
    if kind == "int8":
        return [b.sitofp(b.sext(raw, wide), floats)]
    codes = b.zext(raw, wide)
    if kind == "uint8":
        return [b.sitofp(codes, floats)]
    bits = 8 // PLANES[kind]
    lift = 2 if kind == "bits1_high" else 0  # the third bit of a 3-bit code counts 4
    mask = constant(I32, lanes, ((1 << bits) - 1) << lift)
    out = []
    for plane in range(PLANES[kind]):
        shift = bits * plane - lift
        moved = b.lshr(codes, constant(I32, lanes, shift)) if shift > 0 else b.shl(codes, constant(I32, lanes, -shift))
        out.append(b.sitofp(b.and_(moved, mask), floats))
    return out


@functools.cache
def product(
    kind: str, rows: int, width: int, weight_stride: int, out_stride: int, plane_rows: int, plane_out: int
) -> int:
    """`out[m, j] += sum_i weights[m, i] * code[i, j]`, or one such sum for each plane of a byte.

    rows: of weights, `m`; width: columns `j`; the strides are in numbers. Plane `p` of byte row `i` is code row
    `i + p * plane_rows`, and adds to `out + p * plane_out`.
    Arguments: weights, codes, byte rows, bytes from one row to the next, out, where to prefetch from.
    """
    module, b, (weights, codes, count, stride, out, ahead) = emit.new_kernel("product", 6)
    size, planes = BYTES.get(kind, 1), PLANES.get(kind, 1)
    sums = planes if plane_out else 1
    machine = vectors()
    together = 4
    while together > 1 and together * (rows * sums + planes) + 1 > machine.registers - 1:
        together //= 2
    cuts = emit.columns(width, machine.lanes)
    for first in range(0, len(cuts), together):
        block = cuts[first : first + together]
        places = [
            (s, m, at, lanes) for s in range(sums) for m in range(rows) for at, lanes in block
        ]  # one accumulator each
        targets = [emit.offset(b, out, 4 * (s * plane_out + m * out_stride + at)) for s, m, at, _ in places]
        start = [emit.load(b, t, vector(F32, p[3]), 4) for t, p in zip(targets, places, strict=True)]
        bytes_read = size * sum(lanes for _, lanes in block)
        with emit.loop(b, count, [codes, weights, ahead, *start]) as state:
            row, weight, near, *accumulators = state.carried
            emit.prefetch(b, near)
            decoded = [decode(b, kind, emit.offset(b, row, at * size), lanes) for at, lanes in block]
            totals = dict(zip(places, accumulators, strict=True))
            for plane in range(planes):
                for m in range(rows):
                    scalar = emit.load(b, emit.offset(b, weight, 4 * (m * weight_stride + plane * plane_rows)), F32, 4)
                    for (at, lanes), values in zip(block, decoded, strict=True):
                        place = (plane if sums > 1 else 0, m, at, lanes)
                        totals[place] = emit.fma(b, emit.splat(b, scalar, lanes), values[plane], totals[place])
            state.following = [b.add(row, stride), emit.offset(b, weight, 4), emit.offset(b, near, bytes_read)]
            state.following += totals.values()
        for target, value in zip(targets, state.carried[3:], strict=True):
            emit.store(b, value, target)
        ahead = state.carried[2]
    b.ret_void()
    return compile_kernel(module, "product")


@functools.cache
def dots(kind: str, rows: int, head_dim: int, query_stride: int, score_stride: int) -> int:
    """`scores[m, t] = sum_d query[m, d] * keys[t, d]` for keys that stand token by token.

    Arguments: query, keys, tokens, bytes from one token to the next, scores.
    """
    module, b, (query, keys, count, stride, scores) = emit.new_kernel("dots", 5)
    cuts = emit.columns(head_dim, vectors().lanes)
    with emit.loop(b, count, [keys, scores]) as state:
        key, score = state.carried
        sums: dict[tuple[int, int], Value] = {}
        for at, lanes in cuts:
            (values,) = decode(b, kind, emit.offset(b, key, at * BYTES[kind]), lanes)
            for m in range(rows):
                factor = emit.load(b, emit.offset(b, query, 4 * (m * query_stride + at)), vector(F32, lanes), 4)
                before = sums.get((m, lanes))
                sums[m, lanes] = b.fmul(factor, values) if before is None else emit.fma(b, factor, values, before)
        for m in range(rows):
            total = emit.reduce(b, [x for (row, _), x in sums.items() if row == m], emit.add)
            emit.store(b, total, emit.offset(b, score, 4 * m * score_stride))
        state.following = [b.add(key, stride), emit.offset(b, score, 4)]
    b.ret_void()
    return compile_kernel(module, "dots")


@functools.cache
def softmax(
    tokens: int,
    head_dim: int,
    key_scale: float | None,
    key_zero: bool,
    value_scale: float | None,
    value_zero: bool,
    softcap: bool,
) -> int:
    """One step of the online softmax over a tile of scores, in units of log2; rows `m` follow one another.

    Columns of `scores[m, tokens]` outside `[low[m], high[m])` become 0, the others `2 ** (score - maximum[m])`,
    times the values' scale. `maximum`, `total` and `out[m, head_dim]` are brought up to date first: `out` is scaled
    down when the maximum rose, and gets the values' zero points. A score is first multiplied by its key's scale,
    given `query_sum[m]` times its zero point, and capped (see `_capped`).

    key_scale, value_scale: a factor common to all scales, or None: there are no scales to apply.
    Arguments: rows, scores, low, high (int64), key scales (bfloat16), key zeros (float16), query_sum, value scales,
    value zeros, maximum, total, out; then float32 slope and cap.
    """
    module, b, arguments = emit.new_kernel("softmax", 12, 2)
    rows, scores, low, high, k_scale, k_zero, query_sum, v_scale, v_zero, maximum, total, out, slope, cap = arguments
    cuts = emit.columns(tokens, vectors().lanes)

    def scales(address: Value, factor: float | None) -> list[Value]:
        read = [emit.bfloat16(b, emit.offset(b, address, 2 * at), lanes) for at, lanes in cuts if factor is not None]
        return [x if factor == 1.0 else b.fmul(x, constant(F32, x.type.count, factor)) for x in read]

    def zeros(address: Value, wanted: bool) -> list[Value]:
        return [emit.float16(b, emit.offset(b, address, 2 * at), lanes) for at, lanes in cuts if wanted]

    k_scales, k_zeros = scales(k_scale, key_scale), zeros(k_zero, key_zero)
    v_scales, v_zeros = scales(v_scale, value_scale), zeros(v_zero, value_zero)
    with emit.loop(b, rows, []) as state:
        step = b.mul(state.index, emit.i64(4))
        score = b.add(scores, b.mul(state.index, emit.i64(4 * tokens)))
        first, end = (b.trunc(emit.load(b, b.add(x, b.add(step, step)), emit.I64, 8), I32) for x in (low, high))
        xs = []
        for n, (at, lanes) in enumerate(cuts):
            x = emit.load(b, emit.offset(b, score, 4 * at), vector(F32, lanes), 4)
            if k_scales:
                x = b.fmul(x, k_scales[n])
            if k_zeros:
                weight = emit.splat(b, emit.load(b, b.add(query_sum, step), F32, 4), lanes)
                x = emit.fma(b, weight, k_zeros[n], x)
            if softcap:
                x = _capped(b, x, slope, cap)
            place = ir.Constant(vector(I32, lanes), [ir.Constant(I32, at + i) for i in range(lanes)])
            inside = b.and_(
                b.icmp_signed(">=", place, emit.splat(b, first, lanes)),
                b.icmp_signed("<", place, emit.splat(b, end, lanes)),
            )
            xs.append(b.select(inside, x, constant(F32, lanes, 2 * emit.FLOOR)))  # below every running maximum
        old = emit.load(b, b.add(maximum, step), F32, 4)
        new = emit.maximum(b, emit.reduce(b, xs, emit.maximum), old)
        emit.store(b, new, b.add(maximum, step))
        sums, extras = [], []
        for n, (at, lanes) in enumerate(cuts):
            nothing = constant(F32, lanes, 0.0)
            below = b.fsub(xs[n], emit.splat(b, new, lanes))
            seen = b.fcmp_ordered(">", below, constant(F32, lanes, emit.LEAST))
            weight = b.select(seen, emit.exp2(b, below), nothing)
            sums.append(weight)
            if v_zeros:
                extras.append(b.select(seen, b.fmul(weight, v_zeros[n]), nothing))
            if v_scales:  # selected again: the scale of an unused slot may be NaN
                weight = b.select(seen, b.fmul(weight, v_scales[n]), nothing)
            emit.store(b, weight, emit.offset(b, score, 4 * at))
        fall = emit.maximum(b, b.fsub(old, new), ir.Constant(F32, emit.LEAST))
        change = b.extract_element(emit.exp2(b, emit.splat(b, fall, 2)), ir.Constant(I32, 0))
        before = emit.load(b, b.add(total, step), F32, 4)
        emit.store(b, emit.fma(b, before, change, emit.reduce(b, sums, emit.add)), b.add(total, step))
        touched = ir.Constant(ir.IntType(1), 1) if value_zero else b.fcmp_ordered(">", new, old)
        with b.if_then(touched):
            extra = emit.reduce(b, extras, emit.add) if value_zero else ir.Constant(F32, 0.0)
            row = b.add(out, b.mul(state.index, emit.i64(4 * head_dim)))
            for at, lanes in emit.columns(head_dim, vectors().lanes):
                place = emit.offset(b, row, 4 * at)
                value = emit.load(b, place, vector(F32, lanes), 4)
                value = emit.fma(b, value, emit.splat(b, change, lanes), emit.splat(b, extra, lanes))
                emit.store(b, value, place)
    b.ret_void()
    return compile_kernel(module, "softmax")


def _capped(b: ir.IRBuilder, x: Value, slope: Value, cap: Value) -> Value:
    """`cap * tanh(x)` with `slope = -2 * log2(e) / softcap`: `tanh(|y|) = (1 - e) / (1 + e)`, `e = exp(-2 |y|)`."""
    lanes = x.type.count
    sign = b.and_(b.bitcast(x, vector(I32, lanes)), constant(I32, lanes, -(2**31)))
    size = b.bitcast(b.xor(b.bitcast(x, vector(I32, lanes)), sign), x.type)
    e = emit.exp2(b, emit.maximum(b, b.fmul(size, emit.splat(b, slope, lanes)), constant(F32, lanes, emit.LEAST)))
    one = constant(F32, lanes, 1.0)
    capped = b.fmul(b.fdiv(b.fsub(one, e), b.fadd(one, e)), emit.splat(b, cap, lanes))
    return b.bitcast(b.or_(b.bitcast(capped, vector(I32, lanes)), sign), x.type)
