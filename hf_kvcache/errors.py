"""The errors of hf_kvcache.

    KVCacheError
    ├── ConfigError (also a ValueError)     a name or an option is wrong; nothing was built
    ├── UnsupportedModelError (ValueError)  this model has no decoder cache that ours could replace
    ├── CacheUseError (ValueError)          a built cache was called in a way it cannot serve; it is unchanged
    │   └── CacheFullError                  `max_cache_len` would be passed
    ├── SavedCacheError (ValueError)        a saved cache is damaged or does not fit; nothing was loaded
    ├── StaleViewError (RuntimeError)       a lazy key/value view was read after its layer had moved on
    ├── ImplError (ValueError)              the attention implementation asked for cannot run here, and why
    └── PagePoolError (RuntimeError)        an invariant of the page pool broke: a bug in hf_kvcache
"""


class KVCacheError(Exception):
    """Base of every error that hf_kvcache raises on purpose."""


class ConfigError(KVCacheError, ValueError):
    """A cache name or a `cache_config` option is wrong; the message says what is accepted."""


class UnsupportedModelError(KVCacheError, ValueError):
    """The model has no decoder key/value cache."""


class CacheUseError(KVCacheError, ValueError):
    """A built cache was given tokens that do not fit it; the cache is left as it was."""


class CacheFullError(CacheUseError):
    """Appending would pass `max_cache_len`."""


class SavedCacheError(KVCacheError, ValueError):
    """A saved cache is damaged, or was made by something else than what it is loaded for."""


class StaleViewError(KVCacheError, RuntimeError):
    """A lazy view was read after its layer had been written, cropped, reordered or reset."""


class ImplError(KVCacheError, ValueError):
    """The attention implementation that was asked for cannot serve this call."""


class PagePoolError(KVCacheError, RuntimeError):
    """A page was freed twice or handed to two owners."""
