"""Append: rotate, measure, encode and scatter into pages, one pass, the same bytes as `hf_kvcache.formats`.

A program encodes the rows (tokens) of one head that go into one page: a whole page, or one token of a direct format.
The arithmetic is that of `formats.scalar` and `formats.hadamard`, step by step: IEEE division, round to nearest even,
butterflies in the same order. Launches must not fuse multiplications into additions (`enable_fp_fusion=False`).
"""

# Branches on constexpr values choose code, they are not expressions: no rewriting into ternaries or `and`.
# ruff: noqa: B007, SIM102, SIM108, SIM300

import triton
import triton.language as tl

LARGEST = tl.constexpr(2.0**100)  # what an infinity is taken for


@triton.jit
def _round(b):
    """To the nearest integer, ties to even, for magnitudes below 2**22."""
    return (b + 12582912.0) - 12582912.0


@triton.jit
def _rotate(b, R: tl.constexpr, D: tl.constexpr, STEPS: tl.constexpr, norm):
    """Butterflies along the last axis of `[R, D]`, in blocks of `2**STEPS`."""
    for i in tl.static_range(STEPS):
        low, high = tl.split(tl.permute(tl.reshape(b, (R, D >> (i + 1), 2, 1 << i)), (0, 1, 3, 2)))
        b = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2)), (R, D))
    return b * norm


@triton.jit
def _up_to_bfloat16(b):
    """Bits of non-negative float32, rounded up to bfloat16."""
    return ((b.to(tl.int32, bitcast=True) + 0xFFFF) >> 16).to(tl.uint16)


@triton.jit
def _down_to_float16(b):
    """Float32 rounded down to float16 (as float16)."""
    b = tl.minimum(tl.maximum(b, -65504.0), 65504.0)
    near = b.to(tl.float16)
    bits = near.to(tl.int16, bitcast=True)
    below = tl.where(bits > 0, bits - 1, bits + 1)
    below = tl.where((bits == 0) | (bits == -32768), -32767, below).to(tl.int16)
    return tl.where(near.to(tl.float32) > b, below, bits).to(tl.float16, bitcast=True)


