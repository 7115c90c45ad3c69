"""Attention over a view: choose an implementation, call it. The name says what, `impl=` says how."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

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
    absorbed: the view's keys are MLA latents, its values rope keys, both of one head. A query is its latent part (the key
        up-projection is in it) and its rope part side by side, `[B, HQ, Q, D_k + D_v]`; latents are what is mixed, so
        that the output is `[B, HQ, Q, D_k]`.
    """

    query: torch.Tensor
    view: KVView
    scale: float
    mask: torch.Tensor | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    absorbed: bool = False


class Implementation(Protocol):
    """What a module in `IMPLS` provides."""

    why_not: Callable[[AttendCall], str | None]  # None, or why this call cannot be served
    attend: Callable[[AttendCall], torch.Tensor]  # [B, HQ, Q, D_v or, absorbed, D_k], the query's dtype


IMPLS: dict[str, str] = {  # "auto" takes the first that serves a call; the reference only when it is asked for
    "triton": "hf_kvcache.ops.triton",
    "numba": "hf_kvcache.ops.cpu",
    "torch": "hf_kvcache.ops.vectorised",
    "reference": "hf_kvcache.ops.reference",
}


@functools.cache
def _unavailable(name: str, device: str) -> str | None:
    """Why an implementation cannot run in this process on such a device, before any call is seen."""
    if name == "triton" and device != "cuda":
        return f"needs a GPU; the cache is on {device}"
    if name == "numba" and device != "cpu":
        return f"needs the CPU; the cache is on {device}"
    if name in ("triton", "numba") and importlib.util.find_spec(name) is None:
        extra = {"triton": "gpu", "numba": "cpu"}[name]
        return f"{name} is not installed: pip install 'hf-kvcache[{extra}]'"
    if importlib.util.find_spec(IMPLS[name]) is None:
        return "not part of this installation"
    return None


@functools.cache
def _load(name: str) -> Implementation:
    return cast(Implementation, importlib.import_module(IMPLS[name]))


def attend(call: AttendCall, impl: str = "auto") -> torch.Tensor:
    """Attend to the view's tokens; `[B, HQ, Q, D_v]` in the query's dtype.

    Raises ImplError when `impl` names an implementation that cannot serve the call.
    """
    device = call.query.device.type
    if impl != "auto":
        reason = _unavailable(impl, device) or _load(impl).why_not(call)
        if reason:
            raise ImplError(f"impl={impl!r} cannot serve this call: {reason}")
        return _load(impl).attend(call)
    for name in IMPLS:
        if name != "reference" and _unavailable(name, device) is None and _load(name).why_not(call) is None:
            return _load(name).attend(call)
    raise ImplError(f"no implementation serves this call on {device}")


def impl_report(device: str = "cpu") -> dict[str, str]:
    """For each implementation: `"available"`, or why it cannot run on such a device in this process."""
    return {name: _unavailable(name, device) or "available" for name in IMPLS}
