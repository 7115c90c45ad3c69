"""Our cache names in transformers' `GenerationConfig`: build, validate, save, load."""

from __future__ import annotations

import functools
from typing import Any

from transformers.generation import configuration_utils
from transformers.generation.configuration_utils import GenerationConfig

from hf_kvcache.config import cache_names, suggest
from hf_kvcache.errors import ConfigError

_NAMES = configuration_utils.ALL_CACHE_IMPLEMENTATIONS
_ORIGINAL = GenerationConfig.validate


def register() -> None:
    """Add the names, and a suggestion to the error for a mistyped one."""
    configuration_utils.ALL_CACHE_IMPLEMENTATIONS = (*_NAMES, *(name for name in cache_names() if name not in _NAMES))
    GenerationConfig.validate = _validate


def unregister() -> None:
    """Put both back."""
    configuration_utils.ALL_CACHE_IMPLEMENTATIONS = _NAMES
    GenerationConfig.validate = _ORIGINAL


@functools.wraps(_ORIGINAL)
def _validate(self: Any, *args: Any, **kwargs: Any) -> Any:
    name = self.cache_implementation
    accepted = (*configuration_utils.ALL_CACHE_IMPLEMENTATIONS, "paged")
    if isinstance(name, str) and name not in accepted:
        hint = suggest(name, cache_names())
        if hint:
            raise ConfigError(f"cache_implementation={name!r} is unknown.{hint} Accepted: {', '.join(accepted)}")
    return _ORIGINAL(self, *args, **kwargs)
