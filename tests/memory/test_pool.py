"""The page pool."""

from __future__ import annotations

import numpy as np
import pytest

from hf_kvcache.errors import PagePoolError
from hf_kvcache.memory.pool import PagePool
from tests.threads import at_once


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def test_pages_are_handed_out_once_and_come_back() -> None:
    pool = PagePool()
    a, b = pool.take(3), pool.take(2)
    assert sorted([*a, *b]) == [0, 1, 2, 3, 4]
    assert (pool.live, pool.free, pool.capacity) == (5, 0, 5)
    pool.release(a)
    assert (pool.live, pool.free) == (2, 3)
    assert sorted(pool.take(3)) == sorted(a)


def test_a_second_free_raises_and_changes_nothing() -> None:
    pool = PagePool()
    pages = pool.take(4)
    pool.release(pages[:2])
    with pytest.raises(PagePoolError, match="freed twice: 0, 1"):
        pool.release(pages)
    assert (pool.live, pool.free) == (2, 2)
    with pytest.raises(PagePoolError, match="freed twice: 3"):
        pool.release(ids(3, 3))
    assert pool.references(pages).tolist() == [0, 0, 1, 1]


def test_a_shared_page_is_free_only_after_its_last_owner() -> None:
    pool = PagePool()
    pages = pool.take(2)
    pool.share(np.concatenate([pages, pages[:1]]))
    assert pool.references(pages).tolist() == [3, 2]
    pool.release(pages)
    pool.release(pages)
    assert (pool.live, pool.free) == (1, 1)
    pool.release(pages[:1])
    assert pool.live == 0


def test_a_free_page_cannot_be_shared() -> None:
    pool = PagePool()
    pages = pool.take(2)
    pool.release(pages[1:])
    with pytest.raises(PagePoolError, match="cannot share free pages: 1"):
        pool.share(pages)
    assert pool.references(pages).tolist() == [1, 0]


def test_what_is_reserved_is_taken_without_growing() -> None:
    pool = PagePool()
    first = pool.take(1)
    pool.reserve(40)
    assert pool.capacity == 41
    pages = pool.take(40)
    assert pool.capacity == 41
    assert sorted([*first, *pages]) == list(range(41))


def test_growth_wastes_at_most_a_thirty_second() -> None:
    pool = PagePool()
    for _ in range(2000):
        pool.take(1)
        assert pool.free <= pool.capacity / 32 + 1


def test_neighbours_in_a_prompt_are_neighbours_in_memory() -> None:
    pool = PagePool()
    pool.take(3)
    assert np.diff(pool.take(50)).tolist() == [1] * 49


def test_threads_never_get_the_same_page() -> None:
    pool, taken, errors = PagePool(), [], []

    def work(seed: int) -> None:
        rng, mine = np.random.default_rng(seed), []
        try:
            for _ in range(200):
                if mine and rng.random() < 0.5:
                    pool.release(mine.pop())
                else:
                    mine.append(pool.take(int(rng.integers(1, 5))))
        except PagePoolError as error:
            errors.append(error)
        taken.append(mine)

    at_once(work)
    assert not errors
    held = [int(page) for mine in taken for pages in mine for page in pages]
    assert len(held) == len(set(held)) == pool.live
