"""Codes to numbers inside a kernel: one tile of stored bytes becomes one tile of numbers a plane.

The assembly takes four codes (one 32-bit register) at a time and writes float16 pairs in order, so its
meaning does not depend on how the compiler spreads a tile over threads. Integer codes are placed in the
low bits of a float16, where they are subnormal numbers, exact, that tensor cores multiply as they are;
the factor 2**24 is in `Side.unit`. No conversion instruction, no subtraction of an offset.
"""

# Branches on constexpr values choose code, they are not expressions: no rewriting into ternaries or `and`.
# ruff: noqa: B007, SIM102, SIM108, SIM300

import triton
import triton.language as tl

_ASM_INT8 = tl.constexpr("""
{
.reg .b32 t;
xor.b32 t, $2, 0x80808080;
prmt.b32 $0, t, 0, 0x4140;
prmt.b32 $1, t, 0, 0x4342;
}
""")
_ASM_UINT8 = tl.constexpr("""
{
prmt.b32 $0, $2, 0, 0x4140;
prmt.b32 $1, $2, 0, 0x4342;
}
""")
_ASM_E5M2 = tl.constexpr("""
{
prmt.b32 $0, $2, 0, 0x1404;
prmt.b32 $1, $2, 0, 0x3424;
}
""")
_ASM_INT4 = tl.constexpr("""
{
.reg .b32 t0, t1;
and.b32 t0, $4, 0x0f0f0f0f;
and.b32 t1, $4, 0xf0f0f0f0;
prmt.b32 $0, t0, 0, 0x4140;
prmt.b32 $1, t0, 0, 0x4342;
prmt.b32 $2, t1, 0, 0x4140;
prmt.b32 $3, t1, 0, 0x4342;
}
""")
_ASM_INT2 = tl.constexpr("""
{
.reg .b32 t0, t1, t2, t3;
and.b32 t0, $8, 0x03030303;
and.b32 t1, $8, 0x0c0c0c0c;
and.b32 t2, $8, 0x30303030;
and.b32 t3, $8, 0xc0c0c0c0;
prmt.b32 $0, t0, 0, 0x4140;
prmt.b32 $1, t0, 0, 0x4342;
prmt.b32 $2, t1, 0, 0x4140;
prmt.b32 $3, t1, 0, 0x4342;
prmt.b32 $4, t2, 0, 0x4140;
prmt.b32 $5, t2, 0, 0x4342;
prmt.b32 $6, t3, 0, 0x4140;
prmt.b32 $7, t3, 0, 0x4342;
}
""")
# 3 bits: two from $8, the third from $9, whose bits were moved to even places
_ASM_INT3 = tl.constexpr("""
{
.reg .b32 t0, t1, t2, t3, u0, u1, u2, u3, h, l;
shl.b32 h, $9, 2;
shr.u32 l, $8, 2;
and.b32 t0, $8, 0x03030303;
and.b32 u0, h, 0x04040404;
or.b32 t0, t0, u0;
and.b32 t1, $8, 0x0c0c0c0c;
and.b32 u1, h, 0x10101010;
or.b32 t1, t1, u1;
and.b32 t2, $8, 0x30303030;
and.b32 u2, h, 0x40404040;
or.b32 t2, t2, u2;
and.b32 t3, l, 0x30303030;
and.b32 u3, $9, 0x40404040;
or.b32 t3, t3, u3;
prmt.b32 $0, t0, 0, 0x4140;
prmt.b32 $1, t0, 0, 0x4342;
prmt.b32 $2, t1, 0, 0x4140;
prmt.b32 $3, t1, 0, 0x4342;
prmt.b32 $4, t2, 0, 0x4140;
prmt.b32 $5, t2, 0, 0x4342;
prmt.b32 $6, t3, 0, 0x4140;
prmt.b32 $7, t3, 0, 0x4342;
}
""")


