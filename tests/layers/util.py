"""Layers without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_kvcache.config import resolve
from hf_kvcache.layers.paged import PagedLayer
from hf_kvcache.layers.parts import Kind
from hf_kvcache.memory.table import BlockTable

H, DK, DV = 2, 16, 24


def layers(
    name: str = "paged_exact", *, count: int = 1, window: int | None = None, capacity: int | None = None, **options: Any
) -> list[PagedLayer]:
    """Some layers of one kind."""
    spec = resolve(name, {"page_size": 16, **options}).spec
    table = BlockTable(spec.page_size, direct=spec.direct, residual=spec.residual, window=window, capacity=capacity)
    kind = Kind(table)
    return [PagedLayer(spec, kind, leader=i == 0) for i in range(count)]


def states(
    tokens: int, batch: int = 1, seed: int = 0, dtype: torch.dtype = torch.float32, dims: Sequence[int] = (DK, DV)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys `[B, H, T, D_k]` and values `[B, H, T, D_v]`."""
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(batch, H, tokens, d, generator=generator).to(dtype) for d in dims)
    return k, v


def plain(x: torch.Tensor) -> torch.Tensor:
    """What an update returned, as an ordinary tensor."""
    return x.clone()


def feed(layer: PagedLayer, k: torch.Tensor, v: torch.Tensor, pieces: Sequence[int]) -> None:
    """Append `k` and `v` in pieces of so many tokens."""
    start = 0
    for n in pieces:
        layer.update(k[:, :, start : start + n], v[:, :, start : start + n])
        start += n
    assert start == k.shape[2]


def page_bytes(layer: PagedLayer, row: int, full_only: bool = True) -> list[torch.Tensor]:
    """The bytes of the pages that a row holds, in order."""
    assert layer.store is not None
    table = layer.kind.table
    pages = table.row_pages(row)
    if full_only and table.direct:
        pages = pages[: int(table.lengths[row]) // table.page_size - int(table.first[row])]
    return list(layer.store.read_pages(pages).clone()) if len(pages) else []
