"""Encoding of new tokens, fused where there is a compiled encoder for it. Without one, layers use the codecs."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Protocol

import numpy as np
import torch

from hf_kvcache.formats.spec import PageLayout


class Encoder(Protocol):
    """What a compiled encoder does; the bytes are those of `formats.pages`. See `ops.cpu.appending`."""

    def write_tokens(
        self,
        layout: PageLayout,
        addresses: torch.Tensor,
        where: tuple[np.ndarray, ...],
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Encode tokens of a direct format into their slots."""

    def write_pages(
        self,
        layout: PageLayout,
        addresses: torch.Tensor,
        where: tuple[np.ndarray, ...],
        keys: torch.Tensor,
        values: torch.Tensor,
        ring: tuple[torch.Tensor, torch.Tensor],
        steer: torch.Tensor | None = None,
    ) -> None:
        """Encode whole pages."""


@functools.lru_cache(maxsize=256)
def encoder(layout: PageLayout, device: str, impl: str) -> Encoder | None:
    """The compiled encoder for pages of this layout, or None. impl: as in `ops.api.attend`."""
    if device != "cpu" or impl not in ("auto", "numba") or importlib.util.find_spec("numba") is None:
        return None
    module = importlib.import_module("hf_kvcache.ops.cpu.appending")
    return module if module.serves(layout) else None
