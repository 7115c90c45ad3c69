"""Attention calls to judge implementations by, built by real layers: every shape that a view can have."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_kvcache.config import resolve
from hf_kvcache.layers.paged import PagedLayer
from hf_kvcache.layers.parts import Kind
from hf_kvcache.memory.table import BlockTable
from hf_kvcache.ops.api import AttendCall
from hf_kvcache.ops.reference import decode, visible

BOGUS = 2**31 - 1  # a page id that nothing may follow


@dataclass(frozen=True)
class Case:
    """A call. lengths: real tokens of each row, padded on the left to the longest; pieces: how they are appended."""

    lengths: tuple[int, ...] = (45,)
    pieces: tuple[int, ...] = ()  # after the first append, which takes what is left
    heads: int = 2
    groups: int = 1  # query heads that share a key head
    dims: tuple[int, int] = (32, 32)
    page_size: int = 16
    queries: int = 1
    residual: int = 0
    sinks: int = 0
    window: int | None = None
    softcap: float | None = None
    sink_logits: bool = False
    mask: str | None = None
    dtype: torch.dtype = torch.float32


CASES: dict[str, Case] = {
    "one token": Case(lengths=(2,)),
    "page less one": Case(lengths=(16,)),
    "page": Case(lengths=(17,), pieces=(1,)),
    "page and one": Case(lengths=(18,), pieces=(1, 1)),
    "many pages": Case(lengths=(200,), groups=4),
    "ragged": Case(lengths=(5, 33, 64, 1), heads=3, groups=2),
    "ragged in big pages": Case(lengths=(5, 100, 64), page_size=64, groups=7),
    "a row of padding": Case(lengths=(0, 40), groups=2),
    "one key head": Case(lengths=(70, 20), heads=1, groups=8),
    "dims apart": Case(lengths=(50,), dims=(48, 16), groups=2),
    "dims of 80 and 96": Case(lengths=(40,), dims=(80, 96)),
    "two queries": Case(lengths=(50, 31), queries=2, groups=2),
    "five queries": Case(lengths=(33,), queries=5),
    "seventeen queries": Case(lengths=(60, 40, 18), queries=17, groups=2),
    "queries on padding": Case(lengths=(40, 3), queries=17),
    "softcap": Case(lengths=(50,), softcap=2.0, groups=2),
    "softcap, five queries": Case(lengths=(50,), softcap=2.0, queries=5),
    "sink logits": Case(lengths=(50, 9), sink_logits=True, groups=2),
    "sink logits, five queries": Case(lengths=(50, 9), sink_logits=True, queries=5),
    "window": Case(lengths=(70, 30), window=12, pieces=(1,) * 20, groups=2),
    "window, five queries": Case(lengths=(70, 30), window=12, pieces=(1,) * 20, queries=5),
    "window of a page": Case(lengths=(49,), window=16, pieces=(3,) * 5),
    "window past the prompt": Case(lengths=(20,), window=100),
    "ring": Case(lengths=(90, 41), residual=20, pieces=(1,) * 30, groups=2),
    "ring alone": Case(lengths=(10, 4), residual=32),
    "ring, five queries": Case(lengths=(90, 41), residual=20, pieces=(7, 9), queries=5),
    "ring under a window": Case(lengths=(70, 30), residual=9, window=12, pieces=(1,) * 20),
    "sinks": Case(lengths=(60, 1, 3), sinks=4, residual=8, groups=2),
    "sinks before a window": Case(lengths=(70, 30, 14, 3), sinks=3, window=12, pieces=(1,) * 20, groups=2),
    "sinks before a window, ring": Case(
        lengths=(90, 30, 41), sinks=2, residual=9, window=12, pieces=(1,) * 20, queries=5
    ),
    "a mask before a window": Case(lengths=(70, 30), sinks=3, window=12, pieces=(1,) * 20, mask="bool", queries=2),
    "sinks without ring": Case(lengths=(60, 9), sinks=4, queries=2),
    "bool mask": Case(lengths=(50, 20), mask="bool", groups=2),
    "bool mask, five queries": Case(lengths=(50, 20), mask="bool", queries=5),
    "mask of every head": Case(lengths=(50, 20), mask="heads", queries=3, groups=2),
    "float mask": Case(lengths=(50, 20), mask="float", queries=3, groups=2),
    "mask of one row": Case(lengths=(50, 20), mask="one row", queries=3),
    "everything": Case(
        lengths=(90, 41, 17),
        residual=10,
        sinks=2,
        pieces=(1,) * 9,
        softcap=5.0,
        sink_logits=True,
        mask="bool",
        queries=5,
        groups=2,
    ),
    "bfloat16": Case(lengths=(60, 20), dtype=torch.bfloat16, residual=8, groups=2),
    "float16": Case(lengths=(60, 20), dtype=torch.float16, queries=2),
}


def layer_of(fmt: str, case: Case) -> PagedLayer:
    options: dict[str, Any] = {"residual_length": case.residual, "sinks": case.sinks}
    spec = resolve(f"paged_{fmt}", options).spec
    groups = [side.group or 0 for side in (spec.key, spec.value) if side.per == "channel"]
    spec = spec.replace(page_size=max([case.page_size, *groups]))
    table = BlockTable(spec.page_size, direct=spec.direct, residual=spec.residual, window=case.window)
    return PagedLayer(spec, Kind(table), leader=True)


def call_of(fmt: str, case: Case, seed: int = 0) -> AttendCall:
    """The call, with bogus ids wherever a table has no page of its row."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    layer, B, T = layer_of(fmt, case), len(case.lengths), max(case.lengths)
    layer.kind.table.padding = np.array([T - n for n in case.lengths])
    k = (randn(B, case.heads, T, case.dims[0]) * torch.linspace(0.1, 3, case.dims[0])).to(case.dtype)
    v = randn(B, case.heads, T, case.dims[1]).to(case.dtype)
    pieces: Sequence[int] = (*case.pieces, case.queries)
    first = max(T - sum(pieces), 0)
    start = 0
    keys = None
    for n in (first, *pieces) if first else (T - case.queries, case.queries) if case.queries < T else (T,):
        keys = layer.update(k[:, :, start : start + n], v[:, :, start : start + n])[0]
        start += n
    view = keys.current_view()  # type: ignore[union-attr]
    table, P = view.table.clone(), layer.spec.page_size
    for b in range(B):
        table[b, : int(layer.kind.table.first[b])] = BOGUS
        table[b, -(-int(layer.kind.table.sealed[b]) // P) :] = BOGUS
    view = dataclasses.replace(view, table=table)
    HQ, Q = case.heads * case.groups, case.queries
    query = randn(B, Q, HQ, case.dims[0]).to(case.dtype).transpose(1, 2)  # not contiguous, as in models
    call = AttendCall(
        query,
        view,
        case.dims[0] ** -0.5,
        softcap=case.softcap,
        sinks=randn(HQ) if case.sink_logits else None,
    )
    return dataclasses.replace(call, mask=mask_of(case, call, generator))


def mask_of(case: Case, call: AttendCall, generator: torch.Generator) -> torch.Tensor | None:
    if case.mask is None:
        return None
    B, HQ, Q, _ = call.query.shape
    heads = HQ if case.mask == "heads" else 1
    rows = 1 if case.mask == "one row" else B
    kept = torch.rand(rows, heads, Q, call.view.columns, generator=generator) > 0.4
    kept[..., -Q:] |= torch.eye(Q, dtype=torch.bool)
    if case.mask == "float":
        bias = torch.randn(kept.shape, generator=generator)
        return torch.where(kept, bias, torch.finfo(torch.float32).min)
    return kept


def attend64(call: AttendCall) -> torch.Tensor:
    """The answer in float64: what the bytes say, one softmax."""
    return _softmax(call, torch.float64)


def eager32(call: AttendCall) -> torch.Tensor:
    """The same in float32: its distance from `attend64` is what float32 can be asked for."""
    return _softmax(call, torch.float32)


def _softmax(call: AttendCall, dtype: torch.dtype) -> torch.Tensor:
    keys, values = decode(call.view, dtype)
    groups = call.query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    scores = call.query.to(dtype) @ keys.transpose(-1, -2) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.mask is not None and call.mask.dtype != torch.bool:
        scores = scores + call.mask.to(dtype)
    scores = scores.masked_fill(~visible(call), -torch.inf)
    if call.sinks is not None:
        extra = call.sinks.to(dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, extra), dim=-1)
    weights = torch.nan_to_num(torch.softmax(scores, dim=-1), nan=0.0)
    return weights[..., : keys.shape[2]] @ values


def real_queries(call: AttendCall) -> torch.Tensor:
    """Queries that are real tokens, bool `[B, 1, Q, 1]`: what padding sees is nobody's business."""
    view, Q = call.view, call.query.shape[2]
    position = torch.arange(Q).view(1, 1, -1, 1) + view.offset + view.columns - Q
    return position >= view.starts.view(-1, 1, 1, 1)


def assert_right(got: torch.Tensor, call: AttendCall) -> None:
    """`got` is as near to the float64 answer as float32 comes, up to a small factor and its own dtype."""
    truth = attend64(call)
    assert got.shape == truth.shape
    assert got.dtype == call.query.dtype
    real = real_queries(call).expand_as(truth)
    assert torch.isfinite(got[real]).all()
    # Eight times what one plain float32 pass loses (an implementation may sum in another order, and rotate the query
    # where the oracle rotates keys), a floor for lucky eager passes, and one rounding to the output's dtype.
    bound = 8 * (eager32(call) - truth).abs().max() + 2e-6 * truth.abs().max()
    bound = bound + truth.abs() * torch.finfo(got.dtype).eps
    error = (got.double() - truth).abs()
    assert (error[real] <= bound.expand_as(error)[real]).all(), f"worst {error[real].max():.2e}"
