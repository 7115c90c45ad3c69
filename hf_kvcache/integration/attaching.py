"""The switch: a model uses our attention while its forward runs with a cache of ours, and at no other time."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import EncoderDecoderCache

from hf_kvcache.caches import PagedCache
from hf_kvcache.integration.attention import BASES

CACHE_KWARGS = ("cache", "past_key_values", "cache_params")  # what forward calls its cache, by version and model
_LOCK = threading.RLock()
_SWITCH = "_hf_kvcache_switch"
_HOOKS = "_hf_kvcache_hooks"


@dataclass
class _Switch:
    """How many forwards of ours are running on a config, and what to put back after the last."""

    depth: int = 0
    base: str | None = None


def paged_cache(kwargs: dict[str, Any]) -> PagedCache | None:
    for name in CACHE_KWARGS:
        cache = kwargs.get(name)
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        if isinstance(cache, PagedCache):
            return cache
    return None


def _before_forward(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = paged_cache(kwargs)
    if cache is None:
        return
    name = "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"  # type: ignore[union-attr]
    mask = kwargs.get(name)
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        _note_padding(cache, mask)
    if kwargs.get("output_attentions"):
        return  # weights are wanted: the model's own attention on decoded keys and values gives them
    config = model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
    with _LOCK:
        switch = config.__dict__.setdefault(_SWITCH, _Switch())
        if switch.depth == 0:
            base = config._attn_implementation
            if base not in BASES:
                return
            switch.base = base
            config._attn_implementation_internal = BASES[base]
        switch.depth += 1


def _after_forward(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if paged_cache(kwargs) is None or kwargs.get("output_attentions"):
        return
    config = model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
    with _LOCK:
        switch = config.__dict__.get(_SWITCH)
        if switch is None or switch.depth == 0:
            return
        switch.depth -= 1
        if switch.depth == 0:
            config._attn_implementation_internal = switch.base
            del config.__dict__[_SWITCH]


def _note_padding(cache: PagedCache, mask: torch.Tensor) -> None:
    """Left padding of rows that have no real token yet, from a 2D mask."""
    if any(kind.table.lengths_known() for kind in cache.kinds):
        return
    real = mask != 0
    first = torch.where(real.any(dim=1), real.int().argmax(dim=1), mask.shape[1])
    cache.note_padding(first)


def attach(model: torch.nn.Module) -> _Attached:
    """Let `model(...)` calls with a cache of ours use attention on compressed pages. Idempotent.

    Without it they are right but slower: keys and values are decoded for the model's own attention.
    Also a context manager: `with hf_kvcache.attach(model): ...` detaches at the end.
    """
    with _LOCK:
        if _HOOKS not in model.__dict__:
            model.__dict__[_HOOKS] = (
                model.register_forward_pre_hook(_before_forward, with_kwargs=True),
                model.register_forward_hook(_after_forward, with_kwargs=True, always_call=True),
            )
    return _Attached(model)


def detach(model: torch.nn.Module) -> None:
    """Undo `attach`; a model that is not attached is left as it is."""
    with _LOCK:
        for hook in model.__dict__.pop(_HOOKS, ()):
            hook.remove()


@dataclass
class _Attached:
    """What `attach` returns: a context manager."""

    model: torch.nn.Module

    def __enter__(self) -> torch.nn.Module:
        return self.model

    def __exit__(self, *exc: object) -> None:
        detach(self.model)
