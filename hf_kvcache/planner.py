"""How many bytes a cache takes, before it is built: arithmetic only, standard library only.

The sizes come from the same `PageLayout` that the store uses, so a plan equals what is then allocated.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_kvcache.config import CacheConfig, resolve
from hf_kvcache.errors import ConfigError
from hf_kvcache.formats.spec import FormatSpec, PageLayout

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class LayerShape:
    """What one layer caches for a token: `heads` keys of `key_dim` and values of `value_dim`.

    window: tokens it may look back to, itself included, or None. stored: False for a layer without a cache of
    its own (linear attention, shared keys and values). latent: the keys are MLA latents, the values rope keys.
    """

    heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    stored: bool = True
    latent: bool = False


@dataclass(frozen=True)
class Plan:
    """Bytes of a cache that was filled by one prefill of `context` tokens in each of `batch` rows.

    Sums over layers: pages, the exact ring of newest tokens, exact sinks. Block tables are not counted: some
    bytes a page.
    """

    name: str
    batch: int
    context: int
    codes: int
    scales: int
    padding: int
    residual: int
    sinks: int
    elements: int

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.codes + self.scales + self.padding + self.residual + self.sinks

    @property
    def bits_per_element(self) -> float:
        """Bits for each cached number, scales, ring and rounding included."""
        return 8 * self.nbytes / self.elements if self.elements else 0.0


def plan(
    layers: list[LayerShape],
    name: str,
    batch: int,
    context: int,
    *,
    dtype: str = "bfloat16",
    **options: Any,
) -> Plan:
    """Plan the cache `name` with `cache_config` options for a model's layers.

    dtype: the model's. Raises ConfigError for a wrong name, option, dtype or size.
    """
    for what, value in (("batch", batch), ("context", context)):
        if value < 1:
            raise ConfigError(f"{what}={value}: accepted are whole numbers from 1")
    config = resolve(name, options)
    reason = unserved(layers, config)
    if reason is not None:
        raise ConfigError(f"{name}: {reason}")
    return total(kinds(layers, config, dtype), config, batch, context)


def unserved(layers: list[LayerShape], config: CacheConfig) -> str | None:
    """None, or why no layer of a model can have such a cache."""
    stored = [shape for shape in layers if shape.stored]
    if config.layout == "latent" and not any(shape.latent for shape in stored):
        return f"the model has no latent attention (MLA): use paged_{config.spec.name}"
    if config.window is not None and all(shape.window is not None for shape in stored):
        return f"the model has no full attention layer to impose a window on: use paged_{config.spec.name}"
    return None


@dataclass(frozen=True)
class LayerKind:
    """`count` layers of one shape and format, and where everything is in a page of theirs."""

    count: int
    shape: LayerShape
    layout: PageLayout


def kinds(layers: list[LayerShape], config: CacheConfig, dtype: str) -> list[LayerKind]:
    """The layers that store something, equal ones together. Raises ConfigError for an unknown dtype."""
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype={dtype!r}: accepted are {', '.join(DTYPE_BYTES)}")
    found = Counter(
        (shape, (config.latent_spec_of if shape.latent else config.spec_of)(i, len(layers)))
        for i, shape in enumerate(layers)
        if shape.stored
    )
    out = []
    for (shape, spec), count in found.items():
        if shape.window is None:
            shape = dataclasses.replace(shape, window=config.window)  # imposed, or none
        else:
            spec = spec.replace(sinks=0)
        layout = PageLayout(
            spec, shape.heads, shape.key_dim, shape.value_dim, spec.page_size, dtype, DTYPE_BYTES[dtype], transposed=False
        )
        out.append(LayerKind(count, shape, layout))
    return out


def total(layer_kinds: list[LayerKind], config: CacheConfig, batch: int, context: int) -> Plan:
    """The plan of `plan`, for kinds that are at hand: quick enough to search for a context that fits."""
    parts = [_layer(kind, config.max_cache_len, batch, context) for kind in layer_kinds]
    counts = [kind.count for kind in layer_kinds]
    sums = [sum(map(operator.mul, counts, column)) for column in zip(*parts, strict=True)] or [0] * 6
    return Plan(config.name, batch, context, *sums)


def _layer(kind: LayerKind, max_cache_len: int | None, batch: int, context: int) -> tuple[int, int, int, int, int, int]:
    shape, layout = kind.shape, kind.layout
    spec, itemsize = layout.spec, layout.itemsize
    pages, ring = _tokens(spec, shape.window, context)
    if max_cache_len is not None:
        pages = max(pages, -(-max_cache_len // spec.page_size) + 1)
    token = shape.heads * (shape.key_dim + shape.value_dim)
    codes, scales = layout.field_bytes("codes"), layout.field_bytes("scales")
    count = batch * pages
    return (
        count * codes,
        count * scales,
        count * (layout.page_bytes - codes - scales),
        batch * ring * token * itemsize,
        batch * spec.sinks * token * itemsize,
        batch * (context if shape.window is None else min(context, shape.window - 1 + spec.sinks)) * token,
    )


def _tokens(spec: FormatSpec, window: int | None, context: int) -> tuple[int, int]:
    """Pages and ring slots of one row after a prefill of `context` tokens."""
    P = spec.page_size
    upto = -(-context // P) if spec.direct else max(0, context - spec.residual) // P
    passed = 0 if window is None else min(max(context - window + 1, 0) // P, upto)
    if spec.direct:
        return upto - passed, 0
    return upto - passed, spec.residual + P


# ---- a model's layers from its config


def layers_of(config: Mapping[str, Any]) -> list[LayerShape]:
    """Read a model's `config.json` (as a dict): grouped, multi-query, sliding, hybrid, latent and shared layers.

    Raises ConfigError when it does not say how many layers and heads there are.
    """
    config = {**config, **config.get("text_config", {})}
    count = first_of(config, "num_decoder_layers", "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    heads = first_of(config, "num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads")
    if count is None or heads is None:
        raise ConfigError("the config does not say how many layers and attention heads the model has")
    hidden = first_of(config, "hidden_size", "n_embd", "d_model", "dim") or 0
    kv_heads = first_of(config, "num_key_value_heads", "num_kv_heads") or (1 if config.get("multi_query") else heads)
    head_dim = first_of(config, "head_dim", "d_kv") or hidden // heads
    shapes = []
    shared = config.get("num_kv_shared_layers") or 0
    for i, kind in enumerate(_layer_types(config, count)):
        window = config.get("sliding_window") if kind in ("sliding_attention", "chunked_attention") else None
        if kind == "chunked_attention":
            window = config.get("attention_chunk_size")
        if config.get("kv_lora_rank"):
            shape = LayerShape(1, config["kv_lora_rank"], config["qk_rope_head_dim"], window, latent=True)
        else:
            wide = kind == "full_attention" and config.get("global_head_dim")
            dim = config["global_head_dim"] if wide else head_dim
            shape = LayerShape(kv_heads, dim, config.get("v_head_dim") or dim, window)
        if kind not in ("full_attention", "sliding_attention", "chunked_attention") or i >= count - shared:
            shape = LayerShape(0, 0, 0, None, stored=False)
        shapes.append(shape)
    return shapes


def first_of(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of the names that a config has, under whichever of them its family uses."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def _layer_types(config: Mapping[str, Any], count: int) -> list[str]:
    """`full_attention`, `sliding_attention`, ... for each layer; older configs say it in other ways."""
    if config.get("layer_types"):
        return list(config["layer_types"])
    full, sliding = "full_attention", "sliding_attention"
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return [full] * count
    family = config.get("model_type", "")
    pattern = config.get("sliding_window_pattern") or {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}.get(family)
    if pattern:
        return [full if (i + 1) % pattern == 0 else sliding for i in range(count)]
    first = config.get("max_window_layers", 0) if family.startswith("qwen") else 0
    return [full if i < first else sliding for i in range(count)]
