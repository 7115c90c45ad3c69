"""Steered rounding: codes whose errors cancel where queries look.

Rounding to the nearest code leaves an error `e` in every key, and a score is wrong by `q . e`. Queries are not alike in
all directions: most of them share a few large ones (`M`, from a calibration). So the channels of a key are rounded one
after another, and each takes on what the error so far weighs in those directions. That minimises
`e . e + |M' e|^2` greedily, as GPTQ (arXiv:2210.17323) does for weights; bytes and decoding stay as they are.
"""

from __future__ import annotations

import torch

from hf_kvcache.formats.spec import SideSpec


def serves(spec: SideSpec) -> bool:
    """Whether rounding of such a side can be steered: integer codes with scales per channel."""
    return spec.kind == "int" and spec.per == "channel" and not spec.symmetric


def prepare(directions: torch.Tensor) -> torch.Tensor:
    """Directions `[H, D, r]`, in the basis that is encoded, -> what `steer` needs: float32 `[H, D, 2, r]`.

    `[..., 0, :]` are the directions; `[..., 1, :]` says how much of the error so far channel d takes on, when the
    channels after it will take on theirs: `S m / (1 + m' S m)` with `S = (I + sum over later channels of m m')^-1`.
    """
    m = directions.double()
    rest = torch.eye(m.shape[2], dtype=m.dtype).expand(m.shape[0], -1, -1).clone()
    gains = torch.empty_like(m)
    for d in reversed(range(m.shape[1])):
        step = (rest @ m[:, d, :, None]).squeeze(2)
        gains[:, d] = step / (1 + (m[:, d] * step).sum(1, keepdim=True))
        rest = rest - gains[:, d, :, None] * step[:, None]
    return torch.stack((m, gains), dim=2).float()


def steer(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int, prepared: torch.Tensor) -> torch.Tensor:
    """Codes uint8 of `x` `[N, H, D, groups, G]` with measured scales and zeros `[N, H, D, groups, 1]`.

    Each step is one float32 operation, so that another implementation can produce the same bytes.
    """
    scale, zero = scale.float(), zero.float()
    divisor = torch.where(scale == 0, torch.ones_like(scale), scale)
    levels = float(2**bits - 1)
    codes = torch.empty_like(x, dtype=torch.uint8)
    rank = prepared.shape[3]
    behind = [torch.zeros_like(x[:, :, 0]) for _ in range(rank)]  # what the errors so far weigh in each direction
    for d in range(x.shape[2]):
        direction, gain = prepared[:, d, 0, :, None, None], prepared[:, d, 1, :, None, None]
        take = torch.zeros_like(behind[0])
        for k in range(rank):
            take = take - gain[:, k] * behind[k]
        take = take.clamp(-scale[:, :, d], scale[:, :, d])
        code = ((x[:, :, d] + take - zero[:, :, d]) / divisor[:, :, d]).round().clamp(0.0, levels)
        error = code * scale[:, :, d] + zero[:, :, d] - x[:, :, d]
        for k in range(rank):
            behind[k] = behind[k] + error * direction[:, k]
        codes[:, :, d] = code.to(torch.uint8)
    return codes
