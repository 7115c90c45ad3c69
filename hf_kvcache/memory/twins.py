"""Which rows of a batch begin with the same tokens, page by page. Integers only."""

from __future__ import annotations

import numpy as np


def first_owners(tokens: np.ndarray, starts: np.ndarray, page_size: int) -> np.ndarray:
    """For each row and logical page, the first row that begins with the very same pages up to it; int64 `[B, pages]`.

    tokens: int64 `[B, columns]`, equal where the model is given the same. starts: left padding of each row, which is
    not looked at: pages count from a row's first real token. A page that is not full belongs to its own row.
    """
    B, columns = tokens.shape
    owners = np.tile(np.arange(B)[:, None], (1, columns // page_size))
    nodes: dict[tuple[int, bytes], tuple[int, int]] = {}  # (node, tokens of the next page) -> (node, first row)
    for b in range(B):
        row, node = np.ascontiguousarray(tokens[b, starts[b] :]), 0
        for i in range(len(row) // page_size):
            step = (node, row[i * page_size : (i + 1) * page_size].tobytes())
            node, owners[b, i] = nodes.setdefault(step, (len(nodes) + 1, b))
    return owners
