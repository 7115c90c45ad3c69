"""Attention over a view: choose an implementation, call it. The name says what, `impl=` says how."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from hf_kvcache.errors import ImplError
from hf_kvcache.ops.view import KVView


@dataclass(frozen=True, eq=False)
class AttendCall:
    """One attention call over a view.

    query: `[B, HQ, Q, D_k]`, HQ a multiple of the view's H; row i is column `columns - Q + i`. Any strides.
    scale: factor of the scores.
    mask: None (causal over the real tokens: what `starts`, `lengths` and `window` imply), or a tensor that
        broadcasts to `[B, HQ, Q, columns]`: bool (True attends) or additive float. It can only take away
        from what None gives.
    softcap: scores become `softcap * tanh(scores / softcap)`, or None.
    sinks: `[HQ]` logits of a value-less extra token (gpt-oss), or None.
    """

    query: torch.Tensor
    view: KVView
    scale: float
    mask: torch.Tensor | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class Implementation(Protocol):
    """What a module in `IMPLS` provides."""

    why_not: Callable[[AttendCall], str | None]  # None, or why this call cannot be served
    attend: Callable[[AttendCall], torch.Tensor]  # [B, HQ, Q, D_v], the query's dtype


IMPLS: dict[str, str] = {
    "triton": "hf_kvcache.ops.triton",
    "numba": "hf_kvcache.ops.cpu",
    "torch": "hf_kvcache.ops.vectorised",
    "reference": "hf_kvcache.ops.reference",
}
AUTO = ("triton", "numba", "torch")


def attend(call: AttendCall, impl: str = "auto") -> torch.Tensor:
    """Attend to the view's tokens; `[B, HQ, Q, D_v]` in the query's dtype.

    Raises ImplError when `impl` names an implementation that cannot serve the call.
    """
    raise NotImplementedError
