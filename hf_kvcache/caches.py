"""Cache objects: layers built from a cache config and a model config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from hf_kvcache import calibration
from hf_kvcache.config import CacheConfig, resolve
from hf_kvcache.errors import ConfigError, UnsupportedModelError
from hf_kvcache.fingerprint import config_fingerprint
from hf_kvcache.layers.paged import PagedLayer
from hf_kvcache.layers.parts import Kind
from hf_kvcache.memory.table import BlockTable
from hf_kvcache.ops.api import IMPLS


@dataclass(frozen=True)
class LayerReport:
    """What one layer got, and why."""

    index: int
    layer: str
    format: str
    window: int | None
    why: str


class PagedCache(DynamicCache):
    """Keys and values of a decoder in pages, encoded; a drop-in for transformers' `DynamicCache`.

    config: from `hf_kvcache.config.resolve`. model_config: the model's (its text decoder's part is used).
    transformers decides what each layer is; full and sliding attention layers become paged ones.
    Raises UnsupportedModelError for a model without such layers.
    """

    def __init__(self, config: CacheConfig, model_config: Any) -> None:
        text_config = model_config.get_text_config(decoder=True)
        super().__init__(config=text_config)
        self.config = config
        self.model_fingerprint = config_fingerprint(model_config)
        self.prefill: Any = None  # a prefill with a prefix store, while it runs: `keep()` is called before each forward
        self._report: list[LayerReport] = []
        for index, _ in config.layers:
            if not -len(self.layers) <= index < len(self.layers):
                raise ConfigError(f"layers has the key {index}, and the model {len(self.layers)} layers")
        latent = has_latents(text_config)
        if config.layout == "latent" and not latent:
            raise UnsupportedModelError(
                f"{type(model_config).__name__} has no multi-head latent attention: use paged_{config.spec.name}"
            )
        kinds: dict[tuple[Any, ...], Kind] = {}
        for i, given in enumerate(self.layers):
            if type(given) not in (DynamicLayer, DynamicSlidingWindowLayer):
                why = "transformers' own: it is not a full or sliding attention layer"
                self._report.append(LayerReport(i, type(given).__name__, "-", None, why))
                continue
            window = given.sliding_window if type(given) is DynamicSlidingWindowLayer else None
            spec = (config.latent_spec_of if latent else config.spec_of)(i, len(self.layers))
            why = "all tokens" if window is None else f"the model's window of {window} tokens"
            if window is not None and spec.sinks:
                spec = spec.replace(sinks=0)
                why += ", no exact sinks under a window"
            imposed = window is None and config.window is not None
            if imposed:
                window = config.window
                why = f"the first {spec.sinks} tokens and the newest {window}, imposed"
            if latent:
                why += f"; MLA latents, rope keys {spec.value.kind}"
            key = (imposed, window, spec.page_size, spec.direct, spec.residual)
            leader = key not in kinds
            if leader:
                kinds[key] = Kind(
                    BlockTable(
                        spec.page_size,
                        direct=spec.direct,
                        residual=spec.residual,
                        window=window,
                        capacity=config.max_cache_len,
                    )
                )
            if latent and config.calibration is not None:
                raise ConfigError("calibration: the rounding of MLA latents is not steered; leave it out for this model")
            steer = None if config.calibration is None else calibration.steers(config.calibration, i, spec.key)
            self.layers[i] = PagedLayer(
                spec, kinds[key], leader=leader, impl=config.impl, steer=steer, imposed=imposed
            )
            self._report.append(LayerReport(i, "PagedLayer", spec.name, window, why))
        if not kinds:
            raise UnsupportedModelError(
                f"{type(model_config).__name__} has no full or sliding attention layer that a {config.name} cache could hold"
            )
        if config.window is not None and not any(layer.imposed for layer in self.paged_layers):
            raise UnsupportedModelError(
                f"{type(model_config).__name__} has no full attention layer to impose a window on: every layer has one of "
                f"its own. Use paged_{config.spec.name}"
            )

    @property
    def kinds(self) -> list[Kind]:
        """What the layers of each kind share, in the order of their first layers."""
        return [layer.kind for layer in self.paged_layers if layer.leader]

    @property
    def paged_layers(self) -> list[PagedLayer]:
        """The layers that are ours."""
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    def note_padding(self, starts: torch.Tensor) -> None:
        """Tell how many columns of left padding each row has (int `[B]`), before its first real token comes.

        Padding is then not stored, and no page or scale of a row depends on it.
        """
        padding = starts.cpu().numpy()
        for kind in self.kinds:
            kind.table.padding = padding

    def save(self, path: str, model: Any = None, tokenizer: Any = None) -> None:
        """Write the cache to a file or an fsspec URL; see `hf_kvcache.load_cache`.

        model, tokenizer: what made it, for `load_cache` to refuse another one. Raises SavedCacheError.
        """
        from hf_kvcache.saving import save_cache

        save_cache(self, path, model, tokenizer)

    @property
    def nbytes(self) -> int:
        """Bytes held for our layers: pages (free ones too), ring, sinks and tables. Forks share their pages."""
        return sum(self.stats()["bytes"].values())

    def stats(self) -> dict[str, Any]:
        """Pages (live, cached, free), bytes by kind, and the share of page slots that hold no token.

        `bytes` sums to `nbytes`: codes, scales (with zeros), padding (alignment), residual, sinks, tables.
        """
        pages = {"live": 0, "cached": 0, "free": 0}
        sizes = {"codes": 0, "scales": 0, "padding": 0, "residual": 0, "sinks": 0, "tables": 0}
        slots = used = 0
        for kind in self.kinds:
            table = kind.table
            pages["live"] += table.pool.live
            pages["free"] += table.pool.free
            sizes["tables"] += table.nbytes + kind.indices.nbytes
            slots += table.pool.capacity * table.page_size
            used += table.used_slots()
        for layer in self.paged_layers:
            if layer.store is None or layer.layout is None:
                continue
            count, layout = layer.store.capacity, layer.layout
            codes, scales = layout.field_bytes("codes"), layout.field_bytes("scales")
            sizes["codes"] += count * codes
            sizes["scales"] += count * scales
            sizes["padding"] += count * (layout.page_bytes - codes - scales)
            sizes["tables"] += layer.store.nbytes - count * layout.page_bytes
            sizes["residual"] += layer.ring.nbytes if layer.ring else 0
            sizes["sinks"] += layer.sinks.nbytes if layer.sinks else 0
        return {"pages": pages, "bytes": sizes, "waste": 1 - used / slots if slots else 0.0}

    def describe(self) -> str:
        """A table of what each layer got and why; equal neighbours share a line."""
        lines = [f"{self.config.name}: {len(self.paged_layers)} of {len(self.layers)} layers in pages"]
        start = 0
        for i in range(1, len(self._report) + 1):
            first = self._report[start]
            if i < len(self._report) and self._same(first, self._report[i]):
                continue
            span = f"{start}" if i - 1 == start else f"{start}-{i - 1}"
            lines.append(f"  layer {span}: {first.layer} {first.format} ({first.why})")
            start = i
        return "\n".join(lines)

    @staticmethod
    def _same(a: LayerReport, b: LayerReport) -> bool:
        return (a.layer, a.format, a.window, a.why) == (b.layer, b.format, b.window, b.why)

    def __repr__(self) -> str:
        return f"PagedCache({self.config.name}, {self.get_seq_length()} columns)"


def make_cache(name: str, model_config: Any, **options: Any) -> PagedCache:
    """Build a cache by name: `make_cache("paged_fp8", model.config, page_size=64)`.

    Pass it as `cache=` (transformers >= 5.24) or `past_key_values=`. Options: see `hf_kvcache.config.resolve`.
    Raises ConfigError or UnsupportedModelError.
    """
    return build(resolve(name, options), model_config)


def build(config: CacheConfig, model_config: Any) -> PagedCache:
    """Build the cache that `config` describes."""
    if config.impl != "auto" and config.impl not in IMPLS:
        raise ConfigError(f"impl={config.impl!r}: accepted are auto, {', '.join(IMPLS)}")
    if not hasattr(model_config, "get_text_config"):
        raise ConfigError(f"the second argument must be a model's config, got {type(model_config).__name__}")
    if config.window is not None and _has_relative_bias(model_config):
        raise UnsupportedModelError(
            f"{type(model_config).__name__} adds biases by the distance of tokens, which an imposed window would get "
            f"wrong: use paged_{config.spec.name}"
        )
    if not _has_decoder(model_config):
        raise UnsupportedModelError(
            f"{type(model_config).__name__} is an encoder: it generates no tokens and has no key/value cache"
        )
    return PagedCache(config, model_config)


def _has_decoder(model_config: Any) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if model_config.is_encoder_decoder or getattr(model_config, "is_decoder", False):
        return True
    text = model_config.get_text_config(decoder=True)
    return hasattr(text, "vocab_size") and text.model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _has_relative_bias(model_config: Any) -> bool:
    """Whether attention takes biases that it derives from the number of keys."""
    text_config = model_config.get_text_config(decoder=True)
    names = ("relative_attention_num_buckets", "alibi")
    return text_config.model_type in ("bloom", "mpt") or any(getattr(text_config, name, False) for name in names)


def has_latents(text_config: Any) -> bool:
    """Whether full attention layers are given MLA latents and rope keys in place of keys and values."""
    return bool(getattr(text_config, "kv_lora_rank", None))
