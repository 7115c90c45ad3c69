"""A cache layer over pages: glue between transformers, a block table, a store and the view that attention reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from hf_kvcache.errors import CacheUseError
from hf_kvcache.formats import pages as codec
from hf_kvcache.formats.spec import FormatSpec, PageLayout
from hf_kvcache.layers.checks import check_states
from hf_kvcache.layers.lazy import LazyKV
from hf_kvcache.layers.parts import Exact, Kind, same_states
from hf_kvcache.memory.plans import Append, Crop
from hf_kvcache.memory.store import PageStore
from hf_kvcache.ops.append import encoder
from hf_kvcache.ops.view import KVView


def room(like: torch.Tensor, tokens: int) -> torch.Tensor:
    """Memory for exact tokens, `[B, H, tokens, D]`; nothing is in it yet."""
    return like.new_empty(like.shape[0], like.shape[1], tokens, like.shape[3])


class PagedLayer(CacheLayerMixin):
    """Keys and values of one attention layer, encoded in pages.

    spec: the format. kind: what the layer shares with the others of its kind. leader: whether this layer is the
    first of them. imposed: the kind's window is not the model's own, so that transformers takes the layer for one of
    full attention; its attention must then be ours wherever several tokens pass the window at once.
    impl: attention implementation (`ops.api.IMPLS`) or "auto". steer: what `formats.steering.prepare` made of a
    calibration for this layer's keys, or None.
    """

    is_croppable = True
    is_compileable = False

    def __init__(
        self,
        spec: FormatSpec,
        kind: Kind,
        *,
        leader: bool,
        impl: str = "auto",
        steer: torch.Tensor | None = None,
        imposed: bool = False,
    ) -> None:
        self.spec, self.kind, self.leader, self.impl, self.steer = spec, kind, leader, impl, steer
        self.imposed, self.window = imposed, kind.table.window
        self.is_sliding = self.window is not None and not imposed
        self.sliding_window = None if imposed else self.window
        self.layout: PageLayout | None = None
        self.store: PageStore | None = None
        self.ring: Exact | None = None
        self.sinks: Exact | None = None
        self.seen = 0
        self.is_initialized = False

    # ---- what transformers asks

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys, decoded: `[B, H, columns, D_k]`; None before the first update."""
        return self._all("k")

    @property
    def values(self) -> torch.Tensor | None:
        """All values, decoded: `[B, H, columns, D_v]`; None before the first update."""
        return self._all("v")

    def _all(self, side: str) -> torch.Tensor | None:
        if self.layout is None or self.seen == 0:
            return None
        return LazyKV(self._view(None, 0), side, self.dtypes[side], self.kind.table).decode()

    def get_seq_length(self) -> int:
        """Columns seen so far, left padding included."""
        return self.seen

    def get_max_length(self) -> int:
        """Most columns it can hold; -1 is unbounded."""
        capacity = self.kind.table.capacity
        return self.sliding_window or (-1 if capacity is None else capacity)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that `update` will return for so many new ones, and the column of the sequence they start at."""
        offset = self._offset(self.seen)
        return self.seen - offset + query_length, offset

    def _offset(self, before: int) -> int:
        """Columns that are not shown to the tokens after `before`: all but the sinks and what the first of them sees."""
        return 0 if self.window is None else max(before - self.window + 1 - self.spec.sinks, 0)

    def activate_past_recording(self) -> None:
        """Keep what a `crop` may need again until it comes."""
        self.kind.table.recording = True

    @property
    def record_past(self) -> bool:
        """Whether past recording is on."""
        return self.kind.table.recording

    # ---- building

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take shapes, dtypes and device from the first keys and values, `[B, H, T, D]`."""
        self.device = key_states.device
        self.dtypes = {"k": key_states.dtype, "v": value_states.dtype}
        if self.layout is None:
            dtype = key_states.dtype
            self.layout = PageLayout(
                self.spec,
                heads=key_states.shape[1],
                key_dim=key_states.shape[3],
                value_dim=value_states.shape[3],
                page_size=self.kind.table.page_size,
                dtype=str(dtype).removeprefix("torch."),
                itemsize=dtype.itemsize,
                transposed=key_states.device.type == "cuda",
            )
            self.store = PageStore(self.layout, self.device)
        self.steer = None if self.steer is None else self.steer.to(self.device)
        self.is_initialized = True

    # ---- update

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `[B, H, T, D]` keys and values; returns what attention should see.

        That is the arguments themselves when the cache was empty (a prompt attends to itself exactly, unless it passes
        an imposed window), and lazy views of everything afterwards, in which the tokens of a call of more than one
        token are still exact.
        Raises CacheUseError, and changes nothing, for another batch size, dtype, shape or device.
        """
        if torch.compiler.is_compiling():
            return _update_outside_graph(self, key_states, value_states)
        check_states(self, key_states, value_states)
        B, _, T, _ = key_states.shape
        plan = self.kind.table.append(self.seen, T, B)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        empty = self.seen == 0
        plan = self._own_pages(plan, key_states, value_states)
        self._write(plan, key_states, value_states)
        self.seen += T
        if empty and not (self.imposed and self.window is not None and self.window < T):
            return key_states, value_states
        view = self._view(plan if T > 1 else None, T, key_states, value_states)
        table, impl = self.kind.table, self.impl
        return LazyKV(view, "k", self.dtypes["k"], table, impl), LazyKV(view, "v", self.dtypes["v"], table, impl)

    def _own_pages(self, plan: Append, k: torch.Tensor, v: torch.Tensor) -> Append:
        """The plan as it is, or without shared pages where rows with the same tokens do not have the same states."""
        if self.leader:
            self.kind.writers.clear()
        rows, index, owners = plan.twins
        if not len(rows):
            return plan
        assert self.store is not None
        table = self.kind.table
        slots = np.arange(table.page_size) - plan.before
        for b in np.unique(rows):
            at = rows == b
            token = index[at][:, None] * table.page_size + slots
            here, there = self._tensor(token + table.starts[b]), self._tensor(token + table.starts[owners[at], None])
            owner = self._tensor(owners[at, None])
            if not all(same_states(x[b].transpose(0, 1)[here], x[owner, :, there]) for x in (k, v)):
                plan, sources, targets = table.unshare(plan)
                for store in self.kind.writers:
                    store.grow(table.pool.capacity)
                    store.copy_pages(sources, targets)
                break
        self.kind.writers.append(self.store)
        return plan

    def _write(self, plan: Append, k: torch.Tensor, v: torch.Tensor) -> None:
        assert self.store is not None
        self.store.grow(self.kind.table.pool.capacity)
        if self.spec.sinks:
            self._write_sinks(plan, k, v)
        if self.kind.table.direct:
            self._write_tokens(plan, k, v)
        else:
            self._write_ring(plan, k, v)

    def _write_tokens(self, plan: Append, k: torch.Tensor, v: torch.Tensor) -> None:
        """Direct formats: encode each token where it will stay."""
        assert self.store is not None and self.layout is not None
        self.store.copy_pages(*plan.copies)
        fused = encoder(self.layout, self.device.type, self.impl)
        if fused is not None:
            where = (plan.rows, plan.chunk, plan.pages, plan.slots)
            fused.write_tokens(self.layout, self.store.addresses, where, k, v)
            return
        whole = len(plan.rows) == k.shape[0] * k.shape[2]
        rows, chunk = self._tensor(plan.rows), self._tensor(plan.chunk)
        for side, x, spec in zip(codec.SIDES, (k, v), (self.spec.key, self.spec.value), strict=True):
            x = x.transpose(1, 2).flatten(0, 1) if whole else x[rows, :, chunk]  # [N, H, D]
            if spec.kind == "exact":
                self.store.write_tokens(plan.pages, plan.slots, side, x, None)
            else:
                codes, scale, _ = codec.quantize_tokens(x.unsqueeze(2), spec)
                self.store.write_tokens(plan.pages, plan.slots, side, codes.squeeze(2), scale.squeeze(3))

    def _write_sinks(self, plan: Append, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep each row's first real tokens."""
        if self.sinks is None:
            self.sinks = Exact(room(k, self.spec.sinks), room(v, self.spec.sinks))
        for b, token, end, column in self.kind.moves.sinks(plan, self.spec.sinks):
            for held, x in ((self.sinks.keys, k), (self.sinks.values, v)):
                held[b, :, token:end] = x[b, :, column : column + end - token]

    def _write_ring(self, plan: Append, k: torch.Tensor, v: torch.Tensor) -> None:
        """Other formats: seal the pages that are due, keep the rest exact in the ring."""
        ring = self.ring or Exact(room(k, 0), room(v, 0))
        move = self.kind.moves.ring(plan, ring.keys.shape[2], self.spec.sinks)
        if move.sealing is not None:
            self._seal(plan, ring, k, v, move.sealing)
        if move.slots != ring.keys.shape[2]:
            larger = Exact(room(k, move.slots), room(v, move.slots))
            if move.kept is not None:
                rows, before, after = map(self._tensor, move.kept)
                larger.keys[rows, :, after] = ring.keys[rows, :, before]
                larger.values[rows, :, after] = ring.values[rows, :, before]
            ring = self.ring = larger
        for held, x in ((ring.keys, k), (ring.values, v)):
            if move.run is not None:
                column, slot, count = move.run
                held.narrow(2, slot, count).copy_(x.narrow(2, column, count))
            else:
                rows, columns, slots = map(self._tensor, move.new)
                held[rows, :, slots] = x[rows, :, columns]

    def _seal(self, plan: Append, ring: Exact, k: torch.Tensor, v: torch.Tensor, source: np.ndarray) -> None:
        """Encode the pages that are due; `source` `[N, P]` is where their tokens are in [ring | this append]."""
        assert self.store is not None and self.layout is not None
        fused = encoder(self.layout, self.device.type, self.impl)
        if fused is not None:
            where = (plan.seal_rows, source, plan.seal_pages)
            fused.write_pages(self.layout, self.store.addresses, where, k, v, (ring.keys, ring.values), self.steer)
            return
        rows, at = self._tensor(plan.seal_rows[:, None]), self._tensor(source)
        for side, held, x in zip(codec.SIDES, (ring.keys, ring.values), (k, v), strict=True):
            tokens = torch.cat((held, x), dim=2)[rows, :, at].transpose(1, 2)  # [N, H, P, D]
            self.store.write_pages(plan.seal_pages, codec.encode(tokens, side, self.layout, self.steer))

    def _tensor(self, x: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(x, device=self.device)

    def _view(
        self, plan: Append | None, T: int, k: torch.Tensor | None = None, v: torch.Tensor | None = None
    ) -> KVView:
        """What attention sees: all columns, or with `plan` the history before it and the new tokens exact."""
        assert self.layout is not None and self.store is not None
        made = self.kind.indices.get(self.device, plan)
        offset = self._offset(self.seen - T)
        ring, sinks = self.ring, self.sinks
        return KVView(
            self.layout,
            self.store.slabs,
            self.store.addresses,
            made.table,
            made.starts,
            made.lengths,
            made.sealed,
            made.max_length,
            columns=self.seen - offset,
            offset=offset,
            window=self.window,
            sink_keys=None if sinks is None else sinks.keys,
            sink_values=None if sinks is None else sinks.values,
            ring_keys=None if ring is None else ring.keys,
            ring_values=None if ring is None else ring.values,
            new_keys=k if plan is not None else None,
            new_values=v if plan is not None else None,
            imposed=self.imposed,
        )

    # ---- every other operation: the leader moves the table, each layer what it holds itself

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last `-tokens_to_remove` columns off (0 or negative, as transformers passes it).

        Exact within the ring; tokens of a sealed page that is cut come back as they were encoded.
        """
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 passes a tensor
        if tokens_to_remove > 0:
            raise CacheUseError(f"crop({tokens_to_remove}): pass the number of tokens to remove as a negative number")
        if self.seen == 0:
            return
        plan = self.kind.table.crop(self.seen, min(-tokens_to_remove, self.seen))
        if len(plan.rows):
            self._unseal(plan)
        self.seen = plan.after

    def _unseal(self, plan: Crop) -> None:
        assert self.store is not None and self.layout is not None and self.ring is not None
        P, C = self.layout.page_size, self.ring.keys.shape[2]
        raw = self.store.read_pages(plan.pages)
        slots = self._tensor((plan.index[:, None] * P + np.arange(P)) % C)
        rows = self._tensor(plan.rows[:, None])
        for side, held in zip(codec.SIDES, (self.ring.keys, self.ring.values), strict=True):
            held[rows, :, slots] = codec.decode(raw, side, self.layout).to(held.dtype).transpose(1, 2)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row i what row `beam_idx[i]` was; pages are shared, none is copied."""
        if self.kind.table.batch:
            self._take(beam_idx.to("cpu", torch.int64))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows that `indices` (numbers or a bool mask) names."""
        if self._rows:
            self._take(torch.arange(self._rows)[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, one after the other."""
        if self._rows:
            self._take(torch.arange(self._rows).repeat_interleave(repeats))

    @property
    def _rows(self) -> int:
        """Rows that this layer has to move: the leader may have moved the table, and with it every page, already."""
        held = self.ring or self.sinks
        return held.keys.shape[0] if held else self.kind.table.batch if self.leader else 0

    def _take(self, index: torch.Tensor) -> None:
        if self.leader:
            self.kind.table.take_rows(index.numpy())
        for name in ("ring", "sinks"):
            held = getattr(self, name)
            if held is not None:
                setattr(self, name, held.take(index.to(held.keys.device)))

    def reset(self) -> None:
        """Forget all tokens; the memory is kept for the next ones."""
        if self.leader:
            self.kind.table.clear()
        self.seen, self.ring, self.sinks = 0, None, None

    def restore(
        self,
        device: torch.device,
        seen: int,
        pages: np.ndarray,
        data: torch.Tensor,
        ring: Exact | None = None,
        sinks: Exact | None = None,
    ) -> None:
        """Take over what another layer of this layout held: physical `pages` filled with `data`, the exact tokens."""
        assert self.layout is not None
        self.device, self.store = device, PageStore(self.layout, device)
        self.store.grow(self.kind.table.pool.capacity)
        if len(pages):
            self.store.put_pages(pages, data)
        self.seen, self.ring, self.sinks = seen, ring, sinks

    def offload(self) -> None:
        """Not used: transformers' own offloading moves `keys` and `values`, which pages do not have."""
        raise CacheUseError("transformers' offloading cannot move pages")

    prefetch = offload


# A frame that is never traced costs 20 us a call, so only a compiled model's calls go through one.
_update_outside_graph = torch.compiler.disable(PagedLayer.update)
