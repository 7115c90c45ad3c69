"""The view: all that an attention call needs to know about one layer's memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvcache.formats.spec import PageLayout


@dataclass(frozen=True, eq=False)
class KVView:
    """One layer's keys and values as they are stored, for `B` rows.

    A row's real tokens are numbered from 0, after its left padding. Token `t` of row `b` is column
    `starts[b] + t - offset` of the attention mask; sinks that the view's first column has passed stand at its front, in
    columns `0 .. S - 1`. A token is read from, in this order:

    - `sink_keys[b, :, t]`, if `t < S`, the number of sinks;
    - the page with id `table[b, t // P]`, slot `t % P`, if `t < sealed[b]`;
    - `ring_keys[b, :, t % C]`, if `t < lengths[b]`, where `C` is the ring's capacity;
    - `new_keys[b, :, c]` for the last `T` columns, `c` counted in columns: the tokens of this very call, exact.

    Anything else (slots past a length, table entries past the end, pages that a window has passed) may hold
    garbage, NaN included.

    layout: PageLayout, where each field of a page is.
    slabs: the store, uint8 `[n, page_bytes]` each; ids count through them in order.
    addresses: int64 `[pages]`, the address of each page (for kernels), on `starts`' device.
    table: int32 `[B, pages in the longest row]`, page ids.
    starts, lengths, sealed: int32 `[B]`: left padding; real tokens in the store; of these, tokens in pages.
    max_length: the largest of `lengths`, on the host.
    sink_keys, sink_values: `[B, H, S, D]` in the model's dtype, or None.
    ring_keys, ring_values: `[B, H, C, D]` in the model's dtype, not rotated, or None (direct formats).
    new_keys, new_values: `[B, H, T, D]` in the model's dtype, or None: then all tokens are in the store.
    columns: mask columns that the view covers, the `T` new ones included.
    offset: column of the whole sequence at which the view starts. 0 or, under a window, so much more that `S` columns
        for sinks and those that the first query sees are left.
    window: a query sees itself and `window - 1` tokens before it (and the sinks); None is all.
    imposed: the window is the cache's and not the model's, so that the model's own masks do not show it.
    """

    layout: PageLayout
    slabs: tuple[torch.Tensor, ...]
    addresses: torch.Tensor
    table: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    sealed: torch.Tensor
    max_length: int
    columns: int
    offset: int = 0
    window: int | None = None
    sink_keys: torch.Tensor | None = None
    sink_values: torch.Tensor | None = None
    ring_keys: torch.Tensor | None = None
    ring_values: torch.Tensor | None = None
    new_keys: torch.Tensor | None = None
    new_values: torch.Tensor | None = None
    imposed: bool = False

    @property
    def batch(self) -> int:
        """Rows `B`."""
        return self.starts.shape[0]

    @property
    def sinks(self) -> int:
        """Exact first tokens `S`."""
        return 0 if self.sink_keys is None else self.sink_keys.shape[2]

    @property
    def new_tokens(self) -> int:
        """Exact last columns `T`."""
        return 0 if self.new_keys is None else self.new_keys.shape[2]

    def first_tokens(self) -> torch.Tensor:
        """The first token of each row that is no sink and has a column, int64 `[B]`; those between are passed."""
        first = self.offset - self.starts.long() + self.sinks
        return torch.where(self.starts < self.offset, first, self.sinks)

    def columns_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """The column of each token (int64, `[B or 1, ...]`); passed tokens get one outside the view."""
        starts = self.starts.long().view(-1, *[1] * (tokens.dim() - 1))
        columns = tokens + starts - self.offset
        if not self.sinks:
            return columns
        passed = torch.where(columns < self.sinks, -1, columns)
        return torch.where(starts < self.offset, torch.where(tokens < self.sinks, tokens, passed), columns)

    def column_tokens(self) -> torch.Tensor:
        """The token that stands in each column, int64 `[B, columns]`; below 0 for left padding."""
        starts = self.starts.long().view(-1, 1)
        column = torch.arange(self.columns, device=starts.device).view(1, -1)
        return torch.where((starts < self.offset) & (column < self.sinks), column, column + self.offset - starts)
