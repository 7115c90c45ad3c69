"""What a kernel must know, at compile time, about the keys or the values of a page. No triton here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hf_kvcache.formats.spec import PageLayout

SUBNORMAL = 2.0**24  # a code put into the low bits of a float16 is the number code / 2**24
E4M3_SHIFT = 256.0  # e4m3's bits moved to float16's places are the number / 2**8


def power(n: int) -> int:
    """The smallest power of two that a dot product accepts (16 or more) and that holds `n`."""
    return max(16, 1 << (n - 1).bit_length())


@dataclass(frozen=True)
class Side:
    """One side of a page, as compile-time data.

    kind: `exact`, `fp8_e4m3`, `fp8_e5m2` or `int`. per: `none`, `token` or `channel`.
    dequant: how codes become numbers: `plain` (any chip, and the interpreter), `packed` (NVIDIA inline
        assembly, four codes at a time) or `native` (the chip's own fp8 conversion).
    codes, codes1, scale, zero: byte offsets in the page; codes1 is the second array of 3-bit codes.
    dim, row: head dim; stored elements in a row (of the summed axis).
    planes: values in a stored byte. shifts: plane `i` decodes to `2**shifts[i]` times its codes.
    unit, bias: value = (decoded - bias) * unit, before scales, for plane 0.
    groups, group: scale groups along the grouped axis, and how many values of it each has.
    block, blocks: elements of a row that one dot product reads (keys), and how many of them a row has.
    member: the group of each block and plane, `block * planes + plane` (scales per token).
    up, down: what q and p are multiplied by, plane by plane, so that planes of different shifts add up:
        q is balanced around 1 (`center`, taken back in the scores), p only shrinks.
    *_pad: the powers of two that hold `block`, and the channels of a group of values.
    """

    kind: str
    bits: int
    per: str
    symmetric: bool
    clip: float
    rotate: bool
    dequant: str
    codes: int
    codes1: int
    scale: int
    zero: int
    dim: int
    row: int
    planes: int
    shifts: tuple[int, ...]
    unit: float
    bias: float
    groups: int
    group: int
    block: int
    block_pad: int
    blocks: int
    group_pad: int
    center: int
    up: tuple[float, ...]
    down: tuple[float, ...]
    member: tuple[int, ...]


def side(layout: PageLayout, which: str, packed: bool, native_fp8: bool, narrow: bool) -> Side:
    """The side `which` (`k` or `v`) of a layout.

    packed: NVIDIA assembly may be used. native_fp8: the chip converts e4m3 itself.
    narrow: numbers are computed in float16 (what `packed` writes), not float32.
    """
    spec = layout.spec.key if which == "k" else layout.spec.value
    dim = layout.key_dim if which == "k" else layout.value_dim
    fields = layout.fields
    summed = dim if which == "k" else layout.page_size
    packed = packed and narrow
    planes, shifts, unit, bias, dequant = 1, (0,), 1.0, 0.0, "plain"
    if spec.kind == "int":
        planes = {8: 1, 4: 2, 3: 4, 2: 4}[spec.bits]
        shifts = (0,) * planes
        if packed:
            dequant, unit = "packed", SUBNORMAL
            bias = 128.0 / SUBNORMAL if spec.symmetric else 0.0
            shifts = {8: (0,), 4: (0, 4), 3: (0, 2, 4, 4), 2: (0, 2, 4, 6)}[spec.bits]
    elif spec.kind == "fp8_e4m3":
        dequant = "native" if native_fp8 else "packed" if packed else "plain"
        unit = 1.0 if native_fp8 else E4M3_SHIFT
    elif spec.kind == "fp8_e5m2" and packed:
        dequant = "packed"
    row = summed // planes
    groups, group = 1, 0
    if spec.scaled:
        groups = spec.groups(layout.page_size, dim)
        axis = dim if spec.per == "token" else layout.page_size
        group = min(spec.group or axis, axis)
    block = row
    if which == "k" and spec.per == "token" and groups > 1:
        block = math.gcd(row, group)
    channels = group if which == "v" and spec.scaled and spec.per == "token" else dim
    return Side(
        kind=spec.kind,
        bits=spec.bits,
        per=spec.per if spec.scaled else "none",
        symmetric=spec.symmetric,
        clip=spec.clip,
        rotate=spec.rotate,
        dequant=dequant,
        codes=fields[f"{which}_codes"].offset,
        codes1=fields[f"{which}_codes1"].offset if spec.kind == "int" and spec.bits == 3 else 0,
        scale=fields[f"{which}_scale"].offset if spec.scaled else 0,
        zero=fields[f"{which}_zero"].offset if spec.scaled and not spec.symmetric else 0,
        dim=dim,
        row=row,
        planes=planes,
        shifts=shifts,
        unit=unit,
        bias=bias,
        groups=groups,
        group=group,
        block=block,
        block_pad=power(block),
        blocks=row // block,
        group_pad=power(channels),
        center=max(shifts) // 2,
        up=tuple(2.0 ** (max(shifts) // 2 - s) for s in shifts),
        down=tuple(2.0**-s for s in shifts),
        member=tuple(
            (i * row + j * block) // group if group and spec.per == "token" else 0
            for j in range(row // block)
            for i in range(planes)
        ),
    )


@dataclass(frozen=True)
class Tile:
    """Sizes of the page loop: a tile is `tokens` tokens of one page, `rows` query rows, `stages` deep."""

    page: int
    tokens: int
    rows: int
    stages: int
    tail: int
