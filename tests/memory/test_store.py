"""The store: growth moves nothing, copies are whole pages, forks share bytes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from hf_kvcache.formats import pages as codec
from hf_kvcache.formats.spec import FORMATS, PageLayout
from hf_kvcache.memory.store import PageStore


def store(name: str = "exact", transposed: bool = False) -> PageStore:
    layout = PageLayout(FORMATS[name], 2, 16, 24, 16, "float32", 4, transposed)
    return PageStore(layout, torch.device("cpu"))


def test_growth_moves_nothing() -> None:
    held = store()
    addresses = []
    for capacity in (3, 4, 4, 2, 9, 40):
        held.grow(capacity)
        assert [slab.data_ptr() for slab in held.slabs][: len(addresses)] == addresses
        addresses = [slab.data_ptr() for slab in held.slabs]
    assert held.capacity == 40
    assert [len(slab) for slab in held.slabs] == [3, 1, 5, 31]
    assert held.nbytes == 40 * held.layout.page_bytes + 40 * 8


def test_addresses_are_where_the_pages_are() -> None:
    held = store()
    held.grow(2)
    held.grow(5)
    expected = [slab.data_ptr() + i * held.layout.page_bytes for slab in held.slabs for i in range(len(slab))]
    assert held.addresses.tolist() == expected


@pytest.mark.parametrize("name", FORMATS)
def test_pages_are_copied_whole_across_slabs(name: str) -> None:
    held = store(name)
    held.grow(3)
    held.grow(8)
    for slab in held.slabs:
        slab.copy_(torch.randint(0, 256, slab.shape, dtype=torch.uint8))
    before = torch.cat(held.slabs)
    held.copy_pages(np.array([1, 4, 7]), np.array([5, 0, 2]))
    after = torch.cat(held.slabs)
    assert torch.equal(after[[5, 0, 2]], before[[1, 4, 7]])
    untouched = [1, 3, 4, 6, 7]
    assert torch.equal(after[untouched], before[untouched])


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_tokens_land_in_their_slots_and_nowhere_else(transposed: bool) -> None:
    held = store(transposed=transposed)
    held.grow(2)
    held.grow(4)
    for slab in held.slabs:
        slab.fill_(0xFF)
    x = torch.randn(3, 2, 16)
    pages, slots = np.array([3, 0, 3]), np.array([5, 15, 0])
    held.write_tokens(pages, slots, "k", x, None)
    keys = codec.decode(held.read_pages(np.arange(4)), "k", held.layout)
    for i in range(3):
        assert torch.equal(keys[pages[i], :, slots[i]], x[i])
    assert int(torch.isfinite(keys).all(-1).all(1).sum()) == 3


def test_a_deep_copy_is_the_same_store() -> None:
    held = store()
    assert copy.deepcopy(held) is held
