"""The block table: for each row of a batch, which physical page holds which of its tokens. Integers only.

All layers of one kind share one table: they hold the same tokens. Each layer keeps its own bytes and follows the
plans (`Append`, `Crop`) that the table makes; the first layer to ask makes the table move, the others get the same
plan again.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from hf_kvcache.errors import CacheFullError, CacheUseError
from hf_kvcache.memory.plans import Append, Crop, Twins
from hf_kvcache.memory.pool import PagePool
from hf_kvcache.memory.twins import first_owners

GROW = 16  # logical pages that a table widens by at least
HOLD = 64  # while drafts are being verified, this many newest tokens at most wait for the verdict before they are sealed


_NONE = np.zeros(0, np.int64)
_NO_TWINS = (_NONE, _NONE, _NONE)


class BlockTable:
    """Pages of each row, `B` rows, for layers of one kind.

    A row's real tokens are numbered from 0, after its left padding of `starts[b]` columns. `direct` tables put each
    token into the open page at once; others keep the newest tokens (at least `residual`) in a ring outside the pages
    and seal whole pages.

    window: tokens a query may look back to, itself included, or None. Pages wholly before it are released.
    capacity: most columns it may ever hold (`max_cache_len`), or None.
    """

    def __init__(
        self,
        page_size: int,
        *,
        direct: bool,
        residual: int = 0,
        window: int | None = None,
        capacity: int | None = None,
        pool: PagePool | None = None,
    ) -> None:
        self.page_size, self.direct, self.residual, self.window = page_size, direct, residual, window
        self.capacity = capacity
        self.pool = PagePool() if pool is None else pool
        self.recording = False
        self.version = 0
        self.last: Append | Crop | None = None
        self.padding: np.ndarray | None = None
        self.tokens: np.ndarray | None = None  # the columns of a prompt in chunks, as `note_tokens` was told
        self.masks: tuple[Any, Any] | None = None  # the step's attention mask, and what of it is needed
        self._start(0)

    def _start(self, batch: int) -> None:
        self.seen = 0
        self.starts = np.zeros(batch, np.int64)
        self.pages = np.zeros((batch, 0), np.int32)
        self.first = np.zeros(batch, np.int64)  # logical pages released at the front
        self.held = np.zeros(batch, np.int64)  # logical pages up to here have a physical page
        self.touched()

    def touched(self) -> None:
        """Note that views made before are stale."""
        self.version += 1
        self.masks = None

    # ---- what is there

    @property
    def batch(self) -> int:
        """Rows `B`; 0 before the first append."""
        return len(self.starts)

    @property
    def lengths(self) -> np.ndarray:
        """Real tokens of each row, int64 `[B]`."""
        return np.maximum(self.seen - self.starts, 0)

    @property
    def sealed(self) -> np.ndarray:
        """Tokens of each row that are in pages, int64 `[B]`."""
        return self.lengths if self.direct else self.held * self.page_size

    def row_pages(self, row: int) -> np.ndarray:
        """Physical pages that one row holds, in order."""
        return self.pages[row, self.first[row] : self.held[row]]

    def all_pages(self) -> np.ndarray:
        """Every reference of every row."""
        if not self.batch:
            return np.zeros(0, np.int32)
        return np.concatenate([self.row_pages(row) for row in range(self.batch)])

    def lengths_known(self) -> bool:
        """Whether every row has a real token, so that its left padding is settled."""
        return self.batch > 0 and bool((self.lengths > 0).all())

    def used_slots(self) -> int:
        """Page slots that hold a token, each physical page counted once."""
        best: dict[int, int] = {}
        for row, tokens in enumerate(np.minimum(self.sealed, self.lengths)):
            for index in range(self.first[row], self.held[row]):
                page = int(self.pages[row, index])
                best[page] = max(best.get(page, 0), min(self.page_size, int(tokens) - index * self.page_size))
        return sum(best.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the integers held."""
        return sum(a.nbytes for a in (self.pages, self.starts, self.first, self.held)) + self.pool.nbytes

    # ---- append

    def append(self, before: int, columns: int, batch: int) -> Append:
        """Make room for `columns` columns after `before`; the same plan again for each further layer.

        Raises CacheUseError when the batch changed or the layers are out of step, CacheFullError past `capacity`.
        """
        last = self.last
        if isinstance(last, Append) and (last.before, last.columns) == (before, columns) and self.seen == before + columns:
            self._check_batch(batch)
            return last
        if before != self.seen:
            raise CacheUseError(
                f"layers of one cache are out of step: this one holds {before} columns, its block table {self.seen}. "
                "A forward pass was cut short: reset() the cache"
            )
        if self.batch == 0:
            self._start(batch)
        self._check_batch(batch)
        if self.capacity is not None and before + columns > self.capacity:
            raise CacheFullError(
                f"max_cache_len={self.capacity} columns, {before} are filled and {columns} more came: "
                "build the cache with a larger max_cache_len"
            )
        if self.padding is not None:
            self._pad(before + columns)
        old = self.lengths
        self._release_passed(old)
        if before == 0 and self.capacity is not None:
            pages = -(-self.capacity // self.page_size) + 1
            self.pool.reserve(batch * pages)
        self.seen = before + columns
        self.last = self._append_direct(before, columns, old) if self.direct else self._append_sealed(before, columns, old)
        self.touched()
        return self.last

    def note_tokens(self, before: int, tokens: np.ndarray | None) -> None:
        """Tell what the columns after `before` are (int64 `[B, T]`, equal where the model is given the same).

        Full pages of rows that hold the same tokens from their first real one on are then one physical page. It takes
        a prompt whole or in chunks; None, or a gap, ends it.
        """
        if tokens is None or before == 0:
            self.tokens = tokens
        elif self.tokens is not None:
            fits = self.tokens.shape == (len(tokens), before)
            self.tokens = np.concatenate([self.tokens, tokens], axis=1) if fits else None

    def unshare(self, plan: Append) -> tuple[Append, np.ndarray, np.ndarray]:
        """Give each row its own pages after all, in the latest append.

        Returns the plan that holds from now on, and (source, target) pages to be copied by layers that wrote already.
        """
        rows, index, _ = plan.twins
        sources = self.pages[rows, index]
        targets = self.pool.take(len(rows))
        self.pages[rows, index] = targets
        self.pool.release(sources)
        self.tokens = None
        if self.direct:
            new = self._direct_plan(plan.before, plan.columns, plan.old_lengths, plan.copies, _NO_TWINS)
        else:
            added = ((plan.seal_rows, rows), (plan.seal_index, index), (plan.seal_pages, targets))
            seals = [np.concatenate(pair) for pair in added]
            new = dataclasses.replace(
                plan, seal_rows=seals[0], seal_index=seals[1], seal_pages=seals[2], twins=_NO_TWINS
            )
        self.last = new
        self.touched()
        return new, sources, targets

    def _check_batch(self, batch: int) -> None:
        if batch != self.batch:
            raise CacheUseError(
                f"the cache holds {self.batch} rows and was given {batch}: use a fresh cache, or "
                "batch_repeat_interleave / batch_select_indices to change its rows"
            )

    def _pad(self, columns: int) -> None:
        """Take over the left padding that was noted, for rows that have no real token yet."""
        assert self.padding is not None
        if len(self.padding) != self.batch:
            return
        empty = self.lengths == 0
        self.starts = np.where(empty, np.minimum(self.padding, columns), self.starts)

    def _release_passed(self, lengths: np.ndarray) -> None:
        """Release pages that no later query can see."""
        if self.window is None or self.recording:
            return
        passed = np.clip((lengths - self.window + 1) // self.page_size, self.first, self.held)
        gone = [self.pages[b, self.first[b] : passed[b]] for b in range(self.batch)]
        if any(len(pages) for pages in gone):
            self.pool.release(np.concatenate(gone))
            self.first = passed

    def _hold(
        self, upto: np.ndarray, old: np.ndarray, new: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, Twins]:
        """Give each row physical pages up to logical page `upto`: row, logical and physical page of each new one, twins.

        A row without pages leaves out those that no query from token `old` on can see. Where `old` is 0 the queries of
        this very append see the new tokens as they came, so only those after token `new` count (a prompt past its window).
        """
        if self.window is not None and not self.recording:
            lengths = np.where(old > 0, old, new)
            passed = np.minimum(np.maximum(lengths - self.window + 1, 0) // self.page_size, upto)
            empty = self.first == self.held
            self.first = np.where(empty, np.maximum(self.first, passed), self.first)
            self.held = np.maximum(self.held, self.first)
        count = np.maximum(upto - self.held, 0)
        rows = np.repeat(np.arange(self.batch), count)
        index = ranges(self.held, count)
        width = int(upto.max(initial=0))
        if width > self.pages.shape[1]:
            extra = np.zeros((self.batch, max(width - self.pages.shape[1], GROW)), np.int32)
            self.pages = np.concatenate([self.pages, extra], axis=1)
        self.held = np.maximum(self.held, upto)
        owner = self._owners(rows, index, old)
        own = owner == rows
        fresh = self.pool.take(int(own.sum()))
        self.pages[rows[own], index[own]] = fresh
        twins = (rows[~own], index[~own], owner[~own])
        pages = self.pages[twins[2], twins[1]]
        self.pages[twins[0], twins[1]] = pages
        self.pool.share(pages)
        return rows[own], index[own], fresh, twins

    def _owners(self, rows: np.ndarray, index: np.ndarray, old: np.ndarray) -> np.ndarray:
        """The row that writes each of these new pages: another one with the same tokens, if all of them come just now."""
        if self.batch < 2 or len(rows) < 2 or self.tokens is None or self.tokens.shape[1] != self.seen:
            return rows
        table = first_owners(self.tokens, self.starts, self.page_size)
        owner = rows.copy()
        full = index < table.shape[1]
        owner[full] = table[rows[full], index[full]]
        new = np.zeros((self.batch, int(index.max()) + 1), bool)
        new[rows, index] = index * self.page_size >= old[rows]
        return np.where(new[rows, index] & new[owner, index], owner, rows)

    def _append_direct(self, before: int, columns: int, old: np.ndarray) -> Append:
        new, P = self.lengths, self.page_size
        open_page = old // P
        written = np.flatnonzero((old % P != 0) & (new > old) & (open_page < self.held))
        shared = written[self.pool.references(self.pages[written, open_page[written]]) > 1]
        sources = self.pages[shared, open_page[shared]]
        targets = self.pool.take(len(shared))
        self.pages[shared, open_page[shared]] = targets
        self.pool.release(sources)
        twins = self._hold(-(-new // P), old, new)[3]
        return self._direct_plan(before, columns, old, (sources, targets), twins)

    def _direct_plan(
        self, before: int, columns: int, old: np.ndarray, copies: tuple[np.ndarray, np.ndarray], twins: Twins
    ) -> Append:
        new, P = self.lengths, self.page_size
        count = new - old
        rows, token = np.repeat(np.arange(self.batch), count), ranges(old, count)
        written = np.ones(self.pages.shape, bool)
        written[twins[0], twins[1]] = False
        stored = (token // P >= self.first[rows]) & written[rows, token // P]
        rows, token = rows[stored], token[stored]
        return Append(
            before, columns, old, new, self._skip(before, columns), copies,
            rows, token + self.starts[rows] - before, self.pages[rows, token // P], token % P, _NONE, _NONE, _NONE, twins,
        )  # fmt: skip

    def _append_sealed(self, before: int, columns: int, old: np.ndarray) -> Append:
        new = self.lengths
        exact = self.residual + (min(columns, HOLD) if self.recording else 0)
        upto = np.maximum((new - exact) // self.page_size, self.held)
        rows, index, pages, twins = self._hold(upto, old, new)
        return Append(
            before, columns, old, new, self._skip(before, columns), (_NONE, _NONE),
            _NONE, _NONE, _NONE, _NONE, rows, index, pages, twins,
        )  # fmt: skip

    def _skip(self, before: int, columns: int) -> np.ndarray:
        return np.clip(self.starts - before, 0, columns)

    # ---- every other operation moves whole rows or cuts their ends

    def crop(self, before: int, remove: int) -> Crop:
        """Take the last `remove` columns off; the same plan again for each further layer.

        Raises CacheUseError when a window has already let go of tokens that would be needed again.
        """
        last = self.last
        if isinstance(last, Crop) and last.before == before and before - remove == last.after == self.seen:
            return last
        after, P = before - remove, self.page_size
        new = np.maximum(after - self.starts, 0)
        if self.window is not None:
            needed = np.maximum(new - self.window + 1, 0) // P
            if ((needed < self.first) & (new > 0) & (remove > 0)).any():
                raise CacheUseError(
                    f"cannot take {remove} columns off a sliding window of {self.window}: tokens that would be seen "
                    "again are gone. Call activate_past_recording() before the tokens that may be taken back"
                )
        keep = -(-new // P) if self.direct else np.minimum(new // P, self.held)
        cut = np.flatnonzero((new < self.held * P) & (new % P != 0) & (new // P >= self.first))
        rows = _NONE if self.direct else cut
        plan = Crop(before, after, rows, new[rows] // P, self.pages[rows, new[rows] // P])
        keep = np.clip(keep, self.first, self.held)
        gone = [self.pages[b, keep[b] : self.held[b]] for b in range(self.batch)]
        self.pool.release(np.concatenate([np.zeros(0, np.int32), *gone]))
        self.held, self.first = keep, self.first.copy()
        self.held[new == 0] = self.first[new == 0] = 0
        self.seen = after
        if after == 0:
            self.starts, self.padding = np.zeros_like(self.starts), None
        recording, self.recording = self.recording, False
        self._release_passed(new)
        self.recording = recording
        self.last, self.tokens = plan, None
        self.touched()
        return plan

    def take_rows(self, index: np.ndarray) -> None:
        """Make row `i` what row `index[i]` was: reorder, select, repeat. Pages are shared, not copied."""
        if np.array_equal(index, np.arange(self.batch)):
            return
        old = self.all_pages()
        if self.padding is not None and len(self.padding) == self.batch:
            self.padding = self.padding[index]
        self.pages, self.starts = self.pages[index], self.starts[index]
        self.first, self.held = self.first[index], self.held[index]
        self.pool.share(self.all_pages())
        self.pool.release(old)
        self.last = self.tokens = None
        self.touched()

    def clear(self) -> None:
        """Give every page back and forget all tokens."""
        self.pool.release(self.all_pages())
        self.last = self.tokens = self.padding = None
        self._start(0)

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockTable:
        """A fork: its own tables over the same pages."""
        fork = copy.copy(self)
        for name in ("starts", "pages", "first", "held"):
            setattr(fork, name, getattr(self, name).copy())
        self.pool.share(self.all_pages())
        memo[id(self)] = fork
        return fork

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing() and getattr(self, "pages", None) is not None and self.batch:
            self.pool.release(self.all_pages())


def ranges(start: np.ndarray, count: np.ndarray) -> np.ndarray:
    """`start[i], start[i] + 1, ...`, `count[i]` of them, one after the other."""
    ends = np.cumsum(count)
    out: np.ndarray = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - count - start, count)
    return out
