"""Between a cache and a prefix store: what a prefill may take from it, and what it leaves there."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from hf_kvcache.caches import PagedCache
from hf_kvcache.errors import ConfigError
from hf_kvcache.fingerprint import model_fingerprint, tensors_fingerprint
from hf_kvcache.layers import paged
from hf_kvcache.layers.paged import PagedLayer
from hf_kvcache.layers.parts import Exact
from hf_kvcache.memory.prefix import Chunk, Part, PrefixStore
from hf_kvcache.memory.snapshot import restore_table


class Prefill:
    """One prefill of a fresh cache with a store: `install` before it, `keep` at every boundary of chunks."""

    def __init__(self, store: PrefixStore, cache: PagedCache, tokens: np.ndarray, model: Any, attention: str) -> None:
        for layer in cache.paged_layers:
            if store.chunk % layer.spec.page_size:
                raise ConfigError(
                    f"PrefixStore(chunk={store.chunk}) must be a multiple of page_size={layer.spec.page_size}"
                )
        self.store, self.cache, self.tokens = store, cache, tokens
        self.model, self.context = model, _context(cache, model, attention)
        # Equal rows (beams) are looked up and kept once.
        _, self.first, self.row_of = np.unique(tokens, axis=0, return_index=True, return_inverse=True)
        self.row_of = self.row_of.reshape(-1)
        self.chains: list[list[Chunk]] = []

    def install(self) -> None:
        """Fill the cache with what every row finds."""
        found = [self.store.find(self.context, self.tokens[row]) for row in self.first]
        count = min(len(chain) for chain in found)
        self.chains = [chain[:count] for chain in found]
        if not count:
            return
        seen, rows = count * self.store.chunk, len(self.chains)
        parts = [[chunk.parts for chunk in chain] for chain in self.chains]
        for kind in self.cache.kinds:
            index = next(i for i, layer in enumerate(self.cache.paged_layers) if layer.kind is kind)
            pages = sum(len(part[index].pages) for part in parts[0])
            zeros, held = np.zeros(rows, np.int64), np.full(rows, pages)
            arrays = {"starts": zeros, "first": zeros, "held": held, "pages": np.arange(rows * pages)}
            physical = restore_table(kind.table, arrays, seen, rows * pages)
            for i, layer in enumerate(self.cache.paged_layers):
                if layer.kind is kind:
                    _restore(layer, [[part[i] for part in row] for row in parts], seen, physical, self.model)
        self.cache.batch_select_indices(torch.from_numpy(self.row_of))

    def keep(self) -> None:
        """Put the chunk that has just been filled into the store."""
        seen, size = self.cache.get_seq_length(), self.store.chunk
        index = seen // size - 1
        if not seen or seen % size:
            return
        for chain, row in zip(self.chains, self.first, strict=True):
            if len(chain) == index:
                parts = [_part(layer, int(row), seen - size, seen) for layer in self.cache.paged_layers]
                parent = chain[-1] if chain else None
                kept = self.store.put(self.context, parent, self.tokens[row, seen - size : seen], parts)
                chain.extend([kept] if kept is not None else [])


def _context(cache: PagedCache, model: Any, attention: str) -> str:
    """All that the bytes of a prefix depend on beside its tokens."""
    config = dataclasses.replace(cache.config, calibration=None, prefix_store=None)
    steering = tensors_fingerprint(layer.steer for layer in cache.paged_layers)
    return f"{model_fingerprint(model)} {model.device.type} {attention} {steering} {config}"


def _sealed(layer: PagedLayer, seen: int) -> int:
    """Pages that a row of `seen` tokens has sealed after whole chunks."""
    return max(0, seen - (0 if layer.spec.direct else layer.spec.residual)) // layer.spec.page_size


def _part(layer: PagedLayer, row: int, before: int, seen: int) -> Part:
    assert layer.store is not None
    assert layer.layout is not None
    lo, hi = _sealed(layer, before), _sealed(layer, seen)
    pages = layer.kind.table.pages[row, lo:hi]
    data = layer.store.read_pages(pages) if len(pages) else torch.empty(0, layer.layout.page_bytes, dtype=torch.uint8)
    exact = {}
    if layer.ring is not None:
        newest = np.arange(hi * layer.spec.page_size, seen) % max(layer.ring.keys.shape[2], 1)
        ring = layer.ring.take(torch.tensor([row], device=layer.device))
        exact = {"ring_k": ring.keys[:, :, newest], "ring_v": ring.values[:, :, newest]}
    if layer.sinks is not None:
        sinks = layer.sinks.take(torch.tensor([row], device=layer.device))
        exact |= {"sink_k": sinks.keys, "sink_v": sinks.values}
    layout = layer.layout
    host = {name: x.detach().to("cpu", copy=True) for name, x in exact.items()}
    return Part((layout.heads, layout.key_dim, layout.value_dim), data.to("cpu", copy=True), host)


def _restore(layer: PagedLayer, rows: list[list[Part]], seen: int, physical: np.ndarray, model: Any) -> None:
    """Fill one layer from its parts of each row's chunks."""
    heads, *dims = rows[0][0].shape
    like = [torch.empty(len(rows), heads, 0, d, dtype=model.dtype, device=model.device) for d in dims]
    layer.lazy_initialization(*like)
    data = torch.cat([part.pages for parts in rows for part in parts])

    def exact(name: str) -> torch.Tensor:
        return torch.cat([parts[-1].exact[name] for parts in rows]).to(model.device)

    ring = sinks = None
    if "ring_k" in rows[0][-1].exact:
        P = layer.spec.page_size
        size = layer.spec.residual + P
        slots = np.arange(_sealed(layer, seen) * P, seen) % size
        ring = Exact(*(paged.room(exact(name), size) for name in ("ring_k", "ring_v")))
        ring.keys[:, :, slots], ring.values[:, :, slots] = exact("ring_k"), exact("ring_v")
    if "sink_k" in rows[0][-1].exact:
        sinks = Exact(exact("sink_k"), exact("sink_v"))
    layer.restore(model.device, seen, physical, data, ring, sinks)
