"""Values <-> codes with measured scales: one group at a time, no layout. Pure functions.

The arithmetic is float32 and every step is a single IEEE operation (division, round to nearest even), so that
another implementation can produce the same bytes.
"""

from __future__ import annotations

import torch

from hf_kvcache.formats.spec import SideSpec

FP8 = {"fp8_e4m3": (torch.float8_e4m3fn, 448.0), "fp8_e5m2": (torch.float8_e5m2, 57344.0)}
HALF_MAX = 65504.0


def ceil_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """Round non-negative float32 up to bfloat16, so that a scale never leaves its largest value out of range."""
    return ((x.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)


def floor_float16(x: torch.Tensor) -> torch.Tensor:
    """Round float32 down to float16 (saturating), so that a zero point never lies above its smallest value."""
    x = x.clamp(-HALF_MAX, HALF_MAX)
    near = x.half()
    bits = near.view(torch.int16)
    below = torch.where(bits > 0, bits - 1, bits + 1)
    below = torch.where((bits == 0) | (bits == -32768), torch.full_like(bits, -32767), below)  # under zero: -2^-24
    return torch.where(near.float() > x, below, bits).view(torch.float16)


def quantize(x: torch.Tensor, spec: SideSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Encode groups: `x` float32 `[..., G]`, one group in the last dim.

    Returns codes uint8 `[..., G]`, scales bfloat16 `[..., 1]`, zeros float16 `[..., 1]` or None. Symmetric integer
    codes are two's complement. A group of zeros has scale 0 and decodes to zeros; nothing overflows (it saturates).
    """
    if not spec.symmetric:
        low, high = x.aminmax(dim=-1, keepdim=True)
        if spec.clip < 1.0:
            margin = (high - low) * ((1.0 - spec.clip) / 2)
            low, high = low + margin, high - margin
        zero = floor_float16(low)
        levels = float(2**spec.bits - 1)
        x, span = x - zero.float(), high - zero.float()
        scale = ceil_bfloat16(span / levels)
        codes = _divide(x, scale).round_().clamp_(0.0, levels)
        return codes.to(torch.uint8), scale, zero
    dtype, top = FP8.get(spec.kind, (torch.int8, 127.0))
    scale = ceil_bfloat16(x.abs().amax(dim=-1, keepdim=True) / top)
    codes = _divide(x, scale).clamp_(-top, top)
    if dtype is torch.int8:
        codes = codes.round_()
    return codes.to(dtype).view(torch.uint8), scale, None


def _divide(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    divisor = scale.float()
    return x / torch.where(divisor == 0, torch.ones_like(divisor), divisor)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, spec: SideSpec) -> torch.Tensor:
    """Decode codes uint8 (unpacked) with scales and zeros that broadcast; float32."""
    if spec.symmetric:
        codes = codes.view(FP8[spec.kind][0] if spec.kind in FP8 else torch.int8)
    out = codes.float() * scale.float()
    return out if zero is None else out + zero.float()
