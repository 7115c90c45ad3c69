"""The compiled control flow of decode attention: which thread attends to which tokens, in which order."""

from __future__ import annotations

import math

import numpy as np
from numba import carray, float32, int32, int64, njit, uint16

from hf_kvcache.ops.cpu.compiled import compiled
from hf_kvcache.ops.cpu.emit import FLOOR
from hf_kvcache.ops.cpu.memory import (
    address_of,
    bits_of_float,
    bits_of_half,
    call,
    fetch_add,
    get_bfloat16,
    get_float,
    get_half,
    get_int,
    get_long,
    put_bits,
    put_float,
    put_long,
)
from hf_kvcache.ops.cpu.problem import INNER, OUTER, PROBLEM
from hf_kvcache.ops.cpu.rotation import rotate

FAST = {"contract", "reassoc", "nsz", "arcp"}
TICKET = PROBLEM.fields["call"][1] + PROBLEM["call"].fields["ticket"][1]  # type: ignore[index]
COUNTER = PROBLEM.fields["call"][1] + PROBLEM["call"].fields["counter"][1]  # type: ignore[index]
ZERO, ONE, LOW = np.float32(0), np.float32(1), np.float32(FLOOR)
LOG2E = np.float32(math.log2(math.e))
BF16, F16 = 1, 2  # query kinds; 0 is float32


@njit
def fill(at, count, value):
    for i in range(count):
        put_float(at, i, value)


