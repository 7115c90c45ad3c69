"""A block table as arrays, and back."""

from __future__ import annotations

import numpy as np

from hf_kvcache.errors import SavedCacheError
from hf_kvcache.memory.table import BlockTable

Arrays = dict[str, np.ndarray]


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
    each = held - first
    lengths, P = np.maximum(seen - starts, 0), table.page_size
    most = -(-lengths // P) if table.direct else lengths // P
    fits = (
        len(starts) == len(first) == len(held)
        and bool((starts >= 0).all() and (first >= 0).all() and (each >= 0).all() and (held <= most).all())
        and (not table.direct or bool((held == most).all()))
        and int(each.sum()) == len(numbers)
        and np.array_equal(np.unique(numbers), np.arange(count))
    )
    if not fits:
        raise SavedCacheError("the saved block table contradicts itself")
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
