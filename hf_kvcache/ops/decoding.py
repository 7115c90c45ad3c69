"""Decode a whole view to plain tensors: what an operation that is not our attention gets."""

from __future__ import annotations

import torch

from hf_kvcache.ops.runs import Run, exact_runs, page_runs
from hf_kvcache.ops.view import KVView


def decode(view: KVView, side: str, dtype: torch.dtype) -> torch.Tensor:
    """Keys (`side="k"`) or values (`"v"`) of a view, `[B, H, columns, D]` in `dtype`; columns without a token are zeros."""
    layout = view.layout
    head_dim = layout.key_dim if side == "k" else layout.value_dim
    out = torch.zeros(view.batch, layout.heads, view.columns, head_dim, dtype=dtype, device=view.starts.device)
    runs = [*page_runs(view, 1, unrotate=True)] if view.max_length else []
    for run in [*runs, *exact_runs(view, 1)]:
        _place(out, run.keys if side == "k" else run.values, run, view)
    return out


def _place(out: torch.Tensor, x: torch.Tensor, run: Run, view: KVView) -> None:
    columns = view.columns_of(run.tokens).expand(view.batch, -1)
    for b in range(view.batch):
        token = run.tokens[min(b, len(run.tokens) - 1)]
        if run.ragged:
            kept = torch.nonzero(token >= 0).squeeze(-1)
            out[b, :, columns[b, kept]] = x[b, :, kept].to(out.dtype)
        else:
            first = int(columns[b, 0])
            out[b, :, first : first + len(token)] = x[b]
