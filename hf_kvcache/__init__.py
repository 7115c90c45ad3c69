"""Key/value caches for transformers: paged and compressed, attended to in their compressed form.

`import hf_kvcache` registers every cache name with transformers (`unregister()` puts it back), so that
`model.generate(..., cache_implementation="paged_fp8")` works. Importing it imports neither torch nor transformers: it waits for them.
"""

from __future__ import annotations

import importlib
from typing import Any

from hf_kvcache.integration import register_on_import

__version__ = "0.1.0"

_PUBLIC = {
    "make_cache": "caches",
    "PagedCache": "caches",
    "load_cache": "saving",
    "PrefixStore": "memory.prefix",
    "attach": "integration.attaching",
    "detach": "integration.attaching",
    "register": "integration",
    "unregister": "integration",
    "cache_names": "config",
    "FORMATS": "formats.spec",
    "impl_report": "ops.api",
    "plan": "planner",
    "layers_of": "planner",
    "KVCacheError": "errors",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'hf_kvcache' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hf_kvcache.{_PUBLIC[name]}"), name)


register_on_import()