@triton.jit
def planes_of(x, y, S: tl.constexpr, CT: tl.constexpr):
    """Numbers of a tile of stored elements: a tuple of `S.planes` tiles in CT.

    y is the tile of third bits (3-bit codes, bit 2i belongs to plane i) and otherwise unused.
    """
    if S.kind == "exact":
        out = (x.to(CT),)
    elif S.kind == "fp8_e4m3":
        if S.dequant == "native":
            out = (x.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(CT),)
        elif S.dequant == "packed":
            out = (x.to(tl.float8e4b15, bitcast=True).to(tl.float16).to(CT),)
        else:
            h = x.to(tl.uint16)
            h = ((h & 0x80) << 8) | ((h & 0x7F) << 7)
            out = (h.to(tl.float16, bitcast=True).to(CT),)
    elif S.kind == "fp8_e5m2":
        if S.dequant == "packed":
            out = (tl.inline_asm_elementwise(_ASM_E5M2, "=&r,=&r,r", [x], dtype=tl.float16, is_pure=True, pack=4),)
        else:
            out = ((x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(CT),)
    elif S.bits == 8:
        if S.dequant == "packed":
            if S.symmetric:
                out = (tl.inline_asm_elementwise(_ASM_INT8, "=&r,=&r,r", [x], dtype=tl.float16, is_pure=True, pack=4),)
            else:
                out = (tl.inline_asm_elementwise(_ASM_UINT8, "=&r,=&r,r", [x], dtype=tl.float16, is_pure=True, pack=4),)
        elif S.symmetric:
            out = (x.to(tl.int8, bitcast=True).to(CT),)
        else:
            out = (x.to(CT),)
    elif S.bits == 4:
        if S.dequant == "packed":
            out = tl.inline_asm_elementwise(
                _ASM_INT4, "=&r,=&r,=&r,=&r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
            )
        else:
            out = ((x & 15).to(CT), (x >> 4).to(CT))
    elif S.bits == 3:
        if S.dequant == "packed":
            out = tl.inline_asm_elementwise(
                _ASM_INT3,
                "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
                [x, y],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=4,
            )
        else:
            out = ()
            for i in tl.static_range(4):
                out = out + (((x >> (2 * i)) & 3 | ((y >> (2 * i)) & 1) << 2).to(CT),)
    else:
        if S.dequant == "packed":
            out = tl.inline_asm_elementwise(
                _ASM_INT2,
                "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r",
                [x],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=4,
            )
        else:
            out = ((x & 3).to(CT), ((x >> 2) & 3).to(CT), ((x >> 4) & 3).to(CT), (x >> 6).to(CT))
    return out


@triton.jit
def split_planes(p, N: tl.constexpr):
    """Cut `[M, N * n]` into N tiles `[M, n]` of neighbouring columns (N is 1, 2 or 4)."""
    M: tl.constexpr = p.shape[0]
    C: tl.constexpr = p.shape[1]
    if N == 1:
        out = (p,)
    else:
        a, b = tl.split(tl.permute(tl.reshape(p, (M, 2, C // 2)), (0, 2, 1)))
        out = (a, b) if N == 2 else split_planes(a, N // 2) + split_planes(b, N // 2)
    return out


@triton.jit
def join_columns(parts, N: tl.constexpr):
    """Put N tiles `[M, n]` side by side: `[M, N * n]` (N is 1, 2 or 4)."""
    M: tl.constexpr = parts[0].shape[0]
    C: tl.constexpr = parts[0].shape[1]
    if N == 1:
        out = parts[0]
    elif N == 2:
        out = tl.reshape(tl.permute(tl.join(parts[0], parts[1]), (0, 2, 1)), (M, 2 * C))
    else:
        a = tl.reshape(tl.permute(tl.join(parts[0], parts[1]), (0, 2, 1)), (M, 2 * C))
        b = tl.reshape(tl.permute(tl.join(parts[2], parts[3]), (0, 2, 1)), (M, 2 * C))
        out = tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (M, 4 * C))
    return out
