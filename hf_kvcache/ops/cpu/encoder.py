"""Compiled encoding of tokens into pages: rotate, measure, encode, pack, write.

Step by step the arithmetic of `formats`, one IEEE operation each, so that the bytes are the same: nothing here may be
reordered or contracted.
"""

from __future__ import annotations

import numpy as np
from numba import carray, float32, int32, int64, njit, uint8, uint16

from hf_kvcache.formats.pages import LARGEST
from hf_kvcache.formats.scalar import HALF_MAX
from hf_kvcache.ops.cpu.compiled import compiled
from hf_kvcache.ops.cpu.memory import (
    bits_of_float,
    bits_of_half,
    float_of_bits,
    get_bfloat16,
    get_bits,
    get_byte,
    get_float,
    get_half,
    get_int,
    get_long,
    put_bits,
    put_byte,
    put_float,
    put_int,
)
from hf_kvcache.ops.cpu.problem import APPEND
from hf_kvcache.ops.cpu.rotation import rotate

EXACT, INT, E4M3, E5M2 = 0, 1, 2, 3  # kinds
FLOAT32, BFLOAT16 = 0, 1  # how numbers are stored; anything else is float16
TOP = np.array([0.0, 127.0, 448.0, 57344.0], np.float32)
ZERO, ONE = np.float32(0), np.float32(1)


@njit
def read(s, at, index):
    """One stored number as a float32, infinities as a large finite one."""
    if s.stored == FLOAT32:
        x = get_float(at, index)
    elif s.stored == BFLOAT16:
        x = get_bfloat16(at, index)
    else:
        x = get_half(at, index)
    return min(max(x, float32(-LARGEST)), float32(LARGEST))


@njit
def ceil_bfloat16(x):
    """A float32 that is not negative, rounded up to bfloat16, as bits."""
    return uint16((bits_of_float(x) + int32(0xFFFF)) >> int32(16))


@njit
def write_zero(at, index, x):
    """Store a float32 rounded down to float16; what was stored."""
    x = min(max(x, float32(-HALF_MAX)), float32(HALF_MAX))
    bits = bits_of_half(x)
    put_bits(at, index, bits)
    near = get_half(at, index)
    if near > x:
        if (bits & uint16(0x7FFF)) == uint16(0):
            bits = uint16(0x8001)
        elif bits < uint16(0x8000):
            bits = uint16(bits - uint16(1))
        else:
            bits = uint16(bits + uint16(1))
        put_bits(at, index, bits)
        near = get_half(at, index)
    return near


@njit
def to_fp8(x, digits, bias, least):
    """The fp8 code of an in-range float32, ties to even. digits: of the mantissa; least: smallest normal number."""
    bits = bits_of_float(x)
    sign = uint8((bits >> int32(24)) & int32(0x80))
    size = float_of_bits(bits & int32(0x7FFFFFFF))
    if size < least:  # a sum whose last bit is worth the smallest subnormal
        magic = least * float32(2.0 ** (23 - digits))
        return uint8(bits_of_float(size + magic) - bits_of_float(magic)) | sign
    drop = int32(23 - digits)
    bits = bits_of_float(size)
    bits += (int32(1) << (drop - int32(1))) - int32(1) + ((bits >> drop) & int32(1))
    return uint8((bits - (int32(127 - bias) << int32(23))) >> drop) | sign


@njit(error_model="numpy")
def code_of(s, x, divisor, top):
    """The code of one number, its zero point taken off."""
    x = x / divisor
    if s.symmetric == 0:
        return uint8(min(max(np.rint(x), ZERO), top))
    x = min(max(x, -top), top)
    if s.kind == INT:
        return uint8(int32(np.rint(x)) & int32(0xFF))
    if s.kind == E4M3:
        return to_fp8(x, 3, 7, float32(2.0**-6))
    return to_fp8(x, 2, 15, float32(2.0**-14))


@njit(error_model="numpy")
def encode_group(s, tile, first, step, count, codes, page_scale, page_zero, index):
    """Measure and encode `count` numbers of a tile; scale and zero point go to the page, codes beside the tile."""
    low = high = get_float(tile, first)
    for i in range(1, count):
        x = get_float(tile, first + i * step)
        low, high = min(low, x), max(high, x)
    if s.symmetric:
        top, zero = TOP[s.kind], ZERO
        span = max(abs(low), abs(high))
    else:
        top = float32((int64(1) << s.bits) - 1)
        if s.clip < 1.0:
            margin = (high - low) * float32((1.0 - s.clip) / 2)
            low, high = low + margin, high - margin
        zero = write_zero(page_zero, index, low)
        span = high - zero
    put_bits(page_scale, index, ceil_bfloat16(span / top))
    divisor = get_bfloat16(page_scale, index)
    if divisor == ZERO:
        divisor = ONE
    for i in range(count):
        at = first + i * step
        put_byte(codes, at, code_of(s, get_float(tile, at) - zero, divisor, top))


@njit(error_model="numpy")
def steer_token(s, head, tile, codes, first, scale, zero, behind):
    """Codes of one token (scales per channel at `scale`, `zero`) as `formats.steering.steer` rounds them."""
    top = float32((int64(1) << s.bits) - 1)
    for k in range(s.rank):
        put_float(behind, k, ZERO)
    for d in range(s.dim):
        vector = s.steer + 4 * 2 * s.rank * (head * s.dim + d)
        take = ZERO
        for k in range(s.rank):
            take = take - get_float(vector, s.rank + k) * get_float(behind, k)
        step, low, x = get_bfloat16(scale, d), get_half(zero, d), get_float(tile, first + d)
        take = min(max(take, -step), step)
        divisor = ONE if step == ZERO else step
        code = min(max(np.rint((x + take - low) / divisor), ZERO), top)
        error = code * step + low - x
        for k in range(s.rank):
            put_float(behind, k, get_float(behind, k) + error * get_float(vector, k))
        put_byte(codes, first + d, uint8(code))


