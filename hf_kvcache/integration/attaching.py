"""The switch: a model uses our attention while its forward runs with a cache of ours, and at no other time."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_kvcache.caches import PagedCache
from hf_kvcache.integration import absorbing
from hf_kvcache.integration.bases import BASES

CACHE_KWARGS = ("cache", "past_key_values", "cache_params")  # what forward calls its cache, by version and model
_LOCK = threading.RLock()
_SWITCH = "_hf_kvcache_switch"
_HOOKS = "_hf_kvcache_hooks"
_exchangeable: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


@dataclass
class _Switch:
    """What to put back on a config after the last of the forwards of ours that are running on it."""

    base: str
    depth: int = 0


def paged_cache(kwargs: dict[str, Any]) -> PagedCache | None:
    for name in CACHE_KWARGS:
        cache = kwargs.get(name)
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        if isinstance(cache, PagedCache):
            return cache
    return None


@functools.lru_cache(maxsize=64)
def _parameters(forward: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)


def _by_name(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a forward call by name."""
    return {**dict(zip(_parameters(type(model).forward)[1:], args, strict=False)), **kwargs} if args else kwargs


def _decoder_config(model: torch.nn.Module) -> Any:
    return model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]


def base_attention(model: torch.nn.Module) -> str:
    """The model's own attention implementation, also while forwards with caches of ours are running on it."""
    config = _decoder_config(model)
    with _LOCK:
        switch = config.__dict__.get(_SWITCH)
        return str(config._attn_implementation if switch is None else switch.base)


def _switches(model: torch.nn.Module, config: Any, given: dict[str, Any]) -> bool:
    """Whether a forward uses our attention. Otherwise the model's own reads decoded keys and values: where attention
    weights are wanted, and in models that call no exchangeable attention function but go by its name themselves.
    """
    asked = given.get("output_attentions")
    weights = bool(getattr(config, "output_attentions", False) if asked is None else asked)
    if not weights and model not in _exchangeable:
        homes = {type(module).__module__ for module in model.modules() if hasattr(module, "layer_idx")}
        _exchangeable[model] = bool(homes) and all(hasattr(sys.modules[home], "ALL_ATTENTION_FUNCTIONS") for home in homes)
    return not weights and _exchangeable[model]


def _before_forward(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = _by_name(model, args, kwargs)
    cache = paged_cache(given)
    if cache is None:
        return
    if cache.prefill is not None:
        cache.prefill.keep()
    name = "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"  # type: ignore[union-attr]
    mask = given.get(name)
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        _note_padding(cache, mask)
    note_tokens(cache, prompt_tokens(model, given))
    config = _decoder_config(model)
    if not _switches(model, config, given):
        return
    with _LOCK:
        switch = config.__dict__.get(_SWITCH)
        if switch is None:
            base = config._attn_implementation
            if BASES.get(base) not in ALL_ATTENTION_FUNCTIONS:  # nothing of ours stands on it, or we are unregistered
                return
            switch = config.__dict__[_SWITCH] = _Switch(base)
            config._attn_implementation_internal = BASES[base]
        switch.depth += 1


@torch.compiler.disable
def _after_forward(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    given = _by_name(model, args, kwargs)
    config = _decoder_config(model)
    if paged_cache(given) is None or not _switches(model, config, given):
        return
    with _LOCK:
        switch = config.__dict__.get(_SWITCH)
        if switch is None:
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


# What a forward may be given so that equal tokens in two rows mean equal keys and values.
_ALIKE = {"input_ids", "attention_mask", "position_ids", "cache_position", "labels", "logits_to_keep", *CACHE_KWARGS}


def prompt_tokens(model: torch.nn.Module, kwargs: dict[str, Any]) -> np.ndarray | None:
    """A forward's tokens, int64 `[B, T]`, with position and mask mixed in; None where rows may differ in more than these."""
    ids, mask, positions = (kwargs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    other = [k for k, x in kwargs.items() if k not in _ALIKE and not isinstance(x, bool | int | float | str | None)]
    if other or model.training or model.config.is_encoder_decoder or not isinstance(ids, torch.Tensor):  # type: ignore[union-attr]
        return None
    B, T = ids.shape
    if T < 2 or B < 2:
        return None
    if positions is None:
        positions = torch.arange(T, device=ids.device)[None]
    real = torch.ones_like(ids) if mask is None else mask
    if real.dim() != 2 or positions.dim() != 2 or positions.shape[1] != T or real.shape[1] < T:
        return None
    code = (ids.long() << 32) + (positions.long() << 1).to(ids.device) + (real[:, -T:] != 0).to(ids.device)
    return code.cpu().numpy()


def note_tokens(cache: PagedCache, tokens: np.ndarray | None) -> None:
    """Let a prompt's equal pages be shared by the rows of a batch."""
    for kind in cache.kinds:
        kind.table.note_tokens(kind.table.seen, tokens)


def attach(model: torch.nn.Module) -> _Attached:
    """Let `model(...)` calls with a cache of ours use attention on compressed pages. Idempotent.

    Without it they are right but slower: keys and values are decoded for the model's own attention.
    Also a context manager: `with hf_kvcache.attach(model): ...` detaches at the end.
    """
    with _LOCK:
        if _HOOKS not in model.__dict__:
            absorbing.attach(model)
            model.__dict__[_HOOKS] = (
                model.register_forward_pre_hook(_before_forward, with_kwargs=True),
                model.register_forward_hook(_after_forward, with_kwargs=True, always_call=True),
            )
    return _Attached(model)


def detach(model: torch.nn.Module) -> None:
    """Undo `attach`; a model that is not attached is left as it is."""
    with _LOCK:
        if _HOOKS in model.__dict__:
            absorbing.detach(model)
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
