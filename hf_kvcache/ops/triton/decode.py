"""Split-KV decode attention on pages: one kernel for every format, and the merge of its splits.

A program owns `rows` query rows of one KV head (query heads times query tokens, packed), in one split of
one sequence. Splits `0 .. page_splits - 1` share the pages; the last split, if there is one, reads the
exact tokens around them (sinks, ring, new). Scores live in base 2; probabilities are held `2**LIFT` times
their value, so that float16 keeps small ones. KV tiles are never scaled: key scales go into the scores
(per token) or into q (per channel), value scales into p (per token) or into the result (per channel),
zero points in as `z * sum(q)` and `sum(p * z)`.

Names: i_* program indices, o_* offsets, p_* pointers, b_* blocks in registers, m_* masks.
"""

# Branches on constexpr values choose code, they are not expressions: no rewriting into ternaries or `and`.
# ruff: noqa: B007, SIM102, SIM108, SIM300

import triton
import triton.language as tl

from .codes import join_columns, planes_of, split_planes

LIFT = tl.constexpr(12.0)


@triton.jit
def _address(ADDRESSES, TABLE, i_page):
    """Address of a sequence's page `i_page`."""
    return tl.load(ADDRESSES + tl.load(TABLE + i_page))


@triton.jit
def _field(addr, offset: tl.constexpr, ET: tl.constexpr):
    """Pointer to a field of the page at `addr`; pages and fields start on cache lines."""
    page = tl.multiple_of(addr.to(tl.pointer_type(tl.uint8)), 64)
    return (page + offset).to(tl.pointer_type(ET), bitcast=True)


@triton.jit
def _load(p, m, FULL: tl.constexpr):
    """Load, without the mask where it is known to be true everywhere."""
    if FULL:
        b = tl.load(p)
    else:
        b = tl.load(p, mask=m, other=0)
    return b


