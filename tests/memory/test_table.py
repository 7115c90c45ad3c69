"""Block tables as a state machine: any order of operations against a model made of plain lists."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_kvcache.errors import CacheFullError, CacheUseError
from hf_kvcache.memory.plans import Append
from hf_kvcache.memory.snapshot import restore_table, table_arrays
from hf_kvcache.memory.table import BlockTable

P = 4
TOKENS = itertools.count(1)


@dataclass
class Fork:
    """A table, what its ring holds, and what its rows should hold: `None` for a column of padding."""

    table: BlockTable
    rows: list[list[int | None]]
    ring: list[dict[int, int]] = field(default_factory=list)
    padding: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)  # tokens of each row before this one may be gone (window)
    cropped: bool = False  # its newest tokens may have been sealed before newer ones were taken off

    def real(self, row: int) -> list[int]:
        return [token for token in self.rows[row] if token is not None]


class Tables(RuleBasedStateMachine):
    """Some forks over one pool and one memory of pages."""

    direct = True
    residual = 0
    window: int | None = None

    @initialize(batch=st.integers(1, 4))
    def start(self, batch: int) -> None:
        table = BlockTable(P, direct=self.direct, residual=self.residual, window=self.window)
        self.memory: dict[int, list[int | None]] = {}
        self.forks = [Fork(table, [[] for _ in range(batch)])]
        self.pool = table.pool
        self.batch, self.shared = batch, 0

    def pick(self, which: int) -> Fork:
        return self.forks[which % len(self.forks)]

    @rule(
        which=st.integers(0, 9),
        columns=st.integers(1, 11),
        padding=st.lists(st.integers(0, 6), min_size=8, max_size=8),
        told=st.booleans(),
        same=st.booleans(),
    )
    def append(self, which: int, columns: int, padding: list[int], told: bool, same: bool) -> None:
        fork = self.pick(which)
        table, before = fork.table, len(fork.rows[0])
        if before == 0:
            fork.padding = padding[: len(fork.rows)]
            table.padding = np.array(fork.padding)
        for b, row in enumerate(fork.rows):
            row.extend(None if before + c < fork.padding[b] else next(TOKENS) for c in range(columns))
            if same and fork.padding[b] == fork.padding[0]:
                row[before:] = fork.rows[0][before:]
        told = told and len(fork.rows) > 1
        table.note_tokens(before, np.array([[x or 0 for x in row[before:]] for row in fork.rows]) if told else None)
        plan = table.append(before, columns, len(fork.rows))
        assert table.append(before, columns, len(fork.rows)) is plan, "another layer gets the same plan"
        fork.ring = fork.ring or [{} for _ in fork.rows]
        fork.kept = fork.kept or [0] * len(fork.rows)
        self.shared += len(plan.twins[0])
        if len(plan.twins[0]) and columns % 3 == 0:  # a layer finds that the states differ after all
            plan, sources, targets = table.unshare(plan)
            for source, target in zip(sources, targets, strict=True):
                self.memory[int(target)] = list(self.memory.get(int(source), [None] * P))
        self.follow(fork, plan)

    def follow(self, fork: Fork, plan) -> None:
        """Do what a layer does with an append's plan."""
        table = fork.table
        for source, target in zip(*plan.copies, strict=True):
            self.memory[int(target)] = list(self.memory[int(source)])
        before = plan.before
        twins = {int(table.pages[b, i]) for b, i in zip(*plan.twins[:2], strict=True)}
        for b, column, page, slot in zip(plan.rows, plan.chunk, plan.pages, plan.slots, strict=True):
            assert int(page) in twins or self.pool.references(np.array([page]))[0] == 1, "a shared page was written"
            self.memory.setdefault(int(page), [None] * P)[slot] = fork.rows[b][before + column]
        if not table.direct:
            for b in range(len(fork.rows)):
                real = fork.real(b)
                fork.ring[b].update({t: real[t] for t in range(int(plan.old_lengths[b]), len(real))})
            for b, index, page in zip(plan.seal_rows, plan.seal_index, plan.seal_pages, strict=True):
                assert int(page) in twins or self.pool.references(np.array([page]))[0] == 1
                self.memory[int(page)] = [fork.ring[b][t] for t in range(index * P, index * P + P)]
            for b, sealed in enumerate(table.sealed):
                fork.ring[b] = {t: x for t, x in fork.ring[b].items() if t >= sealed}
        if self.window is not None and not table.recording:
            # What queries of this very append could see has to be there still; after it, only what the next one needs.
            for b, old in enumerate(plan.old_lengths):
                fork.kept[b] = max(
                    fork.kept[b], int(old) - self.window + 1 if old else len(fork.real(b)) - self.window + 1
                )

    @precondition(lambda self: len(self.forks) < 4)
    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        fork = self.pick(which)
        self.forks.append(
            Fork(
                copy.deepcopy(fork.table),
                copy.deepcopy(fork.rows),
                copy.deepcopy(fork.ring),
                list(fork.padding),
                list(fork.kept),
                fork.cropped,
            )
        )

    @rule(which=st.integers(0, 9))
    def save_and_load(self, which: int) -> None:
        """Put a table down as arrays, and take it up in its own pages."""
        fork = self.pick(which)
        old = fork.table
        if not old.seen or old.recording:
            return
        arrays, held = table_arrays(old)
        table = BlockTable(P, direct=self.direct, residual=self.residual, window=self.window, pool=self.pool)
        table.padding = old.padding  # which the next mask tells again
        for page, source in zip(restore_table(table, arrays, old.seen, len(held)), held, strict=True):
            self.memory[int(page)] = list(self.memory[int(source)])
        fork.table = table

    @precondition(lambda self: len(self.forks) > 1)
    @rule(which=st.integers(0, 9))
    def drop(self, which: int) -> None:
        del self.forks[which % len(self.forks)]

    @rule(which=st.integers(0, 9), remove=st.integers(0, 14))
    def crop(self, which: int, remove: int) -> None:
        fork = self.pick(which)
        table, before = fork.table, len(fork.rows[0])
        remove = min(remove, before)
        if before == 0:
            return
        state = (table.seen, table.first.tolist(), table.held.tolist(), self.pool.live)
        plan, refusal = None, ""
        try:
            plan = table.crop(before, remove)
        except CacheUseError as error:
            refusal = str(error)
        if plan is None:
            assert self.window is not None
            assert "sliding window" in refusal
            assert (table.seen, table.first.tolist(), table.held.tolist(), self.pool.live) == state
            return
        assert table.crop(before, remove) is plan
        fork.cropped = fork.cropped or remove > 0
        for b, row in enumerate(fork.rows):
            del row[before - remove :]
            new = len(fork.real(b))
            fork.ring[b] = {t: x for t, x in fork.ring[b].items() if t < new}
        for b, index, page in zip(plan.rows, plan.index, plan.pages, strict=True):
            new = len(fork.real(b))
            fork.ring[b].update({index * P + s: x for s, x in enumerate(self.memory[int(page)]) if index * P + s < new})
        for b in range(len(fork.rows)):
            if self.window is not None:
                fork.kept[b] = max(min(fork.kept[b], len(fork.real(b))), len(fork.real(b)) - self.window + 1)

    @rule(which=st.integers(0, 9), choice=st.lists(st.integers(0, 7), min_size=1, max_size=6))
    def take_rows(self, which: int, choice: list[int]) -> None:
        fork = self.pick(which)
        if not fork.rows[0]:
            return
        index = np.array([c % len(fork.rows) for c in choice])
        fork.table.take_rows(index)
        fork.rows = [list(fork.rows[i]) for i in index]
        fork.ring = [dict(fork.ring[i]) for i in index]
        fork.kept = [fork.kept[i] for i in index]
        fork.padding = [fork.padding[i] for i in index]

    @rule(which=st.integers(0, 9))
    def clear(self, which: int) -> None:
        fork = self.pick(which)
        fork.table.clear()
        fork.rows = [[] for _ in fork.rows]
        fork.ring, fork.kept, fork.cropped = [], [], False

    @precondition(lambda self: self.window is not None)
    @rule(which=st.integers(0, 9))
    def record(self, which: int) -> None:
        self.pick(which).table.recording = True

    @invariant()
    def every_row_reads_back(self) -> None:
        for fork in getattr(self, "forks", []):
            table = fork.table
            if not fork.rows[0]:
                continue
            assert table.seen == len(fork.rows[0])
            for b in range(len(fork.rows)):
                real = fork.real(b)
                assert table.lengths[b] == len(real)
                for t in range(max(0, fork.kept[b]), len(real)):
                    if t < table.sealed[b]:
                        assert t // P >= table.first[b], f"token {t} was let go"
                        assert self.memory[int(table.pages[b, t // P])][t % P] == real[t]
                    else:
                        assert fork.ring[b][t] == real[t]
                if not table.direct:
                    assert fork.cropped or len(real) - table.sealed[b] >= min(self.residual, len(real))
                    if not table.recording:
                        assert len(real) - table.sealed[b] < self.residual + P

    @invariant()
    def counts_are_owners(self) -> None:
        owners: dict[int, int] = {}
        for fork in getattr(self, "forks", []):
            for page in fork.table.all_pages():
                owners[int(page)] = owners.get(int(page), 0) + 1
        if hasattr(self, "pool"):
            counts = self.pool.references(np.arange(self.pool.capacity))
            assert {page: int(n) for page, n in enumerate(counts) if n} == owners
            assert self.pool.live == len(owners)
            assert self.pool.free == self.pool.capacity - len(owners)

    @invariant()
    def a_window_bounds_the_pages(self) -> None:
        for fork in getattr(self, "forks", []):
            table = fork.table
            if self.window is not None and not table.recording and isinstance(table.last, Append):
                most = (self.window + table.last.columns + self.residual + 2 * P) // P + 1
                assert max(len(table.row_pages(b)) for b in range(table.batch)) <= most

    def teardown(self) -> None:
        if hasattr(self, "forks"):
            for fork in self.forks:
                fork.table.clear()
            assert self.pool.live == 0, "pages were lost"


def machine(**settings_of: object) -> type:
    case = type("Case", (Tables,), settings_of).TestCase
    case.settings = settings(
        max_examples=15,
        stateful_step_count=20,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    return case


TestDirect = machine(direct=True)
TestDirectWindow = machine(direct=True, window=6)
TestDirectTinyWindow = machine(direct=True, window=1)
TestSealed = machine(direct=False, residual=0)
TestSealedResidual = machine(direct=False, residual=5)
TestSealedWindow = machine(direct=False, residual=3, window=6)
TestSealedResidualPastWindow = machine(direct=False, residual=9, window=3)


def test_batch_mismatch_changes_nothing() -> None:
    table = BlockTable(P, direct=True)
    table.append(0, 5, 2)
    with pytest.raises(CacheUseError, match="holds 2 rows and was given 3"):
        table.append(5, 1, 3)
    assert (table.seen, table.pool.live) == (5, 4)


def test_layers_out_of_step_are_told() -> None:
    table = BlockTable(P, direct=True)
    table.append(0, 5, 1)
    with pytest.raises(CacheUseError, match=r"out of step.*holds 3 columns, its block table 5.*reset"):
        table.append(3, 1, 1)


def test_capacity_is_taken_at_once_and_kept() -> None:
    table = BlockTable(P, direct=True, capacity=10)
    table.append(0, 4, 2)
    capacity = table.pool.capacity
    table.append(4, 6, 2)
    assert table.pool.capacity == capacity
    with pytest.raises(CacheFullError, match=r"max_cache_len=10 columns, 10 are filled and 1 more came"):
        table.append(10, 1, 2)
    assert table.seen == 10


def test_a_dropped_table_gives_its_pages_back() -> None:
    table = BlockTable(P, direct=True)
    table.append(0, 9, 2)
    pool, fork = table.pool, copy.deepcopy(table)
    fork.append(9, 1, 2)
    del table
    assert pool.live == 6
    del fork
    assert pool.live == 0