@njit(error_model="numpy")
def encode_tile(s, page_size, page, head, slot, tokens, tile, codes):
    """Encode `tokens` x `dim` float32 numbers that will stand from `slot` on; codes `[tokens, dim]` beside the tile."""
    scale = page + s.scale + head * s.scale_head
    zero = page + s.zero + head * s.scale_head
    if s.rotation > 0:
        for t in range(tokens):
            rotate(tile + 4 * t * s.dim, s.dim, s.rotation)
    outer, inner, index = tokens, s.dim, page_size
    outer_step, inner_step = s.dim, int64(1)
    if s.per_channel:
        outer, inner, index = s.dim, tokens, s.dim
        outer_step, inner_step = int64(1), s.dim
    for o in range(outer):
        for g in range(s.groups):
            at = g * s.group
            count = min(s.group, inner - at)
            place = g * index + o + (int64(0) if s.per_channel else slot)
            encode_group(s, tile, o * outer_step + at * inner_step, inner_step, count, codes, scale, zero, place)
    if s.steer != 0:
        for t in range(tokens):
            at = 2 * (t // s.group) * s.dim
            steer_token(s, head, tile, codes, t * s.dim, scale + at, zero + at, codes + page_size * s.dim)


@njit
def pack(s, page_size, at, width, shift, codes):
    """Pack `width` bits of each code of a whole page into planes along the summed axis."""
    summed, other = (s.dim, page_size) if s.is_key else (page_size, s.dim)
    summed_step, other_step = (int64(1), s.dim) if s.is_key else (s.dim, int64(1))
    planes = 8 // width
    rows = (summed + planes - 1) // planes
    mask = (int64(1) << width) - 1
    for i in range(rows):
        for j in range(other):
            byte = int64(0)
            for p in range(planes):
                k = i + p * rows
                if k < summed:
                    byte |= ((int64(get_byte(codes, k * summed_step + j * other_step)) >> shift) & mask) << (width * p)
            put_byte(at, i * other + j, uint8(byte))


@njit
def write_token(r, s, n):
    """Encode one token of all heads into its slot (formats with one code a byte)."""
    row, column, slot = get_long(r.rows, n), get_long(r.columns, n), get_long(r.slots, n)
    page = get_long(r.addresses, get_long(r.pages, n))
    codes = r.scratch + 4 * s.dim
    for head in range(r.heads):
        source = row * s.new_row + head * s.new_head + column * s.new_token
        at = page + s.codes + head * s.codes_head
        first, step = (slot, r.page) if s.is_key else (slot * s.dim, int64(1))
        if s.kind == EXACT:
            for d in range(s.dim):
                if s.stored == FLOAT32:
                    put_int(at, first + d * step, get_int(s.new, source + d))
                else:
                    put_bits(at, first + d * step, get_bits(s.new, source + d))
        else:
            for d in range(s.dim):
                put_float(r.scratch, d, read(s, s.new, source + d))
            encode_tile(s, r.page, page, head, slot, int64(1), r.scratch, codes)
            for d in range(s.dim):
                put_byte(at, first + d * step, get_byte(codes, d))


@njit
def write_page(r, s, n):
    """Encode one whole page of all heads, its tokens taken from the ring and from the call's own."""
    row, page = get_long(r.rows, n), get_long(r.addresses, get_long(r.pages, n))
    codes = r.scratch + 4 * s.dim * r.page
    for head in range(r.heads):
        at = page + s.codes + head * s.codes_head
        for t in range(r.page):
            place = get_long(r.columns, n * r.page + t)
            base, source = s.ring, row * s.ring_row + head * s.ring_head + place * s.ring_token
            if place >= r.ring_size:
                base, source = s.new, row * s.new_row + head * s.new_head + (place - r.ring_size) * s.new_token
            for d in range(s.dim):
                if s.kind != EXACT:
                    put_float(r.scratch, t * s.dim + d, read(s, base, source + d))
                else:
                    target = d * r.page + t if s.is_key else t * s.dim + d
                    if s.stored == FLOAT32:
                        put_int(at, target, get_int(base, source + d))
                    else:
                        put_bits(at, target, get_bits(base, source + d))
        if s.kind != EXACT:
            encode_tile(s, r.page, page, head, int64(0), r.page, r.scratch, codes)
            pack(s, r.page, at, int64(2) if s.bits == 3 else s.bits, int64(0), codes)
            if s.bits == 3:
                pack(s, r.page, page + s.more + head * s.more_head, int64(1), int64(2), codes)


@compiled
def write_tokens(record):
    """Encode `count` tokens into their slots."""
    r = carray(record, 1, APPEND)[0]
    for n in range(r.count):
        write_token(r, r.key, n)
        write_token(r, r.value, n)


@compiled
def write_pages(record):
    """Encode `count` whole pages."""
    r = carray(record, 1, APPEND)[0]
    for n in range(r.count):
        write_page(r, r.key, n)
        write_page(r, r.value, n)
