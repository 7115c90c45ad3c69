"""A block table's integers as tensors, made once a change and shared by all layers of the kind."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_kvcache.memory.plans import Append
from hf_kvcache.memory.table import BlockTable


@dataclass(frozen=True, eq=False)
class Indices:
    """int32 tensors of one state of a table; see `ops.view.KVView`."""

    table: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    sealed: torch.Tensor
    max_length: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(t.numel() * t.element_size() for t in (self.table, self.starts, self.lengths, self.sealed))


class IndexCache:
    """The latest `Indices` of one table, for each device and kind of view."""

    def __init__(self, table: BlockTable) -> None:
        self.table = table
        self._made: dict[Any, Indices] = {}
        self._version = -1

    def get(self, device: torch.device, plan: Append | None = None) -> Indices:
        """Indices of the table as it is or, with `plan`, of the history before that append."""
        if self._version != self.table.version:
            self._made.clear()
            self._version = self.table.version
        key = (device, plan is not None)
        if key not in self._made:
            table = self.table
            lengths = table.lengths if plan is None else plan.old_lengths
            sealed = np.minimum(table.sealed, lengths) if table.direct else table.sealed

            def tensor(x: np.ndarray) -> torch.Tensor:
                return torch.as_tensor(x.astype(np.int32), device=device)

            self._made[key] = Indices(
                tensor(table.pages), tensor(table.starts), tensor(lengths), tensor(sealed), int(lengths.max(initial=0))
            )
        return self._made[key]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held."""
        return sum(made.nbytes for made in self._made.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> IndexCache:
        fork = IndexCache(copy.deepcopy(self.table, memo))
        memo[id(self)] = fork
        return fork
