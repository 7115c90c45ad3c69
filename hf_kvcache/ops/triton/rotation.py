"""The rotation as a table of 0 and +-1, which makes products with it exact in any float dtype."""

from __future__ import annotations

import functools

import torch


@functools.cache
def signs(dim: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, float]:
    """`(R, norm)`: the rotation of a head dim is `norm * R`; R is `[dim, dim]`, of 0 and +-1."""
    block = dim & -dim
    h = torch.ones(1, 1)
    while h.shape[0] < block:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return torch.block_diag(*[h] * (dim // block)).to(device, dtype), block**-0.5
