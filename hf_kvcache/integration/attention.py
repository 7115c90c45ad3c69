"""Our attention function for transformers: lazy views go to an op on their pages, the rest to the base implementation."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from hf_kvcache.errors import ConfigError
from hf_kvcache.integration.absorbing import absorbed, is_latent
from hf_kvcache.integration.bases import BASES
from hf_kvcache.layers.lazy import LazyKV
from hf_kvcache.ops.api import AttendCall, attend


def register() -> None:
    """Add our attention and mask functions."""
    masks = AttentionMaskInterface()
    for base, name in BASES.items():
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, masks[base])


def unregister() -> None:
    """Take them away again."""
    for name in BASES.values():
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Our attention function: lazy views go to an op on their pages, plain tensors to the base implementation."""
    if torch.compiler.is_compiling():
        return _outside_graph(module, query, key, value, attention_mask, scaling, dropout, **kwargs)
    bias = kwargs.get("position_bias")
    if not (isinstance(key, LazyKV) and isinstance(value, LazyKV)) or bias is not None or (dropout and module.training):
        base = _base_function(module)
        return base(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    view = key.current_view()
    call = AttendCall(
        query,
        view,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        mask=_needed_mask(attention_mask, query.shape[2], view.columns, key),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    out = absorbed(module, call, key.impl) if is_latent(module) else attend(call, key.impl)
    return out.transpose(1, 2).contiguous(), None


# A frame that is never traced costs 20 us a call, so only a compiled model's calls go through one.
_outside_graph = torch.compiler.disable(attention)


def _base_function(module: torch.nn.Module) -> Any:
    ours = module.config._attn_implementation  # type: ignore[union-attr]
    base = next((base for base, name in BASES.items() if name == ours), ours)
    if base in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[base]
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise ConfigError(f"{type(module).__name__} has no attention function for {base!r}")


def _needed_mask(mask: torch.Tensor | None, queries: int, columns: int, key: LazyKV) -> torch.Tensor | None:
    """The mask as `[B, 1 or HQ, Q, columns]`, or None where it only says what the view's lengths already say.

    Masks are shared by all layers of a kind, so the question is asked once for each mask tensor.
    """
    if mask is None:
        return None
    seen = key.table.masks
    if seen is not None and seen[0] is mask:
        return seen[1]
    needed = _reduce(mask, queries, columns, key)
    key.table.masks = (mask, needed)
    return needed


def _reduce(mask: torch.Tensor, queries: int, columns: int, key: LazyKV) -> torch.Tensor | None:
    view = key.current_view()
    if mask.dim() == 2:  # flash attention's: which columns are real
        mask = mask[:, None, None, -columns:].bool()
    mask = mask[..., -columns:] if mask.shape[-1] > columns else mask
    allowed = mask if mask.dtype == torch.bool else None
    if allowed is None:
        low = mask <= torch.finfo(mask.dtype).min
        if not bool(((mask == 0) | low).all()):
            return mask
        allowed = ~low
    starts = view.starts.view(-1, 1, 1, 1)
    token = view.column_tokens()[:, None, None, :]
    last = columns - queries + view.offset
    query = torch.arange(last, last + queries, device=mask.device).view(1, 1, -1, 1) - starts
    implied = (token >= 0) & (token <= query)
    if view.window is not None:
        implied = implied & ((token > query - view.window) | (token < view.sinks))
    real = query >= 0  # what a padding query sees is nobody's business
    return None if bool((allowed | ~implied | ~real).all()) else allowed
