"""What a block table tells the layers of its kind to do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Twins = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class Append:
    """What one append of `columns` columns does.

    old_lengths, lengths: real tokens of each row before and after, int64 `[B]`.
    skip: columns of this append that are left padding, per row.
    copies: (source, target) pages to be copied whole before anything is written (copy on write).
    rows, chunk, pages, slots: where each token goes straight into a page (direct formats): row, column within
        the append, page, slot.
    seal_rows, seal_index, seal_pages: pages to be encoded now: row, logical page, physical page.
    twins: pages that are another row's, since both rows hold the same tokens: row, logical page, row that writes it.
    """

    before: int
    columns: int
    old_lengths: np.ndarray
    lengths: np.ndarray
    skip: np.ndarray
    copies: tuple[np.ndarray, np.ndarray]
    rows: np.ndarray
    chunk: np.ndarray
    pages: np.ndarray
    slots: np.ndarray
    seal_rows: np.ndarray
    seal_index: np.ndarray
    seal_pages: np.ndarray
    twins: Twins


@dataclass(frozen=True, eq=False)
class Crop:
    """What taking columns off the end does: sealed pages that are cut, to be decoded back into the ring."""

    before: int
    after: int
    rows: np.ndarray
    index: np.ndarray
    pages: np.ndarray
