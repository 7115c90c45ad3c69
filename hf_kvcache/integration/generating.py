"""`generate` builds our cache when a name asks for it: a wrapper of one method of transformers.

What needs our caches is imported in the wrapper: this module is loaded as soon as transformers is, which may be while
`hf_kvcache.caches` itself is being imported.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation.utils import GenerationMixin

from hf_kvcache.config import cache_names, resolve

BACKEND = "hf_kvcache"  # cache_implementation="quantized", cache_config={"backend": BACKEND, ...}
_ORIGINAL = GenerationMixin._prepare_cache_for_generation


def register() -> None:
    """Wrap `GenerationMixin._prepare_cache_for_generation`."""
    GenerationMixin._prepare_cache_for_generation = _prepare


def unregister() -> None:
    """Put it back."""
    GenerationMixin._prepare_cache_for_generation = _ORIGINAL


def _request(generation_config: Any) -> tuple[str, dict[str, Any]] | None:
    """The cache of ours that a generation config asks for: name and options."""
    name = generation_config.cache_implementation
    options = dict(generation_config.cache_config or {})
    if name == "quantized" and options.get("backend") == BACKEND:
        del options["backend"]
        default = f"paged_int{options['nbits']}" if "nbits" in options else "paged_fp8"
        return str(options.pop("format", default)), options
    return (name, options) if name in cache_names() else None


@functools.wraps(_ORIGINAL)
def _prepare(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    from hf_kvcache.caches import build
    from hf_kvcache.integration.attaching import CACHE_KWARGS, attach, paged_cache
    from hf_kvcache.integration.key_bias import warn_of_key_bias

    passed = paged_cache(model_kwargs)
    if passed is not None:
        attach(self)
    request = _request(generation_config)
    if request is None:
        return _ORIGINAL(self, generation_config, model_kwargs, *args, **kwargs)
    config = resolve(*request)
    if generation_config.max_cache_len is not None and config.max_cache_len is None:
        config = resolve(request[0], {**request[1], "max_cache_len": generation_config.max_cache_len})
    name = generation_config.cache_implementation
    had = {key: model_kwargs.get(key) for key in CACHE_KWARGS}
    # transformers makes its own checks and builds its own cache, which ours then replaces. With a cache object
    # passed too, the name stays, so that it complains; an assistant's later rounds pass the cache of the first.
    if all(cache is None for cache in had.values()) or generation_config.is_assistant:
        generation_config.cache_implementation = None
    try:
        out = _ORIGINAL(self, generation_config, model_kwargs, *args, **kwargs)
    finally:
        generation_config.cache_implementation = name
    for key in CACHE_KWARGS:
        built = model_kwargs.get(key)
        if built is None or had[key] is not None:
            continue
        if isinstance(built, EncoderDecoderCache):
            model_kwargs[key] = EncoderDecoderCache(build(config, self.config), built.cross_attention_cache)
        elif type(built) is DynamicCache:
            model_kwargs[key] = build(config, self.config)
        if generation_config.is_assistant:
            model_kwargs[key].activate_past_recording()
        attach(self)
        ours = paged_cache(model_kwargs)
        if ours is not None:
            warn_of_key_bias(self, ours)
    return out
