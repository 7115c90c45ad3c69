"""Walk over a view's tokens in bounded runs: what the torch op and the decoding of lazy views share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from hf_kvcache.formats import pages as codec
from hf_kvcache.ops.view import KVView

SCRATCH = 4 << 20  # float32 values in one decoded run, and in its scores


@dataclass
class Run:
    """Some tokens of every row: float32 or model dtype `[B, H, n, D]`; token numbers `[B, n]` or, equal in all rows, `[1, n]`.

    ragged: some slots hold no token (number below 0): they may be NaN.
    """

    keys: torch.Tensor
    values: torch.Tensor
    tokens: torch.Tensor
    ragged: bool


def _run_tokens(view: KVView, queries: int) -> int:
    """Tokens in a run, so that neither the decoded run nor its scores pass `SCRATCH` values."""
    layout = view.layout
    widest = max(layout.key_dim + layout.value_dim, queries)
    return max(layout.page_size, SCRATCH // (view.batch * layout.heads * widest))


def page_runs(view: KVView, queries: int, unrotate: bool = False) -> Iterator[Run]:
    """Runs of pages, decoded; rotated sides stay rotated unless `unrotate`. `queries`: score rows a head, for the bound."""
    layout, P, B = view.layout, view.layout.page_size, view.batch
    sealed, lengths = view.sealed.cpu().numpy(), view.lengths.cpu().numpy()
    ends = np.minimum(sealed, lengths)
    first = view.first_tokens().cpu().numpy()
    table = view.table.cpu().numpy()
    pages = max(1, _run_tokens(view, queries) // P)
    lo, hi = int(np.min(first)) // P, -(-int(ends.max(initial=0)) // P)
    for start in range(lo, hi, pages):
        index = np.arange(start, min(start + pages, hi))
        token = index[:, None] * P + np.arange(P)
        valid = (token.reshape(1, -1) >= first[:, None]) & (token.reshape(1, -1) < ends[:, None])
        held = valid.reshape(B, len(index), P).any(-1)
        if not held.any():
            continue
        ids = table[:, index]
        ids = np.where(held, ids, ids[held][0])
        raw = codec.gather(view.slabs, ids.reshape(-1))
        keys, values = (
            codec.decode(raw, side, layout, unrotate=unrotate).unflatten(0, (B, len(index))).transpose(1, 2).flatten(2, 3)
            for side in ("k", "v")
        )
        ragged = not valid.all()
        tokens = np.where(valid, token.reshape(1, -1), -1) if ragged else token.reshape(1, -1)
        yield Run(keys, values, torch.as_tensor(tokens, device=raw.device), ragged)


def exact_runs(view: KVView, queries: int) -> Iterator[Run]:
    """Sinks, the ring and the tokens of this call, all in the model's basis."""
    B, device = view.batch, view.starts.device
    lengths = view.lengths.long().view(-1, 1)
    if view.sink_keys is not None and view.sink_values is not None:
        token = torch.arange(view.sinks, device=device).expand(B, -1)
        yield Run(view.sink_keys, view.sink_values, torch.where(token < lengths, token, -1), True)
    if view.ring_keys is not None and view.ring_values is not None:
        C = view.ring_keys.shape[2]
        slot = torch.arange(C, device=device).expand(B, -1)
        sealed = view.sealed.long().view(-1, 1)
        token = sealed + (slot - sealed) % C
        used = (token < lengths) & (token >= view.sinks)
        if view.window is not None:  # the ring may reach back further than the window
            used &= token >= view.first_tokens().view(-1, 1)
        yield Run(view.ring_keys, view.ring_values, torch.where(used, token, -1), True)
    if view.new_keys is not None and view.new_values is not None:
        step = _run_tokens(view, queries)
        first = view.offset + view.columns - view.new_tokens
        for lo in range(0, view.new_tokens, step):
            keys, values = view.new_keys[:, :, lo : lo + step], view.new_values[:, :, lo : lo + step]
            column = torch.arange(lo, lo + keys.shape[2], device=device) + first
            token = column - view.starts.long().view(-1, 1)
            yield Run(keys, values, token, True)
