"""All that touches transformers' internals. What it changes, `unregister()` puts back:

- `names`: `ALL_CACHE_IMPLEMENTATIONS` and `GenerationConfig.validate`;
- `generating`: `GenerationMixin._prepare_cache_for_generation`;
- `prefilling`: `GenerationMixin._prefill`;
- `attention`: attention and mask functions, under names of our own.

`attaching` touches single models (two forward hooks each). Works on transformers 5.17 to 5.24: what differs between
them is looked for, not derived from a version.
"""

from __future__ import annotations

import importlib

from hf_kvcache.integration.import_hook import when_imported

# Our part -> the modules of transformers that must be loaded before it can take its place.
_PARTS = {
    "names": ("transformers.generation.configuration_utils",),
    "attention": ("transformers.masking_utils", "transformers.modeling_utils"),
    "prefilling": ("transformers.generation.utils", "transformers.masking_utils", "transformers.modeling_utils"),
    "generating": ("transformers.generation.utils", "transformers.masking_utils", "transformers.modeling_utils"),
}
_active: set[str] = set()


def _switch_on(part: str) -> None:
    for module in _PARTS[part]:  # their arrival may switch the part on by itself
        importlib.import_module(module)
    if part not in _active:
        importlib.import_module(f"{__name__}.{part}").register()
        _active.add(part)


def register() -> None:
    """Make every name of ours known to transformers, importing it if need be. Idempotent."""
    for part, modules in _PARTS.items():
        for module in modules:  # first, or a part that imports them itself would be asked for while half loaded
            importlib.import_module(module)
        _switch_on(part)


def unregister() -> None:
    """Leave transformers as it was found. Models that are attached stay so until `detach`."""
    for part in sorted(_active):
        importlib.import_module(f"{__name__}.{part}").unregister()
    _active.clear()
    when_imported.cancel()


def register_on_import() -> None:
    """As `register`, but each part only once transformers has been imported that far: `import hf_kvcache` stays light."""
    for part, modules in _PARTS.items():
        when_imported(modules, lambda part=part: _switch_on(part))  # type: ignore[misc]
