"""`generate` prefills only what a prefix store does not hold: a wrapper of one method of transformers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers.generation.utils import GenerationMixin

from hf_kvcache.integration.attaching import CACHE_KWARGS, base_attention, paged_cache
from hf_kvcache.prefixes import Prefill

_ORIGINAL = GenerationMixin._prefill


def register() -> None:
    """Wrap `GenerationMixin._prefill`."""
    GenerationMixin._prefill = _prefill


def unregister() -> None:
    """Put it back."""
    GenerationMixin._prefill = _ORIGINAL


def _begin(model: Any, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> Prefill | None:
    """The prefill with a store, or None: no store, a cache in use or with windows, padding, images, training."""
    cache = paged_cache(kwargs)
    if cache is None or cache.config.prefix_store is None or cache.get_seq_length() or model.training:
        return None
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    known = {"attention_mask", "position_ids", "logits_to_keep", *CACHE_KWARGS}
    other = [k for k, x in kwargs.items() if k not in known and not isinstance(x, bool | int | float | str | None)]
    counted = torch.arange(input_ids.shape[1], device=input_ids.device)
    if (
        other
        or model.config.is_encoder_decoder
        or len(cache.paged_layers) != len(cache.layers)
        or any(kind.table.window is not None for kind in cache.kinds)
        or (mask is not None and not bool((mask == 1).all()))
        or (positions is not None and not bool((positions.to(input_ids.device) == counted).all()))
    ):
        return None
    return Prefill(cache.config.prefix_store, cache, input_ids.cpu().numpy(), model, base_attention(model))


@functools.wraps(_ORIGINAL)
def _prefill(self: Any, input_ids: Any, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
    prefill = _begin(self, input_ids, model_kwargs)
    if prefill is None:
        return _ORIGINAL(self, input_ids, generation_config, model_kwargs, *args, **kwargs)
    prefill.install()
    chunk, generation_config.prefill_chunk_size = generation_config.prefill_chunk_size, prefill.store.chunk
    prefill.cache.prefill = prefill  # every further forward keeps the chunk before it
    try:
        out = _ORIGINAL(self, input_ids, generation_config, model_kwargs, *args, **kwargs)
        prefill.keep()
    finally:
        prefill.cache.prefill = None
        generation_config.prefill_chunk_size = chunk
    return out
