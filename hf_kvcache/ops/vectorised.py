"""Attention in plain torch, a bounded run of pages at a time with an online softmax: any device, any mask.

The decoded history never exists as a whole: a run is decoded, used and dropped.
"""

from __future__ import annotations

import torch

from hf_kvcache.formats import hadamard
from hf_kvcache.ops.api import AttendCall
from hf_kvcache.ops.runs import Run, exact_runs, page_runs


def why_not(call: AttendCall) -> str | None:
    """It serves every call."""
    return None


def attend(call: AttendCall) -> torch.Tensor:
    """See `ops.api.attend`."""
    view, layout = call.view, call.view.layout
    B, HQ, Q, _ = call.query.shape
    H = layout.heads
    query = call.query.float().reshape(B, H, HQ // H * Q, -1) * call.scale
    mixed, width = (layout.spec.key, layout.key_dim) if call.absorbed else (layout.spec.value, layout.value_dim)
    state = _Softmax(call, B, H, HQ // H, Q, width)
    if view.max_length > view.sinks or view.sink_keys is None:
        parts = query.split((layout.key_dim, layout.value_dim), dim=-1) if call.absorbed else (query,)
        sides = zip(parts, (layout.spec.key, layout.spec.value), strict=False)
        rotated = torch.cat([hadamard.rotate_matmul(x) if side.rotate else x for x, side in sides], dim=-1)
        for run in page_runs(view, HQ // H * Q):
            state.add(rotated, run)
        if mixed.rotate:
            state.out = hadamard.rotate_matmul(state.out)
    for run in exact_runs(view, HQ // H * Q):
        state.add(query, run)
    return state.result().to(call.query.dtype)


class _Softmax:
    """The online softmax (arXiv:1805.02867) of `[B, H, G * Q]` queries over runs of tokens."""

    def __init__(self, call: AttendCall, B: int, H: int, G: int, Q: int, D: int) -> None:
        self.call, self.G, self.Q = call, G, Q
        device = call.query.device
        self.top = torch.full((B, H, G * Q, 1), -torch.inf, device=device)
        self.total = torch.zeros(B, H, G * Q, 1, device=device)
        self.out = torch.zeros(B, H, G * Q, D, device=device)
        if call.sinks is not None:  # a token without a value: it only takes its share of the weights
            self.top = self.top.clone()
            self.top[:] = call.sinks.float().view(1, H, G, 1).expand(B, H, G, Q).reshape(B, H, G * Q, 1)
            self.total += 1

    def add(self, query: torch.Tensor, run: Run) -> None:
        keys, values = run.keys.float(), run.values.float()
        if self.call.absorbed:
            latent, rope = query.split((keys.shape[-1], values.shape[-1]), dim=-1)
            scores = torch.matmul(latent, keys.transpose(-1, -2)) + torch.matmul(rope, values.transpose(-1, -2))
            values = keys
        else:
            scores = torch.matmul(query, keys.transpose(-1, -2))
        if self.call.softcap is not None:
            scores = self.call.softcap * torch.tanh(scores / self.call.softcap)
        scores = self._mask(scores, run)
        top = torch.maximum(self.top, scores.amax(dim=-1, keepdim=True))
        anchor = torch.where(top == -torch.inf, torch.zeros_like(top), top)
        weights = torch.exp(scores - anchor)
        keep = torch.exp(self.top - anchor)
        if run.ragged:
            values = values.masked_fill((run.tokens < 0)[:, None, :, None], 0.0)
        self.total = self.total * keep + weights.sum(dim=-1, keepdim=True)
        self.out = self.out * keep + torch.matmul(weights, values)
        self.top = top

    def _mask(self, scores: torch.Tensor, run: Run) -> torch.Tensor:
        """Select what each query may see; scores `[B, H, G * Q, n]`."""
        call, view = self.call, self.call.view
        starts = view.starts.long().view(-1, 1, 1, 1)
        token = run.tokens[:, None, None, :]  # [B or 1, 1, 1, n]
        seen = token >= 0 if run.ragged else None
        if self.Q > 1 or view.window is not None:
            position = torch.arange(view.offset + view.columns - self.Q, view.offset + view.columns, device=scores.device)
            position = position.view(1, 1, -1, 1) - starts
            causal = token <= position
            if view.window is not None:
                causal &= (token > position - view.window) | (token < view.sinks)
            seen = causal if seen is None else seen & causal
        if call.mask is not None:
            column = view.columns_of(token).clamp(0, view.columns - 1)
            mask = call.mask.expand(-1, -1, self.Q, view.columns) if call.mask.shape[2] == 1 else call.mask
            heads = mask.shape[1]
            batch = max(mask.shape[0], column.shape[0])
            mask = mask.expand(batch, -1, -1, -1).gather(-1, column.expand(batch, heads, self.Q, -1))
            if mask.dtype == torch.bool:
                seen = mask if seen is None else seen & mask
            else:
                scores = self._per_query(scores).add(self._grouped(mask.float())).view(scores.shape)
        if seen is None:
            return scores
        scores5 = self._per_query(scores)
        return torch.where(self._grouped(seen), scores5, -torch.inf).view(scores.shape)

    def _per_query(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.unflatten(2, (self.G, self.Q))

    def _grouped(self, mask: torch.Tensor) -> torch.Tensor:
        """`[B, 1 or HQ, Q or 1, n]` -> `[B, 1 or H, 1 or G, Q or 1, n]`."""
        return mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, (-1, self.G))

    def result(self) -> torch.Tensor:
        B, H = self.out.shape[:2]
        out = self.out / torch.where(self.total == 0, torch.ones_like(self.total), self.total)
        return out.view(B, H * self.G, self.Q, -1)
