"""A store of encoded prompt beginnings, shared by calls: found by a hash chain, believed only when the tokens agree."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hf_kvcache.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Part:
    """One layer's share of a chunk, one row, on the host.

    shape: heads, key dim, value dim. pages: those sealed within the chunk, uint8 `[n, page_bytes]`.
    exact: keys and values of the sinks, and of the tokens after the last sealed page at the chunk's end, `[1, H, n, D]`.
    """

    shape: tuple[int, int, int]
    pages: torch.Tensor
    exact: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(t.numel() * t.element_size() for t in (self.pages, *self.exact.values()))


@dataclass(frozen=True, eq=False)
class Chunk:
    """`chunk` tokens of a prompt after those of `parent`."""

    context: str
    parent: Chunk | None
    digest: bytes
    tokens: np.ndarray
    parts: list[Part] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes held, tokens included."""
        return int(self.tokens.nbytes) + sum(part.nbytes for part in self.parts)


class PrefixStore:
    """Encoded beginnings of prompts, for `cache_config={"prefix_store": store}`. Thread-safe; lives on the host.

    max_bytes: bound of what is held; the least recently used goes first. chunk: tokens that are found or missed
    together. salt: what tells tenants apart; equal prompts under another salt do not meet.

    With a store a prompt is prefilled `chunk` tokens at a time, found or not: what is found is what would have been
    computed. A deep copy is the same store.
    """

    def __init__(self, max_bytes: int = 1 << 30, *, chunk: int = 256, salt: str = "") -> None:
        if max_bytes < 1 or chunk < 16:
            raise ConfigError(f"max_bytes={max_bytes}, chunk={chunk}: accepted are at least 1 byte and 16 tokens")
        self.max_bytes, self.chunk, self.salt = max_bytes, chunk, salt
        self._chunks: OrderedDict[bytes, Chunk] = OrderedDict()  # least recently used first, parents after children
        self._lock = threading.RLock()
        self._bytes = self._hits = self._asked = self._evicted = 0

    def _digest(self, data: bytes) -> bytes:
        return hashlib.sha256(data).digest()

    def _name(self, context: str, parent: Chunk | None, tokens: np.ndarray) -> bytes:
        before = self._digest(f"{context} {self.salt}".encode()) if parent is None else parent.digest
        return self._digest(before + tokens.tobytes())

    def find(self, context: str, tokens: np.ndarray) -> list[Chunk]:
        """Chunks that int64 `tokens` begin with, in order; at least the last token is left to be computed."""
        found: list[Chunk] = []
        possible = max(len(tokens) - 1, 0) // self.chunk
        with self._lock:
            for i in range(possible):
                piece = tokens[i * self.chunk : (i + 1) * self.chunk]
                parent = found[-1] if found else None
                chunk = self._chunks.get(self._name(context, parent, piece))
                if chunk is None or not self._same(chunk, context, parent, piece):
                    break
                found.append(chunk)
            self._use(found[-1] if found else None)
            self._hits += len(found) * self.chunk
            self._asked += possible * self.chunk
        return found

    def _same(self, chunk: Chunk, context: str, parent: Chunk | None, tokens: np.ndarray) -> bool:
        """Whether a chunk is what its name says: two beginnings may have one digest."""
        return chunk.context == context and chunk.parent is parent and np.array_equal(chunk.tokens, tokens)

    def _use(self, chunk: Chunk | None) -> None:
        while chunk is not None:
            if self._chunks.get(chunk.digest) is chunk:
                self._chunks.move_to_end(chunk.digest)
            chunk = chunk.parent

    def put(self, context: str, parent: Chunk | None, tokens: np.ndarray, parts: list[Part]) -> Chunk | None:
        """Keep a chunk after `parent`; returns the one that is held, or None: too large, or its parent is gone."""
        with self._lock:
            if parent is not None and self._chunks.get(parent.digest) is not parent:
                return None
            digest = self._name(context, parent, tokens)
            held = self._chunks.get(digest)
            if held is not None:
                return held if self._same(held, context, parent, tokens) else None
            chunk = Chunk(context, parent, digest, tokens.copy(), parts)
            if chunk.nbytes > self.max_bytes:
                return None
            self._chunks[digest] = chunk
            self._bytes += chunk.nbytes
            self._use(chunk)
            while self._bytes > self.max_bytes:
                _, oldest = self._chunks.popitem(last=False)
                self._bytes -= oldest.nbytes
                self._evicted += 1
            return chunk if self._chunks.get(digest) is chunk else None

    def clear(self) -> None:
        """Forget everything but the counts."""
        with self._lock:
            self._chunks.clear()
            self._bytes = 0

    def stats(self) -> dict[str, Any]:
        """Chunks and bytes held, chunks evicted; of the tokens in whole chunks that were asked for, those found."""
        with self._lock:
            rate = self._hits / self._asked if self._asked else 0.0
            return {
                "chunks": len(self._chunks),
                "bytes": self._bytes,
                "evicted": self._evicted,
                "tokens_asked": self._asked,
                "tokens_found": self._hits,
                "hit_rate": rate,
            }

    def __deepcopy__(self, memo: dict[int, Any]) -> PrefixStore:
        memo[id(self)] = self
        return self
