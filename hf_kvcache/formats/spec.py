"""Formats as data: how numbers become bytes, and where each byte of a page is. Standard library only.

A *side* is the keys or the values. A *page* is one run of bytes that holds `page_size` tokens of one
sequence in one layer, keys first:

    [ key codes | key scales | key zeros | value codes | value scales | value zeros ]

Codes are stored with the dimension that attention sums over packed and outermost (`D` for keys, `P` for
values) or, where `transposed` is set, innermost. A byte holds `R = 8 / bits` values in *planes*: byte `i`
of `n` holds values `i, i + n, i + 2n, ...`, value `i` in its lowest bits. 3-bit codes are a 2-bit array
followed by a 1-bit array. Scales are bfloat16 rounded up (no value leaves its range), zeros float16.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal, get_args

from hf_kvcache.errors import ConfigError

ALIGN = 64  # bytes: a cache line; every field of a page starts on one
SCALE_BYTES = 2

Kind = Literal["exact", "fp8_e4m3", "fp8_e5m2", "int"]
Per = Literal["token", "channel"]
PLANES = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}  # bits of a code -> bits of the arrays that store it


@dataclass(frozen=True)
class SideSpec:
    """How the keys (or the values) of a page are encoded.

    kind: `exact` (the model's own dtype), `fp8_e4m3`, `fp8_e5m2` or `int` (uniform levels).
    bits: of a code; 16 stands for `exact`, whatever the dtype.
    per: which values share a scale: `token` (a group is `group` channels of one token and head) or
        `channel` (a group is `group` tokens of one channel: KIVI keys, arXiv:2402.02750).
    group: values in a group; None is the whole axis (the head dim, or the page).
    symmetric: scale only (codes are signed), or scale and zero point (codes are unsigned).
    rotate: encode after a Hadamard rotation of the head dim (QuaRot, arXiv:2404.00456).
    clip: share of a group's measured range that the levels span, about its middle; values past it saturate. Below 4
        bits, levels that reach the extremes are too coarse for all the others. Only encoding knows of it.
    """

    kind: Kind
    bits: int
    per: Per = "token"
    group: int | None = None
    symmetric: bool = True
    rotate: bool = False
    clip: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"kind={self.kind!r} is unknown; accepted: {', '.join(get_args(Kind))}")
        if self.kind == "exact" and self.bits != 16:
            raise ConfigError(f"bits={self.bits!r}: exact values count as 16 bits, whatever the model's dtype")
        if self.kind == "int" and self.bits not in PLANES:
            raise ConfigError(f"bits={self.bits!r} is not an integer width; accepted: {sorted(PLANES)}")
        if self.kind == "int" and self.symmetric and self.bits != 8:
            raise ConfigError(f"symmetric codes need 8 bits, got {self.bits}: use symmetric=False")
        if self.kind.startswith("fp8") and (self.bits != 8 or not self.symmetric):
            raise ConfigError(f"{self.kind} has 8 bits and no zero point")
        if not 0.5 <= self.clip <= 1.0 or (self.clip < 1.0 and self.symmetric):
            raise ConfigError(f"clip={self.clip!r}: accepted are 0.5 to 1.0, and below 1.0 only with symmetric=False")
        if self.per not in ("token", "channel"):
            raise ConfigError(f"per={self.per!r} is neither 'token' nor 'channel'")
        if self.group is not None and (not isinstance(self.group, int) or self.group < 8 or self.group % 8):
            raise ConfigError(f"group={self.group!r} is not a positive multiple of 8 (or None for the whole axis)")

    @property
    def scaled(self) -> bool:
        """Whether the side has scales."""
        return self.kind != "exact"

    @property
    def direct(self) -> bool:
        """Whether one token can be encoded without its neighbours: written straight into the open page."""
        return self.kind == "exact" or (self.bits == 8 and self.per == "token" and self.symmetric)

    def groups(self, tokens: int, head_dim: int) -> int:
        """Groups along the grouped axis (head dim for `token`, page for `channel`)."""
        axis = head_dim if self.per == "token" else tokens
        return -(-axis // min(self.group or axis, axis))


@dataclass(frozen=True)
class FormatSpec:
    """A named format: the two sides, and how many tokens stay exact around the encoded ones.

    residual: newest tokens of each row that are always exact (the store holds up to one page more).
    sinks: first real tokens of each row that stay exact for ever.
    page_size: default tokens in a page.
    """

    name: str
    key: SideSpec
    value: SideSpec
    residual: int = 0
    sinks: int = 0
    page_size: int = 64
    about: str = field(default="", compare=False)

    @property
    def direct(self) -> bool:
        """Whether tokens go straight into pages, so that there is no exact ring of newest tokens."""
        return self.key.direct and self.value.direct and self.residual == 0

    def replace(self, **changes: object) -> FormatSpec:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Field:
    """One array inside a page: where it starts, its shape without the page axis, its dtype's name."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class PageLayout:
    """Where everything is in one page of one layer.

    heads `H`, key_dim `D_k`, value_dim `D_v`, page_size `P`; `dtype` and `itemsize` are the model's.
    transposed: False stores key codes `[H, D/R, P]` and value codes `[H, P/R, D]`; True stores `[H, P, D/R]`
    and `[H, D, P/R]` (what tensor cores want). Scales and zeros: `[H, groups, P]` per token,
    `[H, groups, D]` per channel, in both.
    """

    spec: FormatSpec
    heads: int
    key_dim: int
    value_dim: int
    page_size: int
    dtype: str
    itemsize: int
    transposed: bool
    fields: dict[str, Field] = field(init=False, compare=False, repr=False)
    page_bytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        fields: dict[str, Field] = {}
        end = 0
        for name, shape, dtype, width in self._arrays():
            start = -(-end // ALIGN) * ALIGN
            size = width
            for n in shape:
                size *= n
            fields[name] = Field(name, start, shape, dtype, size)
            end = start + size
        object.__setattr__(self, "fields", fields)
        object.__setattr__(self, "page_bytes", -(-end // ALIGN) * ALIGN)

    def _arrays(self) -> list[tuple[str, tuple[int, ...], str, int]]:
        H, P = self.heads, self.page_size
        out: list[tuple[str, tuple[int, ...], str, int]] = []
        for side, spec, D in (("k", self.spec.key, self.key_dim), ("v", self.spec.value, self.value_dim)):
            summed, other = (D, P) if side == "k" else (P, D)
            planes = PLANES[spec.bits] if spec.kind == "int" else (spec.bits,)
            for i, bits in enumerate(planes):
                rows = summed if bits >= 8 else -(-summed // (8 // bits))
                shape = (H, other, rows) if self.transposed else (H, rows, other)
                if spec.kind == "exact":
                    out.append((f"{side}_codes", shape, self.dtype, self.itemsize))
                else:
                    out.append((f"{side}_codes" if i == 0 else f"{side}_codes{i}", shape, "uint8", 1))
            if spec.scaled:
                scales = (H, spec.groups(P, D), P if spec.per == "token" else D)
                out.append((f"{side}_scale", scales, "bfloat16", SCALE_BYTES))
                if not spec.symmetric:
                    out.append((f"{side}_zero", scales, "float16", SCALE_BYTES))
        return out

    def field_bytes(self, kind: Literal["codes", "scales"]) -> int:
        """Bytes of a page that are codes, or scales and zeros."""
        is_codes = kind == "codes"
        return sum(f.nbytes for f in self.fields.values() if ("_codes" in f.name) == is_codes)


def _low(name: str, key: SideSpec, value: SideSpec, about: str) -> FormatSpec:
    return FormatSpec(name, key, value, residual=24, sinks=4, about=about)


def _kivi(bits: int) -> FormatSpec:
    key = SideSpec("int", bits, "channel", 32, symmetric=False)
    value = SideSpec("int", bits, "token", 32, symmetric=False)
    about = f"KIVI at {bits} bits: keys per channel, values per token, 128 exact tokens"
    return FormatSpec(f"kivi{bits}", key, value, residual=128, about=about)


def _keys(bits: int, clip: float = 1.0) -> SideSpec:
    return SideSpec("int", bits, "channel", 32, symmetric=False, rotate=True, clip=clip)


def _values(bits: int, clip: float = 1.0) -> SideSpec:
    return SideSpec("int", bits, "token", 64, symmetric=False, rotate=True, clip=clip)


_EXACT = SideSpec("exact", 16)
_INT8 = SideSpec("int", 8, rotate=True)
_E4M3 = SideSpec("fp8_e4m3", 8, rotate=True)  # on SmolLM2 rotation takes 40 % off the divergence
_E5M2 = SideSpec("fp8_e5m2", 8, rotate=True)
_K4, _K3, _K2 = _keys(4), _keys(3, clip=0.95), _keys(2, clip=0.9)
_V4, _V3, _V2 = _values(4), _values(3, clip=0.95), _values(2, clip=0.75)

FORMATS: dict[str, FormatSpec] = {
    spec.name: spec
    for spec in (
        FormatSpec("exact", _EXACT, _EXACT, about="the model's own dtype, in pages"),
        FormatSpec("fp8", _E4M3, _E4M3, about="e4m3, rotated, a scale a token and head"),
        FormatSpec("fp8_e5m2", _E5M2, _E5M2, about="e5m2: more range, fewer digits"),
        FormatSpec("int8", _INT8, _INT8, about="rotated, a scale a token and head"),
        _low("int4", _K4, _V4, "rotated, keys per channel, 4 sinks"),
        _low("int3", _K3, _V3, "as int4 with 3 bits"),
        _low("int2", _K2, _V2, "as int4 with 2 bits"),
        _low("k8v4", _INT8, _V4, "8-bit keys, 4-bit values"),
        _low("k4v3", _K4, _V3, "4-bit keys, 3-bit values"),
        _low("k4v2", _K4, _V2, "4-bit keys, 2-bit values"),
        _low("k3v2", _K3, _V2, "3-bit keys, 2-bit values"),
        _kivi(4),
        _kivi(2),
    )
}