@triton.jit
def _pairs(p, o_pair, m, FULL: tl.constexpr):
    """Scales or zero points as float32 `[2n]`, loaded two at a time: asynchronous copies move 4 bytes or more."""
    b = _load(p.to(tl.pointer_type(tl.uint32), bitcast=True) + o_pair, m, FULL)
    if p.dtype.element_ty == tl.bfloat16:
        low = (b << 16).to(tl.float32, bitcast=True)
        high = (b & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        low = (b & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (b >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.interleave(low, high)


@triton.jit
def _rotated(b_q, ROT, o_col, m_col, D: tl.constexpr, D_PAD: tl.constexpr, norm, IP: tl.constexpr):
    """Columns `o_col` of q times the rotation; `ROT` holds 0 and +-1, so that the products are exact."""
    o_d = tl.arange(0, D_PAD)
    b_r = tl.load(ROT + o_d[:, None] * D + o_col[None, :], mask=(o_d < D)[:, None] & m_col[None, :], other=0.0)
    return tl.dot(b_q, b_r, input_precision=IP) * norm


@triton.jit
def _queries(p_q, m_row, ROT, q_factor, norm, K: tl.constexpr, D_PAD: tl.constexpr, KT: tl.constexpr, IP: tl.constexpr):
    """q, cut as the keys are: a tile `[rows, block]` for each block and plane, and each group's sum of q."""
    if K.rotate:
        o_d = tl.arange(0, D_PAD)
        b_all = tl.load(p_q[:, None] + o_d[None, :], mask=m_row[:, None] & (o_d < K.dim)[None, :], other=0.0)
    o_w = tl.arange(0, K.block_pad)
    m_w = o_w < K.block
    b_qs = ()
    sums = ()
    GROUPS: tl.constexpr = K.groups if K.per == "token" else 1
    BLOCKS: tl.constexpr = K.blocks
    PLANES: tl.constexpr = K.planes
    for g in tl.static_range(GROUPS):
        sums = sums + (tl.zeros((p_q.shape[0],), tl.float32),)
    for j in tl.static_range(BLOCKS):
        for i in tl.static_range(PLANES):
            o_c = i * K.row + j * K.block + o_w
            if K.rotate:
                b_q = _rotated(b_all, ROT, o_c, m_w, K.dim, D_PAD, norm, IP)
            else:
                b_q = tl.load(p_q[:, None] + o_c[None, :], mask=m_row[:, None] & m_w[None, :], other=0.0)
            b_q = b_q.to(tl.float32) * q_factor
            if K.per == "channel":
                b_qs = b_qs + (b_q,)
            else:
                b_q = b_q * K.up[i]
                if KT == tl.float16:
                    b_q = tl.minimum(tl.maximum(b_q, -65504.0), 65504.0)
                b_q = b_q.to(KT)
                b_qs = b_qs + (b_q,)
                if not K.symmetric or K.bias != 0.0:
                    b_sum = tl.sum(b_q.to(tl.float32), 1) * (1.0 / K.up[i])
                    new = ()
                    for g in tl.static_range(GROUPS):
                        if g == K.member[j * PLANES + i]:
                            new = new + (sums[g] + b_sum,)
                        else:
                            new = new + (sums[g],)
                    sums = new
    return b_qs, sums


@triton.jit
def _load_codes(p_codes, p_codes1, o_r, o_c, m, FULL: tl.constexpr, ROW: tl.constexpr, S: tl.constexpr):
    """Stored elements `[r, c]` of rows of ROW elements, and the third bits of 3-bit codes."""
    b_x = _load(p_codes + (o_r * ROW)[:, None] + o_c[None, :], m, FULL)
    b_y = b_x
    if S.kind == "int" and S.bits == 3:
        HALF: tl.constexpr = ROW // 2
        b_y = _load(p_codes1 + (o_r * HALF)[:, None] + (o_c % HALF)[None, :], m, FULL)
        b_y = b_y >> (o_c // HALF).to(tl.uint8)[None, :]
    return b_x, b_y


@triton.jit
def _page_scores(
    addr, i_h, o_t, o_2, c0, b_qs, sums,
    K: tl.constexpr, T: tl.constexpr, XT: tl.constexpr, KT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """Scores `[rows, tokens]`, in base 2, of the tokens `o_t` of the page at `addr`."""
    UNIT: tl.constexpr = K.unit * 2.0**-K.center
    ET: tl.constexpr = XT if K.kind == "exact" else tl.uint8
    head = i_h.to(tl.int64) * T.page * K.row
    p_codes = _field(addr, K.codes, ET) + head
    p_codes1 = _field(addr, K.codes1, ET) + head // 2
    p_scale = _field(addr, K.scale, tl.bfloat16)
    p_zero = _field(addr, K.zero, tl.float16)
    o_w = tl.arange(0, K.block_pad)
    m_w = o_w < K.block
    o_w2 = tl.arange(0, K.block_pad // 2)
    m_w2 = 2 * o_w2 < K.block
    FULL: tl.constexpr = K.block == K.block_pad
    BLOCKS: tl.constexpr = K.blocks
    PLANES: tl.constexpr = K.planes
    GROUPS: tl.constexpr = K.groups
    PAD: tl.constexpr = K.block_pad
    PARTS: tl.constexpr = max(1, T.tokens // K.group) if K.per == "channel" else 1
    N: tl.constexpr = T.tokens // PARTS
    parts = ()
    for s in tl.static_range(PARTS):
        o_r = o_t if PARTS == 1 else c0 + s * N + tl.arange(0, N)
        b_s = tl.zeros((b_qs[0].shape[0], N), tl.float32)
        if K.per == "token":
            o_g = i_h * K.groups * (T.page // 2) + o_2
        elif K.per == "channel":
            o_g = (i_h * K.groups + (c0 + s * N) // K.group) * K.dim
            b_0 = tl.zeros((b_qs[0].shape[0], PAD), tl.float32)
        for j in tl.static_range(BLOCKS):
            o_c = j * K.block + o_w
            b_x, b_y = _load_codes(p_codes, p_codes1, o_r, o_c, m_w[None, :], FULL, K.row, K)
            tiles = planes_of(b_x, b_y, K, KT)
            for i in tl.static_range(PLANES):
                b_k = tl.trans(tiles[i])
                if K.per == "none":
                    b_s = tl.dot(b_qs[j * K.planes + i], b_k, b_s, input_precision=IP)
                elif K.per == "channel":
                    o_d = (o_g + i * K.row + j * K.block) // 2 + o_w2
                    b_f = _pairs(p_scale, o_d, m_w2, FULL)
                    b_q = (b_qs[j * K.planes + i] * (b_f * K.up[i])[None, :]).to(KT)
                    b_s = tl.dot(b_q, b_k, b_s, input_precision=IP)
                    # what does not depend on the token is gathered apart, so that the dots follow one another
                    if K.bias != 0.0:
                        b_0 -= b_q.to(tl.float32) * K.bias
                    if not K.symmetric:
                        b_0 += b_qs[j * K.planes + i] * (_pairs(p_zero, o_d, m_w2, FULL) * (1.0 / UNIT))[None, :]
                else:
                    if K.groups == 1:
                        if i == 0 and j == 0:
                            b_d = _start(sums[0], K, N)
                        b_d = tl.dot(b_qs[j * K.planes + i], b_k, b_d, input_precision=IP)
                        if i == K.planes - 1 and j == K.blocks - 1:
                            b_s = _scaled(b_d, b_s, sums[0], p_scale, p_zero, o_g, K, UNIT)
                    else:
                        # a group of channels: its blocks may be spread over planes, so each block adds its share
                        b_d = tl.dot(b_qs[j * K.planes + i], b_k, input_precision=IP)
                        b_f = _pairs(p_scale, o_g + K.member[j * PLANES + i] * (T.page // 2), o_g, True)
                        b_s += b_d * b_f[None, :]
        if K.per == "token" and K.groups > 1:
            for g in tl.static_range(GROUPS):
                if K.bias != 0.0:
                    b_f = _pairs(p_scale, o_g + g * (T.page // 2), o_g, True)
                    b_s -= (sums[g] * (K.bias * 2.0**K.center))[:, None] * b_f[None, :]
                if not K.symmetric:
                    b_z = _pairs(p_zero, o_g + g * (T.page // 2), o_g, True) * (1.0 / UNIT)
                    b_s += sums[g][:, None] * b_z[None, :]
        if K.per == "channel" and (K.bias != 0.0 or not K.symmetric):
            b_s += tl.sum(b_0, 1)[:, None]
        parts = parts + (b_s,)
    b_s = join_columns(parts, PARTS)
    if UNIT != 1.0 and not (K.per == "token" and K.groups == 1):
        b_s = b_s * UNIT
    return b_s


@triton.jit
def _start(b_sum, K: tl.constexpr, N: tl.constexpr):
    """What a score tile starts from: minus the codes' offset times the sum of q."""
    b = b_sum * (-K.bias * 2.0**K.center)
    return tl.broadcast_to(b[:, None], (b_sum.shape[0], N))


@triton.jit
def _scaled(b_d, b_s, b_sum, p_scale, p_zero, o_g, K: tl.constexpr, UNIT: tl.constexpr):
    """Scores from a dot of codes: one scale (and zero point) for each token."""
    b_f = _pairs(p_scale, o_g, o_g, True) * UNIT
    b_s = b_d * b_f[None, :]
    if not K.symmetric:
        b_z = _pairs(p_zero, o_g, o_g, True)
        b_s += b_sum[:, None] * b_z[None, :]
    return b_s


@triton.jit
def _soft(b_s, b_m, b_l, cap, m_ok, SOFTCAP: tl.constexpr, MASKED: tl.constexpr):
    """One step of the online softmax: probabilities, and the factor for what was gathered before."""
    if SOFTCAP:
        b_s = cap * (1.0 - 2.0 / (tl.exp2(b_s) + 1.0))
    if MASKED:
        b_s = tl.where(m_ok, b_s, -float("inf"))
    b_new = tl.maximum(b_m, tl.max(b_s, 1))
    b_ref = tl.where(b_new == -float("inf"), 0.0, b_new) if MASKED else b_new
    b_p = tl.exp2(b_s - (b_ref - LIFT)[:, None])
    b_a = tl.exp2(b_m - b_ref)
    return b_p, b_a, b_new, b_l * b_a + tl.sum(b_p, 1)


@triton.jit
def _page_values(
    addr, i_h, o_2, c0, b_p, b_a, m_t, accs, refs, zs,
    V: tl.constexpr, T: tl.constexpr, XT: tl.constexpr, VT: tl.constexpr, IP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add `p @ V` of a tile to `accs` (units of `refs`), and what zero points and offsets add to `zs`."""
    ET: tl.constexpr = XT if V.kind == "exact" else tl.uint8
    N: tl.constexpr = T.tokens // V.planes
    SIZE: tl.constexpr = V.group if V.per == "token" else V.dim
    head = i_h.to(tl.int64) * V.dim * V.row
    p_codes = _field(addr, V.codes, ET) + head
    p_codes1 = _field(addr, V.codes1, ET) + head // 2
    p_scale = _field(addr, V.scale, tl.bfloat16)
    p_zero = _field(addr, V.zero, tl.float16)
    o_n = c0 + tl.arange(0, N)
    o_d = tl.arange(0, V.group_pad)
    m_d = o_d < SIZE
    o_d2 = tl.arange(0, V.group_pad // 2)
    m_d2 = 2 * o_d2 < SIZE
    FULL: tl.constexpr = V.group_pad == SIZE
    PLANES: tl.constexpr = V.planes
    TOKENS: tl.constexpr = T.tokens
    GROUPS: tl.constexpr = len(accs)
    new_accs = ()
    new_refs = ()
    new_zs = ()
    for g in tl.static_range(GROUPS):
        b_x, b_y = _load_codes(p_codes, p_codes1, g * SIZE + o_d, o_n, m_d[:, None], FULL, V.row, V)
        tiles = planes_of(b_x, b_y, V, VT)
        b_w = b_p
        b_r = refs[g]
        b_c = b_a
        b_z = zs[g]
        if V.per == "token":
            o_g = (i_h * V.groups + g) * (T.page // 2) + o_2
            b_f = _pairs(p_scale, o_g, o_g, True)
            if not V.symmetric:
                b_0 = _pairs(p_zero, o_g, o_g, True)
                # only loads that feed a dot product are pipelined: let the scales depend on the zero points
                b_f = tl.where(b_0 == b_0, b_f, 0.0)
            if MASKED:
                b_f = tl.where(m_t, b_f, 0.0)
            b_r = tl.maximum(b_r, tl.max(b_f, 0))
            inv = 1.0 / b_r
            b_c = b_a * (refs[g] * inv)
            if V.down[V.planes - 1] != 1.0:
                plane = tl.arange(0, T.tokens) // N
                down = tl.full((TOKENS,), 1.0, tl.float32)
                for i in tl.static_range(1, PLANES):
                    down = tl.where(plane == i, V.down[i], down)
                b_w = b_p * (b_f * (down * inv))[None, :]
            else:
                b_w = b_p * (b_f * inv)[None, :]
            if not V.symmetric:
                if MASKED:
                    b_0 = tl.where(m_t, b_0, 0.0)
                b_z = b_z * b_a + tl.sum(b_p * b_0[None, :], 1)
            if V.bias != 0.0:
                b_z = b_z * b_c + tl.sum(b_w.to(VT).to(tl.float32), 1)
        b_acc = accs[g] * b_c[:, None]
        ps = split_planes(b_w.to(VT), V.planes)
        if V.per == "channel":
            b_o = tl.zeros(b_acc.shape, tl.float32)
            b_u = tl.zeros(b_p.shape[0:1], tl.float32)
        for i in tl.static_range(PLANES):
            b_v = tiles[i]
            if MASKED and V.kind != "int":
                b_v = tl.where(m_t[None, :], b_v, 0.0)
            if V.per == "channel":
                b_i = (ps[i].to(tl.float32) * V.down[i]).to(VT)
                b_o = tl.dot(b_i, tl.trans(b_v), b_o, input_precision=IP)
                b_u += tl.sum(ps[i].to(tl.float32), 1)
            else:
                b_acc = tl.dot(ps[i], tl.trans(b_v), b_acc, input_precision=IP)
        if V.per == "channel":
            b_f = _pairs(p_scale, i_h * (V.dim // 2) + o_d2, m_d2, FULL)
            b_o = b_o - (b_u * V.bias)[:, None]
            b_acc += b_o * b_f[None, :]
            if not V.symmetric:
                b_0 = _pairs(p_zero, i_h * (V.dim // 2) + o_d2, m_d2, FULL)
                b_acc += (b_u * (1.0 / V.unit))[:, None] * b_0[None, :]
        new_accs = new_accs + (b_acc,)
        new_refs = new_refs + (b_r,)
        new_zs = new_zs + (b_z,)
    return new_accs, new_refs, new_zs


@triton.jit
def _page_tile(
    addr, i_h, part, i_page, b_pos, first_key, last_key, window, sinks, cap, b_qs, sums, b_m, b_l, accs, refs, zs,
    K: tl.constexpr, V: tl.constexpr, T: tl.constexpr, XT: tl.constexpr, KT: tl.constexpr, VT: tl.constexpr,
    IP: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to tile `part` of one page. Its tokens come in the order in which the value planes need them."""
    N: tl.constexpr = T.tokens // V.planes
    o_x = tl.arange(0, T.tokens)
    o_x2 = 2 * tl.arange(0, T.tokens // 2)
    if T.tokens == T.page:
        c0 = 0
        o_t = o_x
        o_2 = o_x2 // 2
    else:
        c0 = part * N
        o_t = (o_x // N) * V.row + c0 + o_x % N
        o_2 = ((o_x2 // N) * V.row + c0 + o_x2 % N) // 2
    b_s = _page_scores(addr, i_h, o_t, o_2, c0, b_qs, sums, K, T, XT, KT, IP)
    m_t = o_x >= 0
    m_ok = m_t[None, :]
    if MASKED:
        o_k = i_page * T.page + o_t
        m_t = (o_k >= first_key) & (o_k < last_key) & (o_k >= sinks)
        m_ok = m_t[None, :] & (o_k[None, :] <= b_pos[:, None])
        if WINDOW:
            m_ok = m_ok & (o_k[None, :] > b_pos[:, None] - window)
    b_p, b_a, b_m, b_l = _soft(b_s, b_m, b_l, cap, m_ok, SOFTCAP, MASKED)
    accs, refs, zs = _page_values(addr, i_h, o_2, c0, b_p, b_a, m_t, accs, refs, zs, V, T, XT, VT, IP, MASKED)
    return b_m, b_l, accs, refs, zs


@triton.jit
def _store(
    accs, b_m, b_l, ROT, norm, p_o, p_l, m_row,
    V: tl.constexpr, RT: tl.constexpr, ROTATE: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """Write a split's output, out of the rotated basis, and its log-sum-exp in base 2 (-inf: nothing read)."""
    live = b_l > 0
    inv = tl.where(live, 1.0 / tl.where(live, b_l, 1.0), 0.0)
    tl.store(p_l, tl.where(live, b_m - LIFT + tl.log2(tl.where(live, b_l, 1.0)), -float("inf")), mask=m_row)
    m_out = (m_row & live)[:, None]
    o_d = tl.arange(0, PAD)
    GROUPS: tl.constexpr = len(accs)
    if ROTATE:
        COLS: tl.constexpr = min(64, PAD)
        o_n = tl.arange(0, COLS)
        for n in tl.range(0, V.dim, COLS, num_stages=1):
            m_n = n + o_n < V.dim
            b_o = tl.zeros((b_m.shape[0], COLS), tl.float32)
            for g in tl.static_range(GROUPS):
                b_acc = accs[g] * inv[:, None]
                o_r = g * SIZE + o_d
                m_r = (o_d < SIZE)[:, None] & m_n[None, :]
                b_r = tl.load(ROT + (n + o_n)[None, :] * V.dim + o_r[:, None], mask=m_r, other=0.0)
                b_hi = b_acc.to(RT)
                b_o = tl.dot(b_hi, b_r, b_o, input_precision=IP)
                if RT != tl.float32:
                    b_o = tl.dot((b_acc - b_hi.to(tl.float32)).to(RT), b_r, b_o, input_precision=IP)
            tl.store(p_o[:, None] + n + o_n[None, :], b_o * norm, mask=m_out & m_n[None, :])
    else:
        for g in tl.static_range(GROUPS):
            m_d = (o_d < SIZE)[None, :]
            tl.store(p_o[:, None] + g * SIZE + o_d[None, :], accs[g] * inv[:, None], mask=m_out & m_d)


@triton.jit
def _pages(
    p_q, m_row, b_pos, TABLE, ADDRESSES, ROT_K, ROT_V, p_o, p_l,
    i_h, i_s, splits, n_sealed, first_q, n_q, q_factor, cap, norm_k, norm_v, window, sinks,
    K: tl.constexpr, V: tl.constexpr, T: tl.constexpr, XT: tl.constexpr, KT: tl.constexpr, VT: tl.constexpr,
    DK_PAD: tl.constexpr, IP: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """A split of the pages: tiles that some query may not read in full first, then the others unmasked."""
    b_qs, sums = _queries(p_q, m_row, ROT_K, q_factor, norm_k, K, DK_PAD, KT, IP)
    # a unit is a page, or a tile where tiles of a page are runs of tokens
    UNIT: tl.constexpr = T.tokens if V.planes == 1 else T.page
    TILES: tl.constexpr = UNIT // T.tokens
    IN_PAGE: tl.constexpr = T.page // T.tokens
    last_key = tl.minimum(n_sealed, first_q + n_q)
    first_key = sinks
    whole_from = sinks
    if WINDOW:
        first_key = tl.maximum(sinks, first_q - window + 1)
        whole_from = tl.maximum(sinks, first_q + n_q - window)
    u0 = first_key // UNIT
    u1 = tl.maximum(tl.cdiv(last_key, UNIT), u0)
    per = tl.maximum(tl.cdiv(u1 - u0, splits), tl.cdiv(256, UNIT))
    lo = tl.minimum(u0 + i_s * per, u1)
    hi = tl.minimum(lo + per, u1)
    a = tl.minimum(tl.maximum(tl.cdiv(whole_from, UNIT), lo), hi)
    z = tl.maximum(tl.minimum(tl.minimum(n_sealed, first_q + 1) // UNIT, hi), a)

    GROUPS: tl.constexpr = V.groups if V.per == "token" else 1
    SIZE: tl.constexpr = V.group if V.per == "token" else V.dim
    # triton 3.6 takes constexpr values in a shape, not the numbers of a dataclass
    M: tl.constexpr = T.rows
    PAD: tl.constexpr = V.group_pad
    b_m = tl.full((M,), -float("inf"), tl.float32)
    b_l = tl.zeros((M,), tl.float32)
    accs = ()
    refs = ()
    zs = ()
    for g in tl.static_range(GROUPS):
        accs = accs + (tl.zeros((M, PAD), tl.float32),)
        refs = refs + (tl.full((), 1e-30, tl.float32),)
        zs = zs + (tl.zeros((M,), tl.float32),)

    head = (a - lo) * TILES
    for i in tl.range(0, head + (hi - z) * TILES, num_stages=1):
        tile = tl.where(i < head, lo * TILES + i, z * TILES + i - head)
        i_page = tile // IN_PAGE
        b_m, b_l, accs, refs, zs = _page_tile(
            _address(ADDRESSES, TABLE, i_page), i_h, tile % IN_PAGE, i_page, b_pos, first_key, last_key, window, sinks,
            cap, b_qs, sums, b_m, b_l, accs, refs, zs, K, V, T, XT, KT, VT, IP, SOFTCAP, WINDOW, True,
        )  # fmt: skip
    if z > a:
        last = z * TILES - 1
        # addresses are fetched two tiles ahead: table, then address, then codes
        addr = _address(ADDRESSES, TABLE, a * TILES // IN_PAGE)
        i_next = tl.load(TABLE + tl.minimum(a * TILES + 1, last) // IN_PAGE)
        for tile in range(a * TILES, z * TILES):
            here = addr
            addr = tl.load(ADDRESSES + i_next)
            i_next = tl.load(TABLE + tl.minimum(tile + 2, last) // IN_PAGE)
            b_m, b_l, accs, refs, zs = _page_tile(
                here, i_h, tile % IN_PAGE, tile // IN_PAGE, b_pos, first_key, last_key, window, sinks,
                cap, b_qs, sums, b_m, b_l, accs, refs, zs, K, V, T, XT, KT, VT, IP, SOFTCAP, WINDOW, False,
            )  # fmt: skip

    outs = ()
    for g in tl.static_range(GROUPS):
        b_acc = accs[g]
        if V.per == "token":
            if V.bias != 0.0:
                b_acc -= (zs[g] * V.bias)[:, None]
            b_acc = b_acc * (refs[g] * V.unit)
            if not V.symmetric:
                b_acc += zs[g][:, None]
        elif V.per == "channel":
            b_acc = b_acc * V.unit
        outs = outs + (b_acc,)
    _store(outs, b_m, b_l, ROT_V, norm_v, p_o, p_l, m_row, V, ROT_V.dtype.element_ty if V.rotate else XT, V.rotate,
           SIZE, V.group_pad, IP)  # fmt: skip


@triton.jit
def _exact(
    p_q, m_row, b_pos, SINK_K, SINK_V, RING_K, RING_V, NEW_K, NEW_V, p_o, p_l,
    s_sk, s_sv, s_rk, s_rv, s_nk, s_nv, n_sealed, n_stored, new_at, n_new, q_factor, cap, window, sinks,
    K: tl.constexpr, V: tl.constexpr, T: tl.constexpr, XT: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    IP: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The exact tokens: sinks, then the ring, then the tokens of this call (whose columns may be padding)."""
    M: tl.constexpr = T.rows
    N: tl.constexpr = T.tail
    o_dk = tl.arange(0, DK_PAD)
    o_dv = tl.arange(0, DV_PAD)
    m_dk = o_dk < K.dim
    m_dv = o_dv < V.dim
    b_q = tl.load(p_q[:, None] + o_dk[None, :], mask=m_row[:, None] & m_dk[None, :], other=0.0)
    b_m = tl.full((M,), -float("inf"), tl.float32)
    b_l = tl.zeros((M,), tl.float32)
    b_acc = tl.zeros((M, DV_PAD), tl.float32)
    n_sink = tl.minimum(n_stored, sinks)
    ring_from = tl.maximum(n_sealed, sinks)
    n_ring = tl.maximum(n_stored - ring_from, 0)
    t_sink = tl.cdiv(n_sink, N)
    t_ring = tl.cdiv(n_ring, N)
    for i in tl.range(0, t_sink + t_ring + tl.cdiv(n_new, N), num_stages=1):
        # a tile lies in one of the three, whose first token, count, memory and stride it takes
        in_sink = i < t_sink
        in_new = i >= t_sink + t_ring
        tile = tl.where(in_sink, i, tl.where(in_new, i - t_sink - t_ring, i - t_sink))
        count = tl.where(in_sink, n_sink, tl.where(in_new, n_new, n_ring))
        p_k = tl.where(in_sink, SINK_K, tl.where(in_new, NEW_K, RING_K))
        p_v = tl.where(in_sink, SINK_V, tl.where(in_new, NEW_V, RING_V))
        s_k = tl.where(in_sink, s_sk, tl.where(in_new, s_nk, s_rk))
        s_v = tl.where(in_sink, s_sv, tl.where(in_new, s_nv, s_rv))
        if ALIGNED:
            p_k = tl.multiple_of(p_k, 16)
            p_v = tl.multiple_of(p_v, 16)
            s_k = tl.multiple_of(s_k, 16)
            s_v = tl.multiple_of(s_v, 16)
        o_u = tile * N + tl.arange(0, N)
        o_k = tl.where(in_sink, 0, tl.where(in_new, new_at, ring_from)) + o_u
        m_t = (o_u < count) & (o_k >= 0)
        o_r = tl.where(in_sink | in_new, o_u, o_k % RING).to(tl.int64)
        b_k = tl.load(p_k + (o_r * s_k)[:, None] + o_dk[None, :], mask=m_t[:, None] & m_dk[None, :], other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=IP) * q_factor
        m_ok = m_t[None, :] & (o_k[None, :] <= b_pos[:, None])
        if WINDOW:
            m_ok = m_ok & ((o_k[None, :] > b_pos[:, None] - window) | (o_k < sinks)[None, :])
        b_p, b_a, b_m, b_l = _soft(b_s, b_m, b_l, cap, m_ok, SOFTCAP, True)
        b_v = tl.load(p_v + (o_r * s_v)[:, None] + o_dv[None, :], mask=m_t[:, None] & m_dv[None, :], other=0.0)
        b_acc = tl.dot(b_p.to(XT), b_v, b_acc * b_a[:, None], input_precision=IP)
    _store((b_acc,), b_m, b_l, p_o, 1.0, p_o, p_l, m_row, V, XT, False, V.dim, DV_PAD, IP)


@triton.jit
def decode_split(
    Q, TABLE, ADDRESSES, STARTS, LENGTHS, SEALED, SINK_K, SINK_V, RING_K, RING_V, NEW_K, NEW_V, ROT_K, ROT_V,
    MID_O, MID_L, heads, group, n_q, last_column, splits, q_factor, cap, norm_k, norm_v, window, sinks, n_new,
    s_q0, s_q1, s_q2, s_table,
    s_sk0, s_sk1, s_sk2, s_sv0, s_sv1, s_sv2, s_rk0, s_rk1, s_rk2, s_rv0, s_rv1, s_rv2,
    s_nk0, s_nk1, s_nk2, s_nv0, s_nv1, s_nv2,
    K: tl.constexpr, V: tl.constexpr, T: tl.constexpr, XT: tl.constexpr, KT: tl.constexpr, VT: tl.constexpr,
    DK_PAD: tl.constexpr, DV_PAD: tl.constexpr, IP: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, PAGES: tl.constexpr, TAIL: tl.constexpr,
    RING: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid (splits (+ 1 if TAIL), heads * row blocks, B). Rows of a head: query head outer, query token inner.

    last_column: columns + offset of the view. MID_O: float32 `[B, HQ, Q, splits (+ 1), D_v]`; MID_L without D_v.
    """
    i_s = tl.program_id(0)
    i_h = tl.program_id(1) % heads
    i_b = tl.program_id(2).to(tl.int64)
    o_m = tl.program_id(1) // heads * T.rows + tl.arange(0, T.rows)
    m_row = o_m < group * n_q
    start = tl.load(STARTS + i_b)
    n_sealed = tl.load(SEALED + i_b)
    first_q = last_column - n_q - start
    b_pos = first_q + o_m % n_q
    p_q = Q + i_b * s_q0 + (i_h * group + o_m // n_q).to(tl.int64) * s_q1 + (o_m % n_q).to(tl.int64) * s_q2
    row = (i_b * heads + i_h) * group * n_q + o_m
    p_l = MID_L + row * tl.num_programs(0) + i_s
    p_o = MID_O + (row * tl.num_programs(0) + i_s) * V.dim
    if PAGES:
        if i_s < splits:
            _pages(
                p_q, m_row, b_pos, TABLE + i_b * s_table, ADDRESSES, ROT_K, ROT_V, p_o, p_l,
                i_h, i_s, splits, n_sealed, first_q, n_q, q_factor, cap, norm_k, norm_v, window, sinks,
                K, V, T, XT, KT, VT, DK_PAD, IP, SOFTCAP, WINDOW,
            )  # fmt: skip
    if TAIL:
        if i_s >= splits:
            j_h = i_h.to(tl.int64)
            _exact(
                p_q, m_row, b_pos,
                SINK_K + i_b * s_sk0 + j_h * s_sk1, SINK_V + i_b * s_sv0 + j_h * s_sv1,
                RING_K + i_b * s_rk0 + j_h * s_rk1, RING_V + i_b * s_rv0 + j_h * s_rv1,
                NEW_K + i_b * s_nk0 + j_h * s_nk1, NEW_V + i_b * s_nv0 + j_h * s_nv1, p_o, p_l,
                s_sk2, s_sv2, s_rk2, s_rv2, s_nk2, s_nv2,
                n_sealed, tl.load(LENGTHS + i_b), last_column - n_new - start, n_new,
                q_factor, cap, window, sinks, K, V, T, XT, DK_PAD, DV_PAD, IP, SOFTCAP, WINDOW,
                RING, ALIGNED,
            )  # fmt: skip


@triton.jit
def decode_merge(
    MID_O, MID_L, SINKS, OUT, splits, heads, n_q, s_o0, s_o1, s_o2,
    D: tl.constexpr, D_PAD: tl.constexpr, S_PAD: tl.constexpr, CHUNK: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """Grid (B * HQ * Q). Weigh the splits of a row by their log-sum-exp; a sink logit adds weight and no value."""
    row = tl.program_id(0).to(tl.int64)
    o_s = tl.arange(0, S_PAD)
    b_l = tl.load(MID_L + row * splits + o_s, mask=o_s < splits, other=-float("inf"))
    top = tl.max(b_l, 0)
    i_h = row // n_q % heads
    if SINK:
        sink = tl.load(SINKS + i_h).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    top = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.exp2(b_l - top), 0)
    if SINK:
        total += tl.exp2(sink - top)
    total = tl.where(total > 0, total, 1.0)
    o_c = tl.arange(0, CHUNK)
    o_d = tl.arange(0, D_PAD)
    b_o = tl.zeros((D_PAD,), tl.float32)
    for s in tl.range(0, splits, CHUNK):
        o_i = s + o_c
        b_w = tl.exp2(tl.load(MID_L + row * splits + o_i, mask=o_i < splits, other=-float("inf")) - top)
        # an empty split wrote nothing: its row of MID_O is not read
        m_o = (b_w > 0)[:, None] & (o_d < D)[None, :]
        b_i = tl.load(MID_O + (row * splits + o_i)[:, None] * D + o_d[None, :], mask=m_o, other=0.0)
        b_o += tl.sum(b_i * b_w[:, None], 0)
    p_o = OUT + row // (heads * n_q) * s_o0 + i_h * s_o1 + row % n_q * s_o2
    tl.store(p_o + o_d, (b_o / total).to(OUT.dtype.element_ty), mask=o_d < D)
