"""Lazy keys and values: tensors without storage that our attention reads as pages and everything else as numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from hf_kvcache.errors import CacheUseError, StaleViewError
from hf_kvcache.memory.table import BlockTable
from hf_kvcache.ops.decoding import decode
from hf_kvcache.ops.view import KVView


class LazyKV(torch.Tensor):
    """Keys (`side="k"`) or values (`"v"`) of a view, posing as a tensor `[B, H, columns, D]`.

    Any torch operation on it decodes it first, once. It is good until its layer changes.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    view_: KVView
    side: str
    table: BlockTable
    impl: str
    version: int
    decoded: torch.Tensor | None

    @staticmethod
    def __new__(
        cls, view: KVView, side: str, dtype: torch.dtype, table: BlockTable, impl: str = "auto"
    ) -> LazyKV:
        head_dim = view.layout.key_dim if side == "k" else view.layout.value_dim
        size = (view.batch, view.layout.heads, view.columns, head_dim)
        self = torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=view.starts.device)
        self.view_, self.side, self.table, self.impl, self.version = view, side, table, impl, table.version
        self.decoded = None
        return self

    def current_view(self) -> KVView:
        """The view. Raises StaleViewError when the layer has changed since."""
        if self.table.version != self.version:
            raise StaleViewError(
                "these keys and values were returned by an earlier update(); the cache has changed since. "
                "Clone them before the next forward pass if they are needed later"
            )
        return self.view_

    def decode(self) -> torch.Tensor:
        """A plain tensor with the same values. Raises CacheUseError where no mask of the model's would be right for it."""
        if self.decoded is None:
            view = self.current_view()
            if view.imposed and view.window is not None and view.new_tokens > 1 and view.window < view.columns:
                raise CacheUseError(
                    f"{view.new_tokens} tokens pass an imposed window of {view.window}, and the attention that asks for "
                    "their keys and values knows of no window: call hf_kvcache.attach(model) first, pass one token at "
                    "a time, ask for no attention weights, or choose a paged_<format> cache"
                )
            self.decoded = decode(view, self.side, self.dtype)
        return self.decoded

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map(_plain, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:
        return f"LazyKV({self.side}, {tuple(self.shape)}, {self.dtype})"


def _plain(x: Any) -> Any:
    return x.decode() if isinstance(x, LazyKV) else x
