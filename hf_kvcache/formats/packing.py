"""Codes <-> bytes: planar packing along one axis.

With `R = 8 / bits` codes in a byte and `n = ceil(L / R)` bytes for `L` codes, byte `i` holds

    code i (lowest bits) | code i + n | code i + 2n | ...

so that one shift and mask of a run of bytes gives a run of neighbouring codes. Codes past `L` are 0. A 3-bit code
is its two low bits packed so, and its high bit packed so in a second array.
"""

from __future__ import annotations

import torch

from hf_kvcache.formats.spec import PLANES


def pack(codes: torch.Tensor, bits: int, dim: int) -> list[torch.Tensor]:
    """Pack uint8 codes along `dim`; one array for each entry of `PLANES[bits]`."""
    if bits == 8:
        return [codes]
    arrays, shift = [], 0
    for width in PLANES[bits]:
        arrays.append(_pack_plane((codes >> shift) & (2**width - 1), width, dim))
        shift += width
    return arrays


def unpack(arrays: list[torch.Tensor], bits: int, dim: int, length: int) -> torch.Tensor:
    """Undo `pack`: uint8 codes, `length` of them along `dim`."""
    if bits == 8:
        return arrays[0]
    out, shift = None, 0
    for array, width in zip(arrays, PLANES[bits], strict=True):
        part = _unpack_plane(array, width, dim, length)
        out = part if out is None else out | (part << shift)
        shift += width
    assert out is not None
    return out


def _pack_plane(codes: torch.Tensor, width: int, dim: int) -> torch.Tensor:
    planes = 8 // width
    length = codes.shape[dim]
    rows = -(-length // planes)
    out = codes.narrow(dim, 0, rows).clone()
    for plane in range(1, planes):
        count = max(0, min(rows, length - plane * rows))
        if count:
            out.narrow(dim, 0, count).bitwise_or_(codes.narrow(dim, plane * rows, count) << (width * plane))
    return out


def _unpack_plane(array: torch.Tensor, width: int, dim: int, length: int) -> torch.Tensor:
    planes = [(array >> (width * plane)) & (2**width - 1) for plane in range(8 // width)]
    return torch.cat(planes, dim=dim).narrow(dim, 0, length)
