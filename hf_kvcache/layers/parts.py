"""What a paged layer is made of beside its pages."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hf_kvcache.memory.exact import ExactMoves
from hf_kvcache.memory.indices import IndexCache
from hf_kvcache.memory.store import PageStore
from hf_kvcache.memory.table import BlockTable


@dataclass
class Kind:
    """What all layers of one kind share: the table and its tensors. The first layer of the kind moves the table."""

    table: BlockTable
    indices: IndexCache = field(init=False)
    moves: ExactMoves = field(init=False)
    writers: list[PageStore] = field(default_factory=list)  # of an append that shares pages: who wrote already

    def __post_init__(self) -> None:
        self.indices, self.moves = IndexCache(self.table), ExactMoves(self.table)


@dataclass
class Exact:
    """Keys and values of some tokens in the model's dtype, `[B, H, n, D]` each."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return sum(t.numel() * t.element_size() for t in (self.keys, self.values))

    def take(self, index: torch.Tensor) -> Exact:
        """Rows by index."""
        return Exact(self.keys.index_select(0, index), self.values.index_select(0, index))


def same_states(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether keys (or values) of the same tokens agree but for rounding, in the norm of all of them.

    Rows of one batch may be summed in another order, by their place in it and their padding. What passes is a thousand
    roundings of float32, eight of bfloat16: a model that treats the rows differently does not.
    """
    limit = 1e-4 if a.dtype == torch.float32 else 8 * torch.finfo(a.dtype).eps
    return bool(torch.dist(a.float(), b.float()) <= limit * b.float().norm())
