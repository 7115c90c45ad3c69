"""Orthonormal Hadamard rotation of the head dim, block-wise where it is not a power of two."""

from __future__ import annotations

import functools
import math

import torch

from hf_kvcache.errors import ConfigError

MIN_BLOCK = 4


def block_size(head_dim: int) -> int:
    """Largest power of two that divides `head_dim`. Raises ConfigError where rotating would mix too few values."""
    block = head_dim & -head_dim
    if block < MIN_BLOCK:
        raise ConfigError(
            f"head_dim={head_dim} is not a multiple of {MIN_BLOCK}, so it cannot be rotated: "
            "use a format without rotation, or cache_config={'rotate': False}"
        )
    return block


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotate the last dim of `x` (`[..., D]`, float32 out): its own inverse.

    Butterflies in a fixed order (distance 1, 2, 4, ... inside each block, then one factor `block ** -0.5`), element
    by element: the same vector gives the same bits whatever it is batched with, as sealed pages demand.
    """
    block = block_size(x.shape[-1])
    out = x.float().reshape(-1, block)
    distance = 1
    while distance < block:
        pairs = out.view(-1, block // (2 * distance), 2, distance)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        out = torch.stack((low + high, low - high), dim=2)
        distance *= 2
    return (out * (1.0 / math.sqrt(block))).view(x.shape)


@functools.lru_cache(maxsize=64)
def _matrix(head_dim: int, device: torch.device) -> torch.Tensor:
    return rotate(torch.eye(head_dim, device=device))


def rotate_matmul(x: torch.Tensor) -> torch.Tensor:
    """As `rotate` to float32 rounding, in one matrix product: for queries and outputs, which are never stored."""
    return x.float() @ _matrix(x.shape[-1], x.device)
