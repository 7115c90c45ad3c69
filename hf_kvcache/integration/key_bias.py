"""Key projections whose bias is far larger than the keys around it (Qwen2 and Qwen2.5): say which layers coarse codes
would lose.

A constant is absorbed by zero points per channel, but RoPE turns the bias: in the fast dims it sweeps the group's whole
range, and codes per token have no zero point at all. Rotation spreads it over all channels and changes neither.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch

from hf_kvcache.caches import PagedCache

LOUD = 6.0  # at 4, an 8-bit cache has ten times the divergence that it has without the bias; at 40, it is noise
_found: weakref.WeakKeyDictionary[Any, dict[int, tuple[float, float]]] = weakref.WeakKeyDictionary()


def warn_of_key_bias(model: torch.nn.Module, cache: PagedCache) -> None:
    """Warn, once a model and cache name, of layers of `cache` whose keys are encoded around a loud bias."""
    if model not in _found:
        _found[model] = {
            layer.self_attn.layer_idx: _loudness(layer, _inverse_frequencies(model))
            for layer in model.modules()
            if _has_key_bias(layer)
        }
    loud = {}
    for i, (whole, turning) in _found[model].items():
        key = getattr(getattr(cache.layers[i], "spec", None), "key", None) if i < len(cache.layers) else None
        if key is not None and key.scaled and (turning if key.per == "channel" else whole) >= LOUD:
            loud[i] = whole
    if loud:
        layers = ", ".join(f"{i}: 'exact'" for i in loud)
        names = ", ".join(map(str, loud))
        warnings.warn(
            f"the key bias of layers {names} is up to {max(loud.values()):.0f} times as large as their keys without "
            f"it, and {cache.config.name} loses such keys: use cache_config={{'layers': {{{layers}}}}}",
            stacklevel=2,
        )


def _has_key_bias(layer: torch.nn.Module) -> bool:
    attention = getattr(layer, "self_attn", None)
    bias = getattr(getattr(attention, "k_proj", None), "bias", None)
    return bias is not None and not bias.is_meta and getattr(attention, "layer_idx", None) is not None


def _inverse_frequencies(model: torch.nn.Module) -> torch.Tensor | None:
    return next((b.float().cpu() for name, b in model.named_buffers() if name.endswith("inv_freq")), None)


@torch.no_grad()
def _loudness(layer: torch.nn.Module, frequencies: torch.Tensor | None) -> tuple[float, float]:
    """The largest ratio, over heads, of the bias to the spread of the keys without it (root mean squares); and the
    same of the part of the bias that RoPE turns within 32 tokens, so that no zero point can absorb it.

    The spread is that of normalised inputs through the projection. Packed weights do not tell it: 1 is taken.
    """
    attention = layer.self_attn
    projection, D = attention.k_proj, attention.head_dim
    bias = projection.bias.float().cpu().view(-1, D)
    spread = torch.ones(len(bias))
    if projection.weight.is_floating_point() and not projection.weight.is_meta:
        weight = projection.weight.float()
        norm = getattr(layer, "input_layernorm", None)
        if norm is not None:
            weight = weight * norm.weight.float()
        spread = weight.pow(2).sum(1).view(-1, D).mean(1).sqrt().cpu()
    turning = torch.ones(D)
    if frequencies is not None and 2 * len(frequencies) <= D:
        angle = torch.arange(32.0)[:, None] * frequencies
        turned = 1 - torch.complex(angle.cos(), angle.sin()).mean(0).abs().pow(2)
        turning = torch.zeros(D)
        turning[: 2 * len(frequencies)] = turned.repeat(2)
    spread = spread.clamp(min=1e-6)
    whole = (bias.pow(2).mean(1).sqrt() / spread).max()
    return whole.item(), ((bias.pow(2) * turning).mean(1).sqrt() / spread).max().item()
