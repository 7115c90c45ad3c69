"""The store: the bytes of one layer's pages, in slabs that are never moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hf_kvcache.formats import pages as codec
from hf_kvcache.formats.spec import PageLayout

Arrays = codec.Arrays


class PageStore:
    """Pages `0 .. capacity - 1` of one layer, uint8 `[n, page_bytes]` a slab; it follows a pool's capacity.

    Growing adds a slab and copies nothing. A deep copy is the same store: forks share it and their pool's reference
    counts keep them apart.
    """

    def __init__(self, layout: PageLayout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self.slabs: tuple[torch.Tensor, ...] = ()
        self._fields: list[Arrays] = []
        self._ends = np.zeros(0, np.int64)
        self.addresses = torch.zeros(0, dtype=torch.int64, device=device)

    @property
    def capacity(self) -> int:
        """Pages that there is memory for."""
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the slabs and of the address list."""
        return self.capacity * self.layout.page_bytes + self.addresses.numel() * self.addresses.element_size()

    def grow(self, capacity: int) -> None:
        """Make memory for pages up to `capacity`."""
        more = capacity - self.capacity
        if more <= 0:
            return
        slab = torch.empty(more, self.layout.page_bytes, dtype=torch.uint8, device=self.device)
        where = slab.data_ptr() + torch.arange(more, dtype=torch.int64, device=self.device) * self.layout.page_bytes
        self.addresses = torch.cat((self.addresses, where))
        self.slabs = (*self.slabs, slab)
        self._fields.append({name: codec.field_view(slab, f) for name, f in self.layout.fields.items()})
        self._ends = np.append(self._ends, capacity)

    def _locate(self, pages: np.ndarray) -> list[tuple[int, Any, torch.Tensor]]:
        """Split page ids by slab: (slab, positions in `pages`, rows in the slab)."""
        if len(self.slabs) == 1:
            return [(0, slice(None), self._index(pages))]
        slab = np.searchsorted(self._ends, pages, side="right")
        out: list[tuple[int, Any, torch.Tensor]] = []
        for s in np.unique(slab):
            at = np.flatnonzero(slab == s)
            first = self._ends[s - 1] if s else 0
            where: Any = slice(None) if len(at) == len(pages) else self._index(at)
            out.append((int(s), where, self._index(pages[at] - first)))
        return out

    def _index(self, values: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self.device)

    def write_pages(self, pages: np.ndarray, arrays: Arrays) -> None:
        """Write whole pages: each array is `[N, *field.shape]`."""
        for slab, at, rows in self._locate(pages):
            for name, values in arrays.items():
                self._fields[slab][name][rows] = values[at]

    def write_tokens(
        self, pages: np.ndarray, slots: np.ndarray, side: codec.Side, codes: torch.Tensor, scale: torch.Tensor | None
    ) -> None:
        """Write tokens of a direct format: codes `[N, H, D]`, scales `[N, H, groups]` or None."""
        all_slots = self._index(slots)
        innermost = (side == "k") != self.layout.transposed
        for slab, at, rows in self._locate(pages):
            fields, slot = self._fields[slab], all_slots[at]
            if innermost:
                fields[f"{side}_codes"][rows, :, :, slot] = codes[at]
            else:
                fields[f"{side}_codes"][rows, :, slot] = codes[at]
            if scale is not None:
                fields[f"{side}_scale"][rows, :, :, slot] = scale[at]

    def copy_pages(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy whole pages."""
        if len(sources):
            self.put_pages(targets, self.read_pages(sources))

    def put_pages(self, pages: np.ndarray, data: torch.Tensor) -> None:
        """Put pages down as they are, uint8 `[N, page_bytes]` from any device."""
        data = data.to(self.device)
        for slab, at, rows in self._locate(pages):
            self.slabs[slab][rows] = data[at]

    def read_pages(self, pages: np.ndarray) -> torch.Tensor:
        """Pages as they are, uint8 `[N, page_bytes]`."""
        return codec.gather(self.slabs, pages)

    def __deepcopy__(self, memo: dict[int, Any]) -> PageStore:
        memo[id(self)] = self
        return self
