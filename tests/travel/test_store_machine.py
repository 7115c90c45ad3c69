"""A prefix store as a state machine: any order of operations against plain lists, with every digest the same or not."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hf_kvcache.memory.prefix import Chunk, Part, PrefixStore

SIZE, BOUND = 16, 4000
WORDS = st.lists(st.integers(0, 2), min_size=1, max_size=4)


class Coarse(PrefixStore):
    """Its digests are one of five: collisions are the rule."""

    def _digest(self, data: bytes) -> bytes:
        return bytes([super()._digest(data)[0] % 5])


class Prefixes(RuleBasedStateMachine):
    """What is found is a beginning of what was asked for, made of what was put, and the bound holds."""

    kind = PrefixStore

    def __init__(self) -> None:
        super().__init__()
        self.store = self.kind(max_bytes=BOUND, chunk=SIZE)
        self.put: dict[tuple[str, tuple[int, ...]], int] = {}  # (context, words) -> bytes of the latest part

    def row(self, words: list[int]) -> np.ndarray:
        return np.repeat(np.array([*words, 9], np.int64), SIZE)

    @rule(context=st.sampled_from("ab"), words=WORDS, nbytes=st.integers(0, 2500))
    def fill(self, context: str, words: list[int], nbytes: int) -> None:
        """As a prefill does: take what is found, put what is not."""
        row = self.row(words)
        chain = self.store.find(context, row[: len(words) * SIZE + 1])
        self.check(context, words, chain)
        for i in range(len(chain), len(words)):
            parts = [Part((1, 1, 1), torch.zeros(1, nbytes, dtype=torch.uint8), {})]
            kept = self.store.put(context, chain[-1] if chain else None, row[i * SIZE : (i + 1) * SIZE], parts)
            if kept is None:
                break
            self.put[context, tuple(words[: i + 1])] = nbytes
            chain.append(kept)
        self.check(context, words, chain)

    @rule(context=st.sampled_from("ab"), words=WORDS)
    def find(self, context: str, words: list[int]) -> None:
        self.check(context, words, self.store.find(context, self.row(words)))

    @rule()
    def clear(self) -> None:
        self.store.clear()

    def check(self, context: str, words: list[int], chain: list[Chunk]) -> None:
        for i, chunk in enumerate(chain):
            assert chunk.context == context
            assert chunk.tokens.tolist() == [words[i]] * SIZE
            assert chunk.parent is (chain[i - 1] if i else None)
            assert chunk.parts[0].nbytes == self.put[context, tuple(words[: i + 1])]

    @invariant()
    def bytes_are_those_held_and_parents_outlive_children(self) -> None:
        held = list(self.store._chunks.values())
        assert self.store.stats()["bytes"] == sum(chunk.nbytes for chunk in held) <= BOUND
        assert all(chunk.parent is None or any(chunk.parent is other for other in held) for chunk in held)


def machine(store: type[PrefixStore]) -> type:
    case = type("Case", (Prefixes,), {"kind": store}).TestCase
    case.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)
    return case


TestPrefixes = machine(PrefixStore)
TestPrefixesThatCollide = machine(Coarse)
