"""MLA decode in absorbed form: one tile of latents is both the keys and the values (DeepSeek-V2, arXiv:2405.04434).

Pages hold the latents as keys (one head, `D` numbers a token, coded or exact) and the rope keys as values (one head,
exact). A query row is its latent part and its rope part side by side; the output is a mix of latents.
"""

# Branches on constexpr values choose code, they are not expressions: no rewriting into ternaries or `and`.
# ruff: noqa: B007, SIM102, SIM108, SIM300

import triton
import triton.language as tl

from .codes import planes_of
from .decode import LIFT, _address, _field, _pairs, _soft


@triton.jit
def _mix(b_p, b_a, b_c, b_acc, inv, KT: tl.constexpr, SCALED: tl.constexpr, b_f, IP: tl.constexpr):
    """acc + p @ latents, p carrying the latents' scales relative to `1 / inv`."""
    if SCALED:
        b_p = b_p * (b_f * inv)[None, :]
    return tl.dot(b_p.to(KT), b_c, b_acc * b_a[:, None], input_precision=IP)


@triton.jit
def _latent_tile(
    addr, part, i_page, b_pos, last_key, sinks, b_q, b_qr, b_sum, q_factor, b_m, b_l, b_acc, b_ref,
    C: tl.constexpr, R: tl.constexpr, T: tl.constexpr, XT: tl.constexpr, KT: tl.constexpr, IP: tl.constexpr,
    D_PAD: tl.constexpr, R_PAD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to tile `part` of one page."""
    ROWS: tl.constexpr = T.rows
    TOKENS: tl.constexpr = T.tokens
    ET: tl.constexpr = XT if C.kind == "exact" else tl.uint8
    o_t = part * T.tokens + tl.arange(0, T.tokens)
    o_2 = part * (T.tokens // 2) + tl.arange(0, T.tokens // 2)
    o_d = tl.arange(0, D_PAD)
    o_r = tl.arange(0, R_PAD)
    o_k = i_page * T.page + o_t
    m_t = (o_k < last_key) & (o_k >= sinks)
    b_x = tl.load(_field(addr, C.codes, ET) + (o_t * C.dim)[:, None] + o_d[None, :])
    b_c = planes_of(b_x, b_x, C, KT)[0]
    if MASKED:
        b_c = tl.where(m_t[:, None], b_c, 0.0)
    b_r = tl.load(_field(addr, R.codes, XT) + (o_r * T.page)[:, None] + o_t[None, :])
    if C.kind == "exact":
        b_s = tl.dot(b_q, tl.trans(b_c), input_precision=IP)
        b_f = b_l
    else:
        b_f = _pairs(_field(addr, C.scale, tl.bfloat16), o_2, o_2, True)
        if MASKED:
            b_f = tl.where(m_t, b_f, 0.0)
        b_d = tl.broadcast_to((b_sum * -C.bias)[:, None], (ROWS, TOKENS))
        b_s = tl.dot(b_q, tl.trans(b_c), b_d, input_precision=IP) * (b_f * C.unit)[None, :]
    b_s = tl.dot(b_qr, b_r, b_s, input_precision=IP) * q_factor
    m_ok = m_t[None, :]
    if MASKED:
        m_ok = m_ok & (o_k[None, :] <= b_pos[:, None])
    b_p, b_a, b_m, b_l = _soft(b_s, b_m, b_l, 1.0, m_ok, False, MASKED)
    if C.kind == "exact":
        b_acc = _mix(b_p, b_a, b_c, b_acc, 1.0, KT, False, b_f, IP)
    else:
        new = tl.maximum(b_ref, tl.max(b_f, 0))
        inv = 1.0 / new
        b_acc = _mix(b_p, b_a * (b_ref * inv), b_c, b_acc, inv, KT, True, b_f, IP)
        if C.bias != 0.0:
            # the codes' offset, for all channels alike: taken back here, tile by tile
            b_acc -= (tl.sum((b_p * (b_f * inv)[None, :]).to(KT).to(tl.float32), 1) * C.bias)[:, None]
        b_ref = new
    return b_m, b_l, b_acc, b_ref


@triton.jit
def latent_split(
    Q, TABLE, ADDRESSES, STARTS, LENGTHS, SEALED, SINK_C, SINK_R, RING_C, RING_R, NEW_C, NEW_R, MID_O, MID_L,
    heads, n_q, last_column, splits, q_factor, sinks, n_new, s_q0, s_q1, s_q2, s_table,
    s_sc0, s_sc2, s_sr0, s_sr2, s_rc0, s_rc2, s_rr0, s_rr2, s_nc0, s_nc2, s_nr0, s_nr2,
    C: tl.constexpr, R: tl.constexpr, T: tl.constexpr, XT: tl.constexpr, KT: tl.constexpr, IP: tl.constexpr,
    D_PAD: tl.constexpr, R_PAD: tl.constexpr, PAGES: tl.constexpr, TAIL: tl.constexpr, RING: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid (splits (+ 1 if TAIL), row blocks, B). MID_O: float32 `[B, heads, n_q, all splits, D]`; MID_L without D."""
    ROWS: tl.constexpr = T.rows
    i_s = tl.program_id(0)
    i_b = tl.program_id(2).to(tl.int64)
    o_m = tl.program_id(1) * T.rows + tl.arange(0, T.rows)
    m_row = o_m < heads * n_q
    start = tl.load(STARTS + i_b)
    n_sealed = tl.load(SEALED + i_b)
    first_q = last_column - n_q - start
    b_pos = first_q + o_m % n_q
    o_d = tl.arange(0, D_PAD)
    o_r = tl.arange(0, R_PAD)
    p_q = Q + i_b * s_q0 + (o_m // n_q).to(tl.int64) * s_q1 + (o_m % n_q).to(tl.int64) * s_q2
    row = i_b * heads * n_q + o_m
    p_l = MID_L + row * tl.num_programs(0) + i_s
    p_o = MID_O + (row * tl.num_programs(0) + i_s) * C.dim
    b_q = tl.load(p_q[:, None] + o_d[None, :], mask=m_row[:, None], other=0.0)
    b_qr = tl.load(p_q[:, None] + C.dim + o_r[None, :], mask=m_row[:, None], other=0.0)
    b_m = tl.full((ROWS,), -float("inf"), tl.float32)
    b_l = tl.zeros((ROWS,), tl.float32)
    b_acc = tl.zeros((ROWS, D_PAD), tl.float32)
    b_ref = tl.full((), 1e-30, tl.float32)
    if PAGES:
        if i_s < splits:
            b_k = b_q.to(KT)
            b_sum = tl.sum(b_k.to(tl.float32), 1)
            last_key = tl.minimum(n_sealed, first_q + n_q)
            u0 = sinks // T.tokens
            u1 = tl.maximum(tl.cdiv(last_key, T.tokens), u0)
            per = tl.maximum(tl.cdiv(u1 - u0, splits), tl.cdiv(256, T.tokens))
            lo = tl.minimum(u0 + i_s * per, u1)
            hi = tl.minimum(lo + per, u1)
            a = tl.minimum(tl.maximum(tl.cdiv(sinks, T.tokens), lo), hi)
            z = tl.maximum(tl.minimum(tl.minimum(n_sealed, first_q + 1) // T.tokens, hi), a)
            IN_PAGE: tl.constexpr = T.page // T.tokens
            for i in tl.range(0, a - lo + hi - z, num_stages=1):
                tile = tl.where(i < a - lo, lo + i, z + i - (a - lo))
                b_m, b_l, b_acc, b_ref = _latent_tile(
                    _address(ADDRESSES, TABLE + i_b * s_table, tile // IN_PAGE), tile % IN_PAGE, tile // IN_PAGE,
                    b_pos, last_key, sinks, b_k, b_qr, b_sum, q_factor, b_m, b_l, b_acc, b_ref,
                    C, R, T, XT, KT, IP, D_PAD, R_PAD, True,
                )  # fmt: skip
            if z > a:
                addr = _address(ADDRESSES, TABLE + i_b * s_table, a // IN_PAGE)
                i_next = tl.load(TABLE + i_b * s_table + tl.minimum(a + 1, z - 1) // IN_PAGE)
                for tile in range(a, z):
                    here = addr
                    addr = tl.load(ADDRESSES + i_next)
                    i_next = tl.load(TABLE + i_b * s_table + tl.minimum(tile + 2, z - 1) // IN_PAGE)
                    b_m, b_l, b_acc, b_ref = _latent_tile(
                        here, tile % IN_PAGE, tile // IN_PAGE, b_pos, last_key, sinks, b_k, b_qr, b_sum, q_factor,
                        b_m, b_l, b_acc, b_ref, C, R, T, XT, KT, IP, D_PAD, R_PAD, False,
                    )  # fmt: skip
            if C.kind != "exact":
                b_acc = b_acc * (b_ref * C.unit)
    if TAIL:
        if i_s >= splits:
            n_stored = tl.load(LENGTHS + i_b)
            n_sink = tl.minimum(n_stored, sinks)
            ring_from = tl.maximum(n_sealed, sinks)
            n_ring = tl.maximum(n_stored - ring_from, 0)
            N: tl.constexpr = T.tail
            t_sink = tl.cdiv(n_sink, N)
            t_ring = tl.cdiv(n_ring, N)
            new_at = last_column - n_new - start
            for i in tl.range(0, t_sink + t_ring + tl.cdiv(n_new, N), num_stages=1):
                in_sink = i < t_sink
                in_new = i >= t_sink + t_ring
                tile = tl.where(in_sink, i, tl.where(in_new, i - t_sink - t_ring, i - t_sink))
                count = tl.where(in_sink, n_sink, tl.where(in_new, n_new, n_ring))
                p_c = tl.where(
                    in_sink, SINK_C + i_b * s_sc0, tl.where(in_new, NEW_C + i_b * s_nc0, RING_C + i_b * s_rc0)
                )
                p_r = tl.where(
                    in_sink, SINK_R + i_b * s_sr0, tl.where(in_new, NEW_R + i_b * s_nr0, RING_R + i_b * s_rr0)
                )
                s_c = tl.where(in_sink, s_sc2, tl.where(in_new, s_nc2, s_rc2))
                s_r = tl.where(in_sink, s_sr2, tl.where(in_new, s_nr2, s_rr2))
                if ALIGNED:
                    p_c = tl.multiple_of(p_c, 16)
                    p_r = tl.multiple_of(p_r, 16)
                    s_c = tl.multiple_of(s_c, 16)
                    s_r = tl.multiple_of(s_r, 16)
                o_u = tile * N + tl.arange(0, N)
                o_k = tl.where(in_sink, 0, tl.where(in_new, new_at, ring_from)) + o_u
                m_t = (o_u < count) & (o_k >= 0)
                o_i = tl.where(in_sink | in_new, o_u, o_k % RING).to(tl.int64)
                b_c = tl.load(p_c + (o_i * s_c)[:, None] + o_d[None, :], mask=m_t[:, None], other=0.0)
                b_r = tl.load(p_r + (o_i * s_r)[:, None] + o_r[None, :], mask=m_t[:, None], other=0.0)
                b_s = tl.dot(b_q, tl.trans(b_c), input_precision=IP)
                b_s = tl.dot(b_qr, tl.trans(b_r), b_s, input_precision=IP) * q_factor
                m_ok = m_t[None, :] & (o_k[None, :] <= b_pos[:, None])
                b_p, b_a, b_m, b_l = _soft(b_s, b_m, b_l, 1.0, m_ok, False, True)
                b_acc = _mix(b_p, b_a, b_c, b_acc, 1.0, XT, False, b_l, IP)
    live = b_l > 0
    inv = tl.where(live, 1.0 / tl.where(live, b_l, 1.0), 0.0)
    tl.store(p_l, tl.where(live, b_m - LIFT + tl.log2(tl.where(live, b_l, 1.0)), -float("inf")), mask=m_row)
    tl.store(p_o[:, None] + o_d[None, :], b_acc * inv[:, None], mask=(m_row & live)[:, None])
