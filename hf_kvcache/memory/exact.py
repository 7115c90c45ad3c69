"""Where an append's tokens go among the exact ones, ring and sinks: worked out once, for every layer of a kind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_kvcache.memory.plans import Append
from hf_kvcache.memory.table import BlockTable, ranges


@dataclass(frozen=True, eq=False)
class RingMove:
    """What one append does to a ring, in which token t of a row has slot t % C.

    slots: its slots `C` afterwards.
    kept: (rows, old slots, new slots) of the tokens to be moved when the ring gets larger, else None.
    new: (rows, columns of this append, slots) of the new tokens to be kept.
    run: (column, slot, count) where every row keeps the same stretch of columns in one stretch of slots, else None.
    sealing: int64 `[N, P]`, for each page to be encoded where its tokens are: a slot of the ring as it was, or the
        slots that it had plus a column of this append. None if no page is due.
    """

    slots: int
    kept: tuple[np.ndarray, np.ndarray, np.ndarray] | None
    new: tuple[np.ndarray, np.ndarray, np.ndarray]
    run: tuple[int, int, int] | None
    sealing: np.ndarray | None


class ExactMoves:
    """What the latest append of one table does to exact tokens, made once for all layers."""

    def __init__(self, table: BlockTable) -> None:
        self.table = table
        self._plan: Append | None = None
        self._made: dict[tuple[str, int, int], Any] = {}

    def _get(self, plan: Append, key: tuple[str, int, int], make: Callable[[], Any]) -> Any:
        if self._plan is not plan:
            self._plan, self._made = plan, {}
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def ring(self, plan: Append, slots: int, sinks: int) -> RingMove:
        """How a ring of `slots` slots (0: none yet) follows `plan`, the table's latest append."""
        made: RingMove = self._get(plan, ("ring", slots, sinks), lambda: _move(self.table, plan, slots, sinks))
        return made

    def sinks(self, plan: Append, count: int) -> list[tuple[int, int, int, int]]:
        """New tokens that belong to the `count` sinks: (row, first token, end, column of the first)."""
        made: list[tuple[int, int, int, int]] = self._get(plan, ("sinks", count, 0), lambda: _sinks(plan, count))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> ExactMoves:
        fork = ExactMoves(copy.deepcopy(self.table, memo))
        memo[id(self)] = fork
        return fork


def _move(table: BlockTable, plan: Append, slots: int, sinks: int) -> RingMove:
    P, sealed, old, lengths = table.page_size, table.sealed, plan.old_lengths, plan.lengths
    most = int((lengths - sealed).max(initial=0))
    enough = table.residual + P  # more only while drafts wait for their verdict
    size = slots if 0 < most <= slots else enough + P * -(-max(most - enough, 0) // P)
    first = np.maximum(sealed, old)
    rows, token = _tokens(first, lengths)
    new = (rows, token - old[rows] + plan.skip[rows], token % size)
    kept = None
    if size != slots and slots:
        rows, token = _tokens(sealed, np.maximum(sealed, old))
        kept = (rows, token % slots, token % size)
    return RingMove(size, kept, new, _run(new, len(old)), _sealing(plan, slots, sinks, P))


def _sinks(plan: Append, count: int) -> list[tuple[int, int, int, int]]:
    rows = np.flatnonzero((plan.old_lengths < count) & (plan.lengths > plan.old_lengths))
    ends = np.minimum(plan.lengths, count)
    return [(int(b), int(plan.old_lengths[b]), int(ends[b]), int(plan.skip[b])) for b in rows]


def _tokens(first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and number of the tokens `first[b] .. end[b]` of every row."""
    count = end - first
    return np.repeat(np.arange(len(end)), count), ranges(first, count)


def _run(new: tuple[np.ndarray, np.ndarray, np.ndarray], batch: int) -> tuple[int, int, int] | None:
    count = len(new[0]) // batch
    if count == 0 or count * batch != len(new[0]):
        return None
    rows, columns, slots = (x.reshape(batch, count) for x in new)
    steps, column, slot = np.arange(count), int(columns[0, 0]), int(slots[0, 0])
    alike = (rows == np.arange(batch)[:, None]) & (columns == column + steps) & (slots == slot + steps)
    return (column, slot, count) if alike.all() else None


def _sealing(plan: Append, slots: int, sinks: int, page_size: int) -> np.ndarray | None:
    if not len(plan.seal_rows):
        return None
    page, rows = plan.seal_index[:, None] * page_size, plan.seal_rows[:, None]
    token = page + np.arange(page_size)  # sinks stay out of the scales of page 0: a later token stands in for them
    token = np.minimum(np.maximum(token, sinks), page + page_size - 1)
    here = slots + token - plan.old_lengths[rows] + plan.skip[rows]
    source: np.ndarray = np.where(token < plan.old_lengths[rows], token % max(slots, 1), here)
    return source
