"""The page pool: which physical pages are free, and how many block tables hold each. Integers only."""

from __future__ import annotations

import threading
from typing import NoReturn

import numpy as np

from hf_kvcache.errors import CacheUseError, PagePoolError

SLACK = 32  # a pool that grows takes at least 1/32 of what it has: bounded waste, few slabs


class PagePool:
    """Free list and reference counts over physical pages `0 .. capacity - 1`. Thread-safe.

    The pool owns numbers, not bytes: each layer's store follows `capacity`.
    """

    def __init__(self) -> None:
        self._refs = np.zeros(0, np.int32)
        self._free: list[int] = []
        self._lock = threading.RLock()

    def __reduce__(self) -> NoReturn:
        raise CacheUseError("a cache in pages cannot be pickled: its pages are addresses of this process's memory")

    @property
    def capacity(self) -> int:
        """Physical pages that exist."""
        return len(self._refs)

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def live(self) -> int:
        """Pages that at least one block table holds."""
        return self.capacity - self.free

    @property
    def nbytes(self) -> int:
        """Bytes of the reference counts."""
        return self._refs.nbytes

    def reserve(self, count: int) -> None:
        """Grow so that at least `count` pages are free."""
        with self._lock:
            short = count - len(self._free)
            if short > 0:
                first = self.capacity
                self._refs = np.concatenate([self._refs, np.zeros(short, np.int32)])
                self._free[:0] = range(first + short - 1, first - 1, -1)

    def take(self, count: int) -> np.ndarray:
        """Hand out `count` pages with one reference each (int32); grows when too few are free."""
        with self._lock:
            if count > len(self._free):
                self.reserve(max(count, len(self._free) + self.capacity // SLACK))
            cut = len(self._free) - count
            pages = np.array(self._free[cut:][::-1], np.int32)
            del self._free[cut:]
            if (self._refs[pages] != 0).any():
                raise PagePoolError("the free list held a page that is in use")
            self._refs[pages] = 1
            return pages

    def share(self, pages: np.ndarray) -> None:
        """Add one reference for each entry of `pages` (a page may occur more than once)."""
        with self._lock:
            if (self._refs[pages] <= 0).any():
                raise PagePoolError(f"cannot share free pages: {_some(pages[self._refs[pages] <= 0])}")
            np.add.at(self._refs, pages, 1)

    def release(self, pages: np.ndarray) -> None:
        """Drop one reference for each entry of `pages`; pages that nobody holds any more become free.

        Raises PagePoolError, and changes nothing, when a page would be freed twice.
        """
        with self._lock:
            refs = self._refs.copy()
            np.subtract.at(refs, pages, 1)
            if (refs[pages] < 0).any():
                raise PagePoolError(f"pages freed twice: {_some(pages[refs[pages] < 0])}")
            self._refs = refs
            self._free.extend(int(page) for page in np.unique(pages)[::-1] if refs[page] == 0)

    def references(self, pages: np.ndarray) -> np.ndarray:
        """Reference counts of `pages`."""
        counts: np.ndarray = self._refs[pages]
        return counts


def _some(pages: np.ndarray) -> str:
    listed = ", ".join(str(int(page)) for page in pages[:8])
    return listed + (", ..." if len(pages) > 8 else "")