@njit
def load_query(p, row, head, scratch):
    """The query rows of one KV head, scaled, as they are and rotated, and the sum of each; padding stays 0."""
    c, n = p.call, p.plan
    scale = float32(c.scale)
    for m in range(n.rows):
        place = row * c.query_row + (head * n.groups + m // n.tokens) * c.query_head + m % n.tokens * c.query_token
        q = scratch + n.at_query + 4 * m * n.query_stride
        for d in range(n.key_dim):
            if n.query_kind == BF16:
                x = get_bfloat16(c.query, place + d)
            elif n.query_kind == F16:
                x = get_half(c.query, place + d)
            else:
                x = get_float(c.query, place + d)
            put_float(q, d, x * scale)
        if n.key_rotation > 0:
            rotated = scratch + n.at_rotated + 4 * m * n.query_stride
            for d in range(n.key_dim):
                put_float(rotated, d, get_float(q, d))
            rotate(rotated, n.key_dim, n.key_rotation)
            q = rotated
        total = ZERO
        for d in range(n.key_dim):
            total += get_float(q, d)
        put_float(scratch + n.at_state, 2 * n.rows + m, total)


@njit
def see(p, start, first, end, last, windowed, scratch):
    """For a tile whose column 0 is token `start`: the columns of tokens `first .. end` that each row sees.

    last: the newest token that query token 0 sees. Returns the columns that any row sees.
    """
    n = p.plan
    lowest, highest = n.page, int64(0)
    for i in range(n.tokens):
        low, high = first, min(end, last + i + 1)
        if windowed and p.call.window > 0:
            low = max(low, last + i + 1 - p.call.window)
        low, high = low - start, high - start
        if high <= low:
            low, high = int64(0), int64(0)
        else:
            lowest, highest = min(lowest, low), max(highest, high)
        for m in range(i, n.rows, n.tokens):
            put_long(scratch + n.at_ranges, m, low)
            put_long(scratch + n.at_ranges, n.rows + m, high)
    return lowest, highest


@njit
def run_passes(side, page, head, weights, out, low, high, ahead):
    """Run the kernels of one side of a page; byte rows outside `[low, high)` are skipped where a row is one token."""
    for k in range(side.pass_count):
        at = side.passes + 64 * k
        first = get_long(at, 2)
        end = first + get_long(at, 3)
        if side.planes == 1:
            first, end = max(first, low), min(end, high)
        stride = get_long(at, 6)
        codes = get_long(at, 4) + head * get_long(at, 5) + first * stride
        w = weights + 4 * (get_long(at, 1) + first)
        o = out + 4 * get_long(at, 7)
        for _ in range(side.blocks):
            call(get_long(at, 0), (w, page + codes, end - first, stride, o, ahead + codes))
            w += 4 * side.block * side.weight_stride
            o += 4 * side.block * side.width


@njit(fastmath=FAST)
def scaled_weights(p, side, page, head, weights, out, low, high, scratch):
    """INNER: weights times the scales of each group, and what the zero points add to the group's columns."""
    n, count = p.plan, side.summed
    factor = float32(side.factor)
    for g in range(side.groups):
        scale = page + side.scale + head * side.scale_step + 2 * g * count
        zero = page + side.zero + head * side.scale_step + 2 * g * count
        for m in range(n.rows):
            given = weights + 4 * m * side.weight_stride
            scaled = scratch + n.at_weights + 4 * (g * n.padded + m) * side.weight_stride
            fill(scaled, low, ZERO)
            for i in range(low, high):
                put_float(scaled, i, get_float(given, i) * get_bfloat16(scale, i) * factor)
            fill(scaled + 4 * high, count - high, ZERO)
            if side.zero >= 0:
                extra = ZERO
                for i in range(low, high):
                    extra += get_float(given, i) * get_half(zero, i)
                sums = out + 4 * m * side.width
                for j in range(g * side.group, min((g + 1) * side.group, side.width)):
                    put_float(sums, j, get_float(sums, j) + extra)


@njit(fastmath=FAST)
def add_scaled(p, side, page, head, weights, out, scratch):
    """OUTER: add the sums of each group, times its scales, and what its zero points weigh."""
    n, width = p.plan, side.width
    factor = float32(side.factor)
    scales = page + side.scale + head * side.scale_step
    for m in range(n.rows):
        sums = out + 4 * m * width
        for k in range(side.chunk_count):
            part = scratch + n.at_parts + 4 * (k * n.padded + m) * width
            scale = scales + 2 * get_long(side.chunks, k) * width
            for j in range(width):
                put_float(sums, j, get_float(sums, j) + get_float(part, j) * get_bfloat16(scale, j) * factor)
        if side.zero >= 0:
            given = weights + 4 * m * side.weight_stride
            for g in range(side.groups):
                weight = ZERO
                for i in range(g * side.group, min((g + 1) * side.group, side.summed)):
                    weight += get_float(given, i)
                zero = page + side.zero + head * side.scale_step + 2 * g * width
                for j in range(width):
                    put_float(sums, j, get_float(sums, j) + weight * get_half(zero, j))


@njit
def multiply(p, side, page, head, weights, out, low, high, ahead, scratch):
    """`out[m] += sum_i weights[m, i] * decoded[i]` over one side of a page, `i` in `[low, high)`."""
    n = p.plan
    w, o = weights, out
    if side.mode == INNER:
        scaled_weights(p, side, page, head, weights, out, low, high, scratch)
        w = scratch + n.at_weights
    elif side.mode == OUTER:
        o = scratch + n.at_parts
        fill(o, side.chunk_count * n.padded * side.width, ZERO)
    run_passes(side, page, head, w, o, low, high, ahead)
    if side.mode == OUTER:
        add_scaled(p, side, page, head, weights, out, scratch)


@njit
def weigh(p, kernel, k_at, v_at, scratch):
    """Scores to weights: one step of the online softmax, with the token scales of a page at `k_at` and `v_at`."""
    c, n = p.call, p.plan
    ranges, state, step = scratch + n.at_ranges, scratch + n.at_state, 4 * n.rows
    k_scale, k_zero, v_scale, v_zero = k_at + n.k_scale, k_at + n.k_zero, v_at + n.v_scale, v_at + n.v_zero
    scores, sums, top, total = scratch + n.at_scores, state + 2 * step, state, state + step
    keys, values, slope, cap = (k_scale, k_zero, sums), (v_scale, v_zero), float32(c.slope), float32(c.cap)
    head = (n.rows, scores, ranges, ranges + 2 * step)
    call(kernel, head + keys + values + (top, total, scratch + n.at_out, slope, cap))


@njit
def attend_page(p, head, page, following, low, high, scratch):
    """One tile of the online softmax over an encoded page."""
    n = p.plan
    query, scores = scratch + (n.at_rotated if n.key_rotation > 0 else n.at_query), scratch + n.at_scores
    fill(scores, n.padded * n.page, ZERO)
    gap = n.value_codes - n.key_codes
    multiply(p, n.key, page, head, query, scores, int64(0), n.key_dim, page + gap, scratch)
    weigh(p, n.softmax, page + head * n.k_step, page + head * n.v_step, scratch)
    multiply(p, n.value, page, head, scores, scratch + n.at_out, low, high, following - gap, scratch)


@njit
def attend_exact(p, keys, key_stride, values, value_stride, first, end, last, windowed, scratch):
    """Exact tokens that stand one after another, a tile at a time: `first .. end`, the first of them at `keys`."""
    n = p.plan
    for start in range(first, end, n.page):
        low, high = see(p, start, start, min(start + n.page, end), last, windowed, scratch)
        if high > low:
            k_at = keys + (start - first) * key_stride
            v_at = values + (start - first + low) * value_stride
            w, o = scratch + n.at_query, scratch + n.at_scores
            for _ in range(n.exact_blocks):
                call(n.dots, (w, k_at, high, key_stride, o))
                w += 4 * n.exact_block * n.query_stride
                o += 4 * n.exact_block * n.page
            weigh(p, n.exact_softmax, int64(0), int64(0), scratch)
            w, o = scratch + n.at_scores + 4 * low, scratch + n.at_out
            for _ in range(n.exact_blocks):
                call(n.exact_product, (w, v_at, high - low, value_stride, o, v_at))
                w += 4 * n.exact_block * n.page
                o += 4 * n.exact_block * n.value_dim


@njit
def attend_pages(p, row, head, split, last, end, scratch):
    """The share of one split in the pages of a row and head; tokens `.. end`, the sinks excepted."""
    c, n = p.call, p.plan
    first = c.sink_count
    if c.window > 0:
        first = max(first, last + 1 - c.window)
    first_page, end_page = first // n.page, (end + n.page - 1) // n.page
    each = (end_page - first_page + c.splits - 1) // c.splits
    first_page += split * each
    end_page = min(end_page, first_page + each)
    if end_page <= first_page:
        return
    table = c.table + 4 * row * c.table_row
    page = get_long(c.addresses, get_int(table, first_page))
    for k in range(first_page, end_page):
        following = page
        if k + 1 < end_page:
            following = get_long(c.addresses, get_int(table, k + 1))
        start = k * n.page
        low, high = see(p, start, max(start, c.sink_count), min(start + n.page, end), last, True, scratch)
        if high > low:
            attend_page(p, head, page, following, low, high, scratch)
        page = following


@njit
def exact_part(p, part, row, head, last, length, sealed):
    """Part 0: sinks; 1 and 2: ring, cut where it wraps; 3: the call's own tokens.

    Returns the first token and the end, and the address of the first key and value.
    """
    c, n = p.call, p.plan
    k_stride, v_stride = n.exact_bytes * n.key_dim, n.exact_bytes * n.value_dim
    if part == 0:
        keys = c.sink_keys + row * c.sink_row + head * c.sink_head
        values = c.sink_values + row * c.sink_value_row + head * c.sink_value_head
        return int64(0), min(c.sink_count, length), keys, values
    if part == 3:
        end = last + n.tokens
        skipped = max(int64(0), c.new_count - end)  # left padding inside the call's own tokens
        keys = c.new_keys + row * c.new_row + head * c.new_head + skipped * c.new_token
        values = c.new_values + row * c.new_value_row + head * c.new_value_head + skipped * c.new_value_token
        return end - c.new_count + skipped, end, keys, values
    if c.ring_size == 0:
        return int64(0), int64(0), int64(0), int64(0)
    first = max(sealed, c.sink_count)
    if c.window > 0:
        first = max(first, last + 1 - c.window)
    wrap = min(length, first + c.ring_size - first % c.ring_size)
    end = wrap
    if part == 2:
        first, end = max(first, wrap), length
    slot = first % c.ring_size
    keys = c.ring_keys + row * c.ring_row + head * c.ring_head + slot * k_stride
    values = c.ring_values + row * c.ring_value_row + head * c.ring_value_head + slot * v_stride
    return first, end, keys, values


@njit
def attend_exact_parts(p, row, head, last, length, sealed, scratch):
    """Sinks, ring and the call's own tokens of a row and head."""
    c, n = p.call, p.plan
    for part in range(4):
        first, end, keys, values = exact_part(p, part, row, head, last, length, sealed)
        k_stride, v_stride = n.exact_bytes * n.key_dim, n.exact_bytes * n.value_dim
        if part == 3:
            k_stride, v_stride = c.new_token, c.new_value_token
        attend_exact(p, keys, k_stride, values, v_stride, first, end, last, part > 0, scratch)


@njit
def attend_item(p, item, scratch):
    """Attend for one (row, KV head, split): the output, or a partial result where there is more than one split."""
    c, n = p.call, p.plan
    split = item % c.splits
    head = item // c.splits % n.heads
    row = item // (c.splits * n.heads)
    load_query(p, row, head, scratch)
    state, out = scratch + n.at_state, scratch + n.at_out
    fill(state, n.rows, LOW)
    fill(state + 4 * n.rows, n.rows, ZERO)
    fill(out, n.padded * n.value_dim, ZERO)
    length = int64(get_int(c.lengths, row))
    sealed = min(int64(get_int(c.sealed, row)), length)
    last = c.columns + c.offset - n.tokens - int64(get_int(c.starts, row))
    attend_pages(p, row, head, split, last, min(sealed, last + n.tokens), scratch)
    if n.value_rotation > 0:
        for m in range(n.rows):
            rotate(out + 4 * m * n.value_dim, n.value_dim, n.value_rotation)
    if split == c.splits - 1:
        attend_exact_parts(p, row, head, last, length, sealed, scratch)
    for m in range(n.rows):
        values, top, total = out + 4 * m * n.value_dim, get_float(state, m), get_float(state, n.rows + m)
        if c.splits == 1:
            finish(p, row, head, m, values, top, total)
        else:
            partial = c.partial + 4 * (item * n.rows + m) * (n.value_dim + 2)
            for d in range(n.value_dim):
                put_float(partial, d, get_float(values, d))
            put_float(partial, n.value_dim, top)
            put_float(partial, n.value_dim + 1, total)


@njit
def to_bfloat16(value):
    """A float32 rounded to the nearest bfloat16 (ties to even), as bits."""
    if value != value:
        return uint16(0x7FC0)
    bits = bits_of_float(value)
    return uint16((bits + int32(0x7FFF) + ((bits >> int32(16)) & int32(1))) >> int32(16))


@njit(error_model="numpy")
def finish(p, row, head, m, values, top, total):
    """Normalise one row (with its attention sink, if any) and store it in the query's dtype."""
    c, n = p.call, p.plan
    query_head = head * n.groups + m // n.tokens
    factor = ONE
    if c.sinks != 0:
        sink = get_float(c.sinks, query_head) * LOG2E
        highest = max(top, sink)
        factor = float32(2.0 ** (top - highest))
        total = total * factor + float32(2.0 ** (sink - highest))
    if total > ZERO:
        factor /= total
    place = row * c.out_row + query_head * c.out_head + m % n.tokens * c.out_token
    for d in range(n.value_dim):
        x = get_float(values, d) * factor
        if n.query_kind == BF16:
            put_bits(c.out, place + d, to_bfloat16(x))
        elif n.query_kind == F16:
            put_bits(c.out, place + d, bits_of_half(x))
        else:
            put_float(c.out, place + d, x)


@njit
def merge_pair(p, pair):
    """Merge the splits of one (row, KV head) by their log-sum-exp."""
    c, n = p.call, p.plan
    out, width = c.scratch + n.at_out, n.value_dim + 2
    for m in range(n.rows):
        fill(out, n.value_dim, ZERO)
        top, total = LOW, ZERO
        first = c.partial + 4 * (pair * c.splits * n.rows + m) * width
        step = 4 * n.rows * width
        for s in range(c.splits):
            top = max(top, get_float(first + s * step, n.value_dim))
        for s in range(c.splits):
            part = first + s * step
            weight = float32(2.0 ** (get_float(part, n.value_dim) - top))
            total += weight * get_float(part, n.value_dim + 1)
            for d in range(n.value_dim):
                put_float(out, d, get_float(out, d) + weight * get_float(part, d))
        finish(p, pair // n.heads, pair % n.heads, m, out, top, total)


@compiled
def work(problem):
    """What each thread runs: take items until none is left."""
    p = carray(problem, 1, PROBLEM)[0]
    base = address_of(problem)
    scratch = p.call.scratch + fetch_add(base + TICKET) * p.plan.scratch_bytes
    item = fetch_add(base + COUNTER)
    while item < p.call.items:
        attend_item(p, item, scratch)
        item = fetch_add(base + COUNTER)


@compiled
def merge(problem):
    """After all threads are through: merge the splits."""
    p = carray(problem, 1, PROBLEM)[0]
    for pair in range(p.call.items // p.call.splits):
        merge_pair(p, pair)
