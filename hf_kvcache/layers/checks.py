"""What a layer takes: keys and values that fit what it holds already."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_kvcache.errors import CacheUseError
from hf_kvcache.formats import hadamard

if TYPE_CHECKING:
    from hf_kvcache.layers.paged import PagedLayer


def check_states(layer: PagedLayer, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise CacheUseError unless keys and values `[B, H, T, D]` fit the layer as it is."""
    if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
        raise CacheUseError(
            f"keys {tuple(k.shape)} and values {tuple(v.shape)} must both be [batch, heads, tokens, head_dim] "
            "and agree in all but the last"
        )
    if not layer.is_initialized:
        if k.dtype != v.dtype or not k.dtype.is_floating_point or k.dtype.itemsize < 2:
            raise CacheUseError(
                f"keys are {k.dtype} and values {v.dtype}: accepted are float32, bfloat16 and float16, the same for both"
            )
        for x, spec in ((k, layer.spec.key), (v, layer.spec.value)):
            if spec.rotate:
                hadamard.block_size(x.shape[3])
        if layer.steer is not None and layer.steer.shape[:2] != (k.shape[1], k.shape[3]):
            raise CacheUseError(
                f"the calibration is of {layer.steer.shape[0]} heads with {layer.steer.shape[1]} channels, and the keys "
                f"have {k.shape[1]} with {k.shape[3]}: it was made for another model"
            )
        return
    assert layer.layout is not None
    if (k.dtype, v.dtype) != (layer.dtypes["k"], layer.dtypes["v"]):
        raise CacheUseError(
            f"the cache holds {layer.dtypes['k']} keys and values and was given {k.dtype} / {v.dtype}: "
            "keep one dtype for the life of a cache, or start a fresh one"
        )
    if k.device != layer.device:
        raise CacheUseError(f"the layer's cache is on {layer.device} and was given keys on {k.device}")
    shape = (layer.layout.heads, layer.layout.key_dim, layer.layout.value_dim)
    if (k.shape[1], k.shape[3], v.shape[3]) != shape:
        raise CacheUseError(
            f"the layer holds (heads, key dim, value dim) = {shape} and was given "
            f"{(k.shape[1], k.shape[3], v.shape[3])}: is this cache used with another model?"
        )
