"""MLA in absorbed form: the history's latents are attended to as they are, never expanded (DeepSeek-V2, arXiv:2405.04434).

A model's `expand_kv` turns latents into keys and values of every head, through `kv_b_proj`. Its key half can be applied to
the query instead, and its value half to the output.
"""

from __future__ import annotations

import dataclasses
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from hf_kvcache.integration.bases import BASES
from hf_kvcache.layers.lazy import LazyKV
from hf_kvcache.ops.api import AttendCall, attend

_unpacked: weakref.WeakKeyDictionary[torch.nn.Module, torch.Tensor] = weakref.WeakKeyDictionary()


def _latent_modules(model: torch.nn.Module) -> Iterator[Any]:
    """Attention modules that expand latents by a `kv_b_proj`."""
    for module in model.modules():
        if hasattr(type(module), "expand_kv") and hasattr(module, "kv_b_proj"):
            yield module


def attach(model: torch.nn.Module) -> None:
    """Let `expand_kv` pass lazy latents through to our attention function. Idempotent."""
    for module in _latent_modules(model):
        module.__dict__["expand_kv"] = types.MethodType(_expand_kv, module)


def detach(model: torch.nn.Module) -> None:
    """Undo `attach`."""
    for module in _latent_modules(model):
        module.__dict__.pop("expand_kv", None)
        _unpacked.pop(module.kv_b_proj, None)


@torch.compiler.disable
def _expand_kv(module: Any, latents: torch.Tensor, rope_keys: torch.Tensor) -> Any:
    if isinstance(latents, LazyKV) and module.config._attn_implementation in BASES.values():
        return latents, rope_keys
    return type(module).expand_kv(module, latents, rope_keys)


def is_latent(module: torch.nn.Module) -> bool:
    """Whether the lazy views that this module hands to attention are latents and rope keys."""
    return "expand_kv" in module.__dict__


def absorbed(module: Any, call: AttendCall, impl: str) -> torch.Tensor:
    """Attend to latents: `call` as for plain keys, its query `[B, HQ, Q, nope + rope]`; returns `[B, HQ, Q, D_v]`."""
    query, nope = call.query, module.qk_nope_head_dim
    B, HQ, Q, _ = query.shape
    weight = _up_projection(module.kv_b_proj, query, call.view.layout.key_dim).unflatten(0, (HQ, -1))
    up_key, up_value = weight.split((nope, weight.shape[1] - nope), dim=1)
    heads = query.transpose(0, 1).reshape(HQ, B * Q, -1)  # one matrix product a head
    latent = (heads[..., :nope] @ up_key).view(HQ, B, Q, -1).transpose(0, 1)
    whole = torch.cat((latent, query[..., nope:]), dim=-1)
    mixed = attend(dataclasses.replace(call, query=whole, absorbed=True), impl)
    out = mixed.transpose(0, 1).reshape(HQ, B * Q, -1) @ up_value.transpose(1, 2)
    return out.view(HQ, B, Q, -1).transpose(0, 1)


def _up_projection(linear: Any, query: torch.Tensor, rank: int) -> torch.Tensor:
    """`kv_b_proj`'s matrix `[HQ * (nope + D_v), rank]` in the query's dtype.

    Whatever is no plain layer in its place (packed, adapted, loaded for each forward) is asked for it by an identity
    matrix; of packed ones the answer is kept.
    """
    weight = linear.weight
    if type(linear) is torch.nn.Linear and weight.device == query.device:
        return weight.to(query.dtype)
    if linear in _unpacked:
        return _unpacked[linear].to(query.dtype)
    matrix = linear(torch.eye(rank, dtype=query.dtype, device=query.device)).T.to(query.dtype).contiguous()
    if not weight.dtype.is_floating_point and not hasattr(linear, "base_layer"):
        _unpacked[linear] = matrix.detach()
    return matrix
