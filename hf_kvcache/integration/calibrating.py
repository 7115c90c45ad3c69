"""Look at a model's queries: which directions do most of them share?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from hf_kvcache.errors import UnsupportedModelError
from hf_kvcache.integration.bases import OBSERVER

STRONGEST = 20.0  # times the head dim: what a direction may weigh at most against all others together


@torch.no_grad()
def query_directions(
    model: torch.nn.Module, batches: Iterable[torch.Tensor], rank: int = 1
) -> dict[int, torch.Tensor]:
    """Run token ids `[B, T]` through a decoder; for each layer its queries' `rank` largest directions `[H, D, rank]`.

    The queries of all heads that share a KV head count together, after RoPE. Directions are scaled so that
    `I + M M'` is their second moment in units of what is left without these directions.
    Raises UnsupportedModelError when the model's attention cannot be watched.
    """
    moments: dict[int, torch.Tensor] = {}

    def look(layer: int, query: torch.Tensor, heads: int) -> None:
        rows = query.float().unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 3)  # [H, n, D]
        moments[layer] = moments.get(layer, 0.0) + (rows.transpose(1, 2) @ rows).double().cpu() / rows.shape[1]

    with _watched(model, look):
        for ids in batches:
            model(ids, use_cache=False)
    if not moments:
        raise UnsupportedModelError(f"{type(model).__name__} calls no attention function that can be watched")
    return {layer: _directions(moment, rank) for layer, moment in sorted(moments.items())}


def _directions(moment: torch.Tensor, rank: int) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(moment)
    D = moment.shape[1]
    rest = values[:, : D - rank].mean(1, keepdim=True).clamp(min=1e-12)
    weight = ((values[:, D - rank :] - rest) / rest).clamp(0.0, STRONGEST * D)
    return (vectors[:, :, D - rank :] * weight[:, None].sqrt()).flip(2)


@contextmanager
def _watched(model: torch.nn.Module, look: Callable[[int, torch.Tensor, int], None]) -> Iterator[None]:
    """Let `look(layer, query [B, HQ, T, D], KV heads)` see every call of the decoder's attention function."""
    config: Any = model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
    base = config._attn_implementation
    function, masks = ALL_ATTENTION_FUNCTIONS.get(base), AttentionMaskInterface()
    if function is None:
        raise UnsupportedModelError(
            f"queries are watched under sdpa or flash attention, and the model uses {base!r}: "
            'load it with attn_implementation="sdpa"'
        )

    def watching(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        look(module.layer_idx, query, key.shape[1])
        return function(module, query, key, *args, **kwargs)

    AttentionInterface.register(OBSERVER, watching)
    AttentionMaskInterface.register(OBSERVER, masks[base])
    config._attn_implementation_internal = OBSERVER
    try:
        yield
    finally:
        config._attn_implementation_internal = base
        AttentionInterface._global_mapping.pop(OBSERVER, None)
        AttentionMaskInterface._global_mapping.pop(OBSERVER, None)
