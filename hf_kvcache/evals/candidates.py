"""The caches under measurement: from `name:option=value,...` to a function that builds one."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_kvcache.evals.errors import EvalError

if TYPE_CHECKING:
    import torch
    from transformers import Cache, PreTrainedConfig

EXACT = "dynamic"
STATIC = "static"


@dataclass(frozen=True)
class CacheSpec:
    """One entry of `--caches`: `dynamic`, `quantized:backend=quanto,nbits=4` (also hqq, fp8, nf4) or a name of ours."""

    text: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)


def parse(text: str) -> CacheSpec:
    """Read `name` or `name:option=value,option=value`; values are Python literals, else strings.

    Raises EvalError for anything else.
    """
    name, colon, rest = text.partition(":")
    options: dict[str, Any] = {}
    for item in _items(rest) if colon else ():
        key, equals, value = item.partition("=")
        if not (key.isidentifier() and equals and value):
            raise EvalError(f"cache {text!r}: {item!r} is not option=value; write name:option=value,option=value")
        if key in options:
            raise EvalError(f"cache {text!r}: option {key!r} is given twice")
        options[key] = _literal(value)
    if not name:
        raise EvalError(f"cache {text!r} has no name")
    return CacheSpec(text, name, options)


def _items(rest: str) -> list[str]:
    """Split at commas outside brackets."""
    items, depth = [""], 0
    for char in rest:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            items.append("")
        else:
            items[-1] += char
    return items


def _literal(value: str) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def builder(spec: CacheSpec, config: PreTrainedConfig, tokens: int | None = None) -> Callable[[], Cache]:
    """A function that builds a fresh cache for a model of this config; one is built here, to fail early.

    tokens: columns that `static` makes room for, unless its options say `max_cache_len`.
    Raises EvalError in one line when the cache cannot be built.
    """

    def build() -> Cache:
        if spec.name == EXACT:
            return _dynamic(config, **spec.options)
        if spec.name == STATIC:
            return _static(config, **{"max_cache_len": tokens, **spec.options})
        if spec.name == "quantized":
            return _quantized(config, **spec.options)
        import hf_kvcache

        return hf_kvcache.make_cache(spec.name, config, **spec.options)

    try:
        build()
    except (ValueError, TypeError, ImportError) as error:
        raise EvalError(f"cache {spec.text!r} cannot be built: {str(error).strip().splitlines()[0]}") from error
    return build


def _dynamic(config: PreTrainedConfig, **options: Any) -> Cache:
    from transformers import DynamicCache

    return DynamicCache(config=config, **options)


def _static(config: PreTrainedConfig, max_cache_len: int | None, **options: Any) -> Cache:
    from transformers import StaticCache

    if max_cache_len is None:
        raise EvalError(f"cache {STATIC!r} needs its size: {STATIC}:max_cache_len=2048")
    return StaticCache(config, max_cache_len, **options)


def _quantized(config: PreTrainedConfig, backend: str, **options: Any) -> Cache:
    from transformers import QuantizedCache

    if backend == "nf4":
        from hf_kvcache.evals.nf4 import nf4_cache

        return nf4_cache(config, **options)
    return QuantizedCache(backend, config, **options)


def installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent of a dotted name is missing
        return False


def held_bytes(cache: Cache) -> int:
    """Bytes of the storage that a cache's tensors hold on to; ours count themselves (`nbytes`)."""
    own = getattr(cache, "nbytes", None)
    if own is not None:
        return int(own)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(cache.layers, set())}
    return sum(storages.values())


def bytes_by_kind(cache: Cache) -> dict[str, int]:
    """The parts of `held_bytes` (codes, scales, residual, ...) where a cache tells them apart; else nothing."""
    stats = getattr(cache, "stats", None)
    if stats is not None:
        return dict(stats()["bytes"])
    quantized = [layer for layer in cache.layers if hasattr(layer, "residual_length")]  # transformers' own
    tensors = [t for layer in quantized for t in (layer.keys, layer.values)]
    return {"residual": sum(t.numel() * t.element_size() for t in tensors)} if tensors else {}


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All plain tensors within lists, tuples, dicts, objects and tensor subclasses, each container once."""
    import torch

    if id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        parts = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
        if not parts:
            yield value
        for name in parts:
            yield from _tensors(getattr(value, name), seen)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, seen)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, seen)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value), seen)


def held_elements(cache: Cache) -> int:
    """Numbers that an exact cache holds: `B * H * T * (D_k + D_v)`, over the layers."""
    return sum(t.numel() for layer in cache.layers for t in _tensors(vars(layer), set()) if t.ndim == 4)
