"""Pages <-> values: what stands in the fields of a page. Pure functions of tensors."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from hf_kvcache.formats import hadamard, packing, scalar, steering
from hf_kvcache.formats.spec import PLANES, Field, PageLayout, SideSpec

LARGEST = 2.0**100  # what encoding takes an infinity for: finite after any rotation

Side = Literal["k", "v"]
SIDES: tuple[Side, Side] = ("k", "v")
Arrays = dict[str, torch.Tensor]


def field_view(pages: torch.Tensor, field: Field) -> torch.Tensor:
    """One field of uint8 pages `[N, page_bytes]` (or of a part of the last dim's start), as `[N, *field.shape]`, no copy."""
    raw = pages[:, field.offset : field.offset + field.nbytes]
    out: torch.Tensor = raw.view(getattr(torch, field.dtype)).unflatten(1, field.shape)
    return out


def encode(x: torch.Tensor, side: Side, layout: PageLayout, steer: torch.Tensor | None = None) -> Arrays:
    """Encode whole pages: `x` `[N, H, P, D]` in any float dtype -> the side's fields, `[N, *field.shape]` each.

    steer: what `steering.prepare` made for keys, or None.
    """
    spec = layout.spec.key if side == "k" else layout.spec.value
    if spec.kind == "exact":
        return {f"{side}_codes": _oriented(x, side, layout)}
    codes, scale, zero = quantize_tokens(x, spec, steer if side == "k" else None)
    packed = packing.pack(_oriented(codes, side, layout), spec.bits, _summed_dim(side, layout))
    arrays = {f"{side}_codes{i or ''}": array for i, array in enumerate(packed)}
    arrays[f"{side}_scale"] = scale
    if zero is not None:
        arrays[f"{side}_zero"] = zero
    return arrays


def decode(pages: torch.Tensor, side: Side, layout: PageLayout, unrotate: bool = True) -> torch.Tensor:
    """Decode uint8 pages `[N, page_bytes]` to float32 `[N, H, P, D]` (exact pages: the stored dtype).

    unrotate: give the values back in the model's basis; False leaves a rotated side as it was encoded.
    """
    spec = layout.spec.key if side == "k" else layout.spec.value
    head_dim = layout.key_dim if side == "k" else layout.value_dim

    def get(name: str) -> torch.Tensor:
        return field_view(pages, layout.fields[f"{side}_{name}"])

    if spec.kind == "exact":
        return _oriented(get("codes"), side, layout)
    arrays = [get(f"codes{i or ''}") for i in range(len(PLANES[spec.bits]))]
    length = head_dim if side == "k" else layout.page_size
    codes = _oriented(packing.unpack(arrays, spec.bits, _summed_dim(side, layout), length), side, layout)
    zero = None if spec.symmetric else get("zero")
    x = dequantize_tokens(codes, get("scale"), zero, spec)
    return hadamard.rotate(x) if spec.rotate and unrotate else x


def quantize_tokens(
    x: torch.Tensor, spec: SideSpec, steer: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rotate, measure and encode `x` `[N, H, T, D]`, with rounding steered where `steer` is given.

    Returns codes uint8 `[N, H, T, D]`, and scales and zeros (or None) `[N, H, groups, T]` for scales per token,
    `[N, H, groups, D]` per channel.
    """
    x = x.float().clamp(-LARGEST, LARGEST)
    x = hadamard.rotate(x) if spec.rotate else x
    if spec.per == "channel":
        x = x.transpose(-1, -2)
    length = x.shape[-1]
    group = min(spec.group or length, length)
    groups = -(-length // group)
    if groups * group != length:  # the last group is short: repeat its last value, which changes no range
        x = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], groups * group - length)), dim=-1)
    x = x.unflatten(-1, (groups, group))
    codes, scale, zero = scalar.quantize(x, spec)
    if steer is not None and zero is not None and steering.serves(spec):
        codes = steering.steer(x, scale, zero, spec.bits, steer)
    codes = codes.flatten(-2)[..., :length]
    if spec.per == "channel":
        codes = codes.transpose(-1, -2)
    return codes, scale.squeeze(-1).transpose(-1, -2), None if zero is None else zero.squeeze(-1).transpose(-1, -2)


def dequantize_tokens(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, spec: SideSpec
) -> torch.Tensor:
    """Undo `quantize_tokens` but for the rotation: float32 `[N, H, T, D]`."""
    tokens, head_dim = codes.shape[-2:]
    length = head_dim if spec.per == "token" else tokens
    return scalar.dequantize(
        codes, _spread(scale, spec, length), None if zero is None else _spread(zero, spec, length), spec
    )


def _spread(scale: torch.Tensor, spec: SideSpec, length: int) -> torch.Tensor:
    """Scales `[N, H, groups, T or D]` -> something that broadcasts to codes `[N, H, T, D]`."""
    groups = scale.shape[-2]
    if groups > 1:
        group = min(spec.group or length, length)
        scale = scale.repeat_interleave(group, dim=-2)[..., :length, :]
    return scale.transpose(-1, -2) if spec.per == "token" else scale


def _oriented(x: torch.Tensor, side: Side, layout: PageLayout) -> torch.Tensor:
    """`[N, H, P, D]` <-> the order that codes are stored in (its own inverse)."""
    return x.transpose(-1, -2) if (side == "k") != layout.transposed else x


def _summed_dim(side: Side, layout: PageLayout) -> int:
    """Where the axis that attention sums over (D for keys, P for values) is in a stored codes array."""
    return -1 if layout.transposed else -2

def gather(slabs: tuple[torch.Tensor, ...], pages: np.ndarray) -> torch.Tensor:
    """Pages by id, uint8 `[N, page_bytes]`; runs of neighbouring ids are taken whole, one single run without a copy."""
    ends = np.cumsum([len(slab) for slab in slabs])
    slab = np.searchsorted(ends, pages, side="right")
    breaks = np.flatnonzero((np.diff(pages) != 1) | (np.diff(slab) != 0)) + 1
    pieces = []
    for lo, hi in zip(np.append(0, breaks), np.append(breaks, len(pages)), strict=True):
        s = slab[lo]
        first = int(pages[lo] - (ends[s - 1] if s else 0))
        pieces.append(slabs[s][first : first + int(hi - lo)])
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