@triton.jit
def _to_fp8(b, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Codes of float32 numbers within range: e4m3 (3, 7) or e5m2 (2, 15), ties to even."""
    bits = b.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    DROP: tl.constexpr = 23 - MANTISSA
    normal = ((size + ((1 << (DROP - 1)) - 1) + ((size >> DROP) & 1)) >> DROP) - ((127 - BIAS) << MANTISSA)
    LEAST: tl.constexpr = 2.0 ** (1 - BIAS)
    small = _round(tl.minimum(tl.abs(b), LEAST) * (2.0 ** (BIAS - 1 + MANTISSA))).to(tl.int32)
    code = tl.where(size < ((128 - BIAS) << 23), small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _divide(b, scale):
    return tl.div_rn(b, tl.where(scale == 0, 1.0, scale))


@triton.jit
def _codes(b, low, high, S: tl.constexpr):
    """Codes of `b` with the range `[low, high]` of its group (broadcast), and the bits of scale and zero point."""
    if S.symmetric:
        TOP: tl.constexpr = 448.0 if S.kind == "fp8_e4m3" else (57344.0 if S.kind == "fp8_e5m2" else 127.0)
        scale = _up_to_bfloat16(tl.div_rn(high, tl.full(high.shape, TOP, tl.float32)))
        zero = scale
        x = _divide(b, (scale.to(tl.int32) << 16).to(tl.float32, bitcast=True))
        x = tl.minimum(tl.maximum(x, -TOP), TOP)
        if S.kind == "fp8_e4m3":
            code = _to_fp8(x, 3, 7)
        elif S.kind == "fp8_e5m2":
            code = _to_fp8(x, 2, 15)
        else:
            code = _round(x).to(tl.int32).to(tl.uint8)
    else:
        LEVELS: tl.constexpr = 2.0**S.bits - 1.0
        zero = _down_to_float16(low)
        z = zero.to(tl.float32)
        scale = _up_to_bfloat16(tl.div_rn(high - z, tl.full(high.shape, LEVELS, tl.float32)))
        x = _round(_divide(b - z, (scale.to(tl.int32) << 16).to(tl.float32, bitcast=True)))
        code = tl.minimum(tl.maximum(x, 0.0), LEVELS).to(tl.int32).to(tl.uint8)
    return code, scale, zero


@triton.jit
def _pack(code, BITS: tl.constexpr, A: tl.constexpr, L: tl.constexpr):
    """Planar bytes `[A, L * BITS / 8]` of codes `[A, L]` below `2**BITS`."""
    N: tl.constexpr = 8 // BITS
    x = tl.permute(tl.reshape(code, (A, N, L // N)), (0, 2, 1)).to(tl.int32)
    return tl.sum(x << (tl.arange(0, N) * BITS)[None, None, :], 2).to(tl.uint8)


@triton.jit
def _encode(
    X, addr, slot, i_h, s_r, norm,
    S: tl.constexpr, R: tl.constexpr, P: tl.constexpr, D_PAD: tl.constexpr, STEPS: tl.constexpr,
    XT: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Encode rows `[R, D]` at X into slots `slot ..` of the page at `addr`."""
    o_r = tl.arange(0, R)
    o_d = tl.arange(0, D_PAD)
    m_d = (o_d < S.dim)[None, :]
    page = tl.multiple_of(addr.to(tl.pointer_type(tl.uint8)), 64)
    head = i_h.to(tl.int64) * S.dim * P
    if KEYS:
        o_x = (slot + o_r)[:, None] * S.dim + o_d[None, :]
    else:
        o_x = o_d[None, :] * P + (slot + o_r)[:, None]
    b_x = tl.load(X + o_r[:, None].to(tl.int64) * s_r + o_d[None, :], mask=m_d, other=0.0)
    if S.kind == "exact":
        tl.store((page + S.codes).to(tl.pointer_type(XT), bitcast=True) + head + o_x, b_x, mask=m_d)
    else:
        b = tl.minimum(tl.maximum(b_x.to(tl.float32), -LARGEST), LARGEST)
        if S.rotate:
            b = _rotate(b, R, D_PAD, STEPS, norm)
        # groups become an axis of their own: [R, D / G, G] a token, [R / G, G, D] a channel
        if S.per == "token":
            G: tl.constexpr = S.group if S.groups > 1 else D_PAD
            N: tl.constexpr = D_PAD // G
            b = tl.reshape(b, (R, N, G))
            m = tl.reshape(tl.broadcast_to(m_d, (R, D_PAD)), (R, N, G))
            AXIS: tl.constexpr = 2
        else:
            G: tl.constexpr = S.group
            N: tl.constexpr = R // S.group
            b = tl.reshape(b, (N, G, D_PAD))
            m = tl.reshape(tl.broadcast_to(m_d, (R, D_PAD)), (N, G, D_PAD))
            AXIS: tl.constexpr = 1
        if S.symmetric:
            high = tl.max(tl.where(m, tl.abs(b), 0.0), AXIS, keep_dims=True)
            low = high
        else:
            high = tl.max(tl.where(m, b, -float("inf")), AXIS, keep_dims=True)
            low = tl.min(tl.where(m, b, float("inf")), AXIS, keep_dims=True)
            high = tl.where(high < low, 0.0, high)
            low = tl.where(low == float("inf"), 0.0, low)
            if S.clip < 1.0:
                margin = (high - low) * ((1.0 - S.clip) / 2)
                low = low + margin
                high = high - margin
        code, scale, zero = _codes(b, low, high, S)
        code = tl.reshape(code, (R, D_PAD))
        p_s = (page + S.scale).to(tl.pointer_type(tl.uint16), bitcast=True)
        p_z = (page + S.zero).to(tl.pointer_type(tl.float16), bitcast=True)
        if S.per == "token":
            o_g = tl.arange(0, N)[None, :]
            o_s = (i_h * S.groups + o_g) * P + (slot + o_r)[:, None]
            m_s = tl.broadcast_to(o_g < S.groups, (R, N))
            tl.store(p_s + o_s, tl.reshape(scale, (R, N)), mask=m_s)
            if not S.symmetric:
                tl.store(p_z + o_s, tl.reshape(zero, (R, N)), mask=m_s)
        else:
            o_g = tl.arange(0, R // S.group)[:, None]
            o_s = (i_h * S.groups + o_g) * S.dim + o_d[None, :]
            m_s = tl.broadcast_to(m_d, (N, D_PAD))
            tl.store(p_s + o_s, tl.reshape(scale, (N, D_PAD)), mask=m_s)
            if not S.symmetric:
                tl.store(p_z + o_s, tl.reshape(zero, (N, D_PAD)), mask=m_s)
        if S.bits == 8:
            tl.store(page + S.codes + head + o_x, code, mask=m_d)
        else:
            A: tl.constexpr = R if KEYS else D_PAD
            L: tl.constexpr = D_PAD if KEYS else R
            if not KEYS:
                code = tl.trans(code)
            LOW: tl.constexpr = 2 if S.bits == 3 else S.bits
            W: tl.constexpr = L * LOW // 8
            o_a = tl.arange(0, A)[:, None]
            m_a = (o_a < (R if KEYS else S.dim)) & (tl.arange(0, W)[None, :] >= 0)
            p_0 = page + S.codes + i_h.to(tl.int64) * ((P if KEYS else S.dim) * W)
            tl.store(p_0 + o_a * W + tl.arange(0, W)[None, :], _pack(code & (2**LOW - 1), LOW, A, L), mask=m_a)
            if S.bits == 3:
                V: tl.constexpr = L // 8
                p_1 = page + S.codes1 + i_h.to(tl.int64) * ((P if KEYS else S.dim) * V)
                m_v = (o_a < (R if KEYS else S.dim)) & (tl.arange(0, V)[None, :] >= 0)
                tl.store(p_1 + o_a * V + tl.arange(0, V)[None, :], _pack(code >> 2, 1, A, L), mask=m_v)


@triton.jit
def append_rows(
    KEYS, VALUES, ADDRESSES, SLOTS, s_k0, s_k1, s_k2, s_v0, s_v1, s_v2, norm_k, norm_v,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, P: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    K_STEPS: tl.constexpr, V_STEPS: tl.constexpr, XT: tl.constexpr,
):  # fmt: skip
    """Grid (N, heads, 2), keys then values: rows `[N, H, R, D]` into slots `SLOTS[n] ..` of page `ADDRESSES[n]`."""
    i_n = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1)
    addr = tl.load(ADDRESSES + i_n)
    slot = 0 if R == P else tl.load(SLOTS + i_n)
    if tl.program_id(2) == 0:
        p = KEYS + i_n * s_k0 + i_h.to(tl.int64) * s_k1
        _encode(p, addr, slot, i_h, s_k2, norm_k, K, R, P, DK_PAD, K_STEPS, XT, True)
    else:
        p = VALUES + i_n * s_v0 + i_h.to(tl.int64) * s_v1
        _encode(p, addr, slot, i_h, s_v2, norm_v, V, R, P, DV_PAD, V_STEPS, XT, False)
