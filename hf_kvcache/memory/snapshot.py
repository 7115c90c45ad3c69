"""A block table as arrays, and back."""

from __future__ import annotations

import numpy as np

from hf_kvcache.errors import SavedCacheError
from hf_kvcache.memory.table import BlockTable

Arrays = dict[str, np.ndarray]

MOST_COLUMNS, MOST_ENTRIES = 2**31, 2**28  # what a table that is loaded may have: far more than any real one


def table_arrays(table: BlockTable) -> tuple[Arrays, np.ndarray]:
    """int64 arrays that say which row holds which page, and the physical pages in the order that they are numbered by.

    A page that rows share is listed once.
    """
    held, numbers = np.unique(table.all_pages(), return_inverse=True)
    arrays = {"starts": table.starts, "first": table.first, "held": table.held, "pages": numbers}
    return {name: np.ascontiguousarray(a, np.int64).reshape(-1) for name, a in arrays.items()}, held


def restore_table(table: BlockTable, arrays: Arrays, seen: int, count: int) -> np.ndarray:
    """Fill a fresh table; returns the physical pages that the `count` saved ones become, in their order.

    Raises SavedCacheError when the arrays do not describe a table.
    """
    starts, first, held, numbers = (arrays[name] for name in ("starts", "first", "held", "pages"))
    if not _fits(table, starts, first, held, numbers, seen, count):
        raise SavedCacheError("the saved block table contradicts itself")
    each = held - first
    physical = table.pool.take(count)
    table.starts, table.first, table.held, table.seen = starts.copy(), first.copy(), held.copy(), seen
    table.pages = np.zeros((len(starts), int(held.max(initial=0))), np.int32)
    ends = np.cumsum(each)
    for b, end in enumerate(ends):
        table.pages[b, first[b] : held[b]] = physical[numbers[end - each[b] : end]]
    table.pool.share(table.all_pages())
    table.pool.release(physical)
    table.touched()
    return physical


def _fits(
    table: BlockTable, starts: np.ndarray, first: np.ndarray, held: np.ndarray, numbers: np.ndarray, seen: int, count: int
) -> bool:
    """Whether a table could have come to this: no token that a query may ask for is without a page or a place in a ring."""
    B, P = len(starts), table.page_size
    if not len(first) == len(held) == B or not 0 <= seen < MOST_COLUMNS or not ((starts >= 0) & (starts < MOST_COLUMNS)).all():
        return False
    lengths = np.maximum(seen - starts, 0)  # a crop may end within a row's padding
    most = -(-lengths // P) if table.direct else lengths // P
    passed = 0 if table.window is None else np.maximum(lengths - table.window + 1, 0) // P
    fits = (first >= 0) & (first <= passed) & (first <= held) & (held <= most)
    if table.direct:
        fits &= held == most
    return (
        bool(fits.all())
        and B * int(held.max(initial=0)) <= MOST_ENTRIES
        and int((held - first).sum()) == len(numbers)
        and count <= len(numbers)
        and np.array_equal(np.unique(numbers), np.arange(count))
    )
