"""Nothing may owe its success to lucky memory: whatever the library takes fresh is filled with NaN first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import hf_kvcache
from hf_kvcache.layers import paged
from hf_kvcache.memory.store import PageStore

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh slabs hold 0xFF (NaN in every float dtype), fresh rings and sinks NaN."""
    grow, room = PageStore.grow, paged.room

    def poisoned_grow(self: PageStore, capacity: int) -> None:
        before = len(self.slabs)
        grow(self, capacity)
        for slab in self.slabs[before:]:
            slab.fill_(0xFF)

    def poisoned_room(like: torch.Tensor, tokens: int) -> torch.Tensor:
        return room(like, tokens).fill_(float("nan"))

    monkeypatch.setattr(PageStore, "grow", poisoned_grow)
    monkeypatch.setattr(paged, "room", poisoned_room)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture
def registered() -> Iterator[None]:
    """Registered at the end, whatever the test does."""
    yield
    hf_kvcache.register()
