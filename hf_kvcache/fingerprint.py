"""SHA-256 of what a cache's numbers depend on: a model's config and weights, a tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch

SAMPLE = 64  # values of each weight that are looked at
_PASSING = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")


def config_fingerprint(config: Any) -> str:
    """Of a model's config, but for what does not change its keys and values."""
    given = {
        k: v
        for k, v in config.to_dict().items()
        if k not in _PASSING and "attn_implementation" not in k and not k.startswith("_hf_kvcache")
    }
    return _sha(json.dumps(given, sort_keys=True, default=str))


def model_fingerprint(model: torch.nn.Module) -> str:
    """Of a model's config, names, shapes and evenly spaced values of its weights, and its active adapters."""
    names, values = [], []
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        names.append((name, list(weight.shape), str(weight.dtype)))
        flat = weight.detach().flatten()
        values.append(flat[:: max(1, len(flat) // SAMPLE)][:SAMPLE].float())
    adapters = [
        (name, str(module.active_adapters), str(getattr(module, "disable_adapters", None)))
        for name, module in model.named_modules()
        if not callable(getattr(module, "active_adapters", len))
    ]
    sample = torch.cat([v.to(values[0].device) for v in values]).cpu().numpy().tobytes() if values else b""
    text = json.dumps([config_fingerprint(model.config), names, adapters])
    return hashlib.sha256(text.encode() + sample).hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Of a tokenizer's vocabulary, added tokens included."""
    return _sha(json.dumps(sorted(tokenizer.get_vocab().items())))


def tensors_fingerprint(tensors: Iterable[torch.Tensor | None]) -> str:
    """Of tensors, all of their bytes."""
    digest = hashlib.sha256()
    for x in tensors:
        digest.update(b"-" if x is None else f"{x.dtype} {list(x.shape)}".encode())
        if x is not None:
            digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
