"""One frozen description of a cache, and the way from a name and options to it. Standard library only."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_kvcache.errors import ConfigError
from hf_kvcache.formats.spec import FORMATS, FormatSpec, SideSpec

LAYOUTS: dict[str, str] = {
    "paged": "every layer keeps what the model says it sees, in pages",
    "sliding": "full attention layers keep the first `sinks` tokens and the newest `window`, whatever the model says",
    "latent": "as `paged`, for models with multi-head latent attention (MLA) only",
}
WINDOW, SINKS = 1024, 4  # of a `sliding` cache that is not told otherwise


def cache_names() -> tuple[str, ...]:
    """Every `cache_implementation` name, `<layout>_<format>`."""
    return tuple(f"{layout}_{fmt}" for layout in LAYOUTS for fmt in FORMATS)


@dataclass(frozen=True)
class CacheConfig:
    """What to build. `spec` is for every layer that `layers` does not name (index, negative from the end).

    window: tokens that a full attention layer is made to look back to, itself included, or None.
    given: names of the options that were given.
    """

    name: str
    layout: str
    spec: FormatSpec
    layers: tuple[tuple[int, FormatSpec], ...] = ()
    max_cache_len: int | None = None
    impl: str = "auto"
    calibration: str | None = None
    prefix_store: Any = None
    window: int | None = None
    given: frozenset[str] = frozenset()

    def spec_of(self, layer: int, layers: int) -> FormatSpec:
        """The format of one layer out of `layers`."""
        return dict(self.layers).get(layer, dict(self.layers).get(layer - layers, self.spec))

    def latent_spec_of(self, layer: int, layers: int) -> FormatSpec:
        """The same for a layer of latents: they are its keys; rope keys, its values, stay exact if nothing else is asked.

        8-bit latents come from a norm and are not rotated: one scale a token is enough, and what kernels read.
        """
        spec = self.spec_of(layer, layers)
        key, value = spec.key, spec.value
        if key.scaled and key.direct and not self.given & {"rotate", "key"}:
            key = dataclasses.replace(key, rotate=False)
        if "value" not in self.given:
            value = FORMATS["exact"].value
        return spec.replace(key=key, value=value)


def suggest(wrong: object, accepted: Any) -> str:
    """`Did you mean ...?` or nothing."""
    close = difflib.get_close_matches(str(wrong), list(map(str, accepted)), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def resolve(name: str, options: Mapping[str, Any] | None = None) -> CacheConfig:
    """A name such as `paged_fp8` and `cache_config` options -> CacheConfig. The options are not changed.

    Options (transformers' own names where it has one):
        page_size: tokens in a page, a multiple of 16.
        residual_length: newest tokens kept exact.
        sinks: first tokens kept exact; under an imposed window, those that stay.
        window: newest tokens that stay, for `sliding` caches.
        nbits, q_group_size: bits of integer codes; values that share a scale.
        rotate: Hadamard rotation on or off.
        key, value: another format's name, or SideSpec fields, for one side (of MLA: the latents, the rope keys).
        layers: {layer index: format name}, negative from the end.
        max_cache_len: most columns the cache may hold; memory is then taken at once.
        prefix_store: a `hf_kvcache.PrefixStore`, where prompts look for beginnings that were encoded before.
        impl: attention implementation, see `hf_kvcache.impl_report()`.
        calibration: a file that `hf-kvcache calibrate` made for the model: better keys below 8 bits.

    Raises ConfigError for anything else, in words.
    """
    layout, _, fmt = str(name).partition("_")
    if layout not in LAYOUTS or fmt not in FORMATS:
        accepted = cache_names()
        raise ConfigError(
            f"{name!r} is not a cache of hf_kvcache.{suggest(name, accepted)} Accepted: {', '.join(accepted)}"
        )
    given = dict(options or {})
    unknown = [key for key in given if key not in _OPTIONS]
    if unknown:
        raise ConfigError(
            f"cache_config has no option {unknown[0]!r}.{suggest(unknown[0], _OPTIONS)} Accepted: {', '.join(_OPTIONS)}"
        )
    given = {key: value for key, value in given.items() if value is not None}
    window = _window(layout, given)
    layers = tuple((_layer(index), _spec(_format(fmt_), given)) for index, fmt_ in _mapping(given, "layers").items())
    spec = _spec(FORMATS[fmt], given)
    max_cache_len = _integer(given, "max_cache_len", None, 1)
    calibration = _calibration(given, [spec, *(layer for _, layer in layers)])
    impl = str(given.get("impl", "auto"))
    return CacheConfig(
        str(name), layout, spec, layers, max_cache_len, impl, calibration, _store(given), window, frozenset(given)
    )


def _store(given: dict[str, Any]) -> Any:
    store = given.get("prefix_store")
    if store is not None and not (hasattr(store, "find") and hasattr(store, "put")):
        raise ConfigError(f"prefix_store={store!r}: accepted is a hf_kvcache.PrefixStore")
    return store


_OPTIONS = (
    "page_size", "residual_length", "sinks", "nbits", "q_group_size", "rotate", "key", "value", "layers",
    "max_cache_len", "impl", "calibration", "prefix_store", "window",
)  # fmt: skip


def _window(layout: str, given: dict[str, Any]) -> int | None:
    """The imposed window, if the layout has one; the sinks before it are then the same for every format."""
    if layout == "sliding":
        given.setdefault("sinks", SINKS)
        return _integer(given, "window", WINDOW, 1)
    if "window" in given:
        raise ConfigError(
            f"window={given['window']!r} is for sliding_<format> caches: paged ones keep what the model says it sees"
        )
    return None


def _spec(spec: FormatSpec, given: dict[str, Any]) -> FormatSpec:
    sides = {}
    for name in ("key", "value"):
        side = _side(name, given[name], getattr(spec, name)) if name in given else getattr(spec, name)
        if side.scaled:
            changes: dict[str, Any] = {}
            if "nbits" in given and (side.kind != "int" or given["nbits"] != side.bits):
                raise ConfigError(
                    f"nbits={given['nbits']!r} does not fit {spec.name!r}, whose {name}s have {side.bits} bits: "
                    "choose the width by name, or one side with key= / value="
                )
            if "q_group_size" in given:
                changes["group"] = _integer(given, "q_group_size", None, 8)
            if "rotate" in given:
                if not isinstance(given["rotate"], bool):
                    raise ConfigError(f"rotate={given['rotate']!r}: accepted are True and False")
                changes["rotate"] = given["rotate"]
            side = dataclasses.replace(side, **changes)
        sides[name] = side
    page_size = _integer(given, "page_size", spec.page_size, 16)
    if page_size is None or page_size % 16:
        raise ConfigError(f"page_size={page_size}: accepted are multiples of 16")
    for name, side in sides.items():
        if side.per == "channel" and page_size % (side.group or page_size):
            raise ConfigError(
                f"page_size={page_size} is not a multiple of the {name}s' group of {side.group} tokens: "
                "a page boundary must be a group boundary"
            )
    residual = _integer(given, "residual_length", spec.residual, 0)
    sinks = _integer(given, "sinks", spec.sinks, 0)
    return spec.replace(**sides, page_size=page_size, residual=residual, sinks=sinks)


def _side(name: str, value: Any, base: SideSpec) -> SideSpec:
    if isinstance(value, str):
        return getattr(_format(value), name)  # type: ignore[no-any-return]
    names = [f.name for f in dataclasses.fields(SideSpec)]
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}={value!r}: accepted are a format's name or a dict of {', '.join(names)}")
    wrong = [key for key in value if key not in names]
    if wrong:
        raise ConfigError(f"{name} has no field {wrong[0]!r}.{suggest(wrong[0], names)} Accepted: {', '.join(names)}")
    changes = dict(value)
    if "bits" in changes and "kind" not in changes:
        changes["kind"] = "int"
    if changes.get("kind") == "exact":
        changes = {"bits": 16, "rotate": False, **changes}
    if changes.get("kind", base.kind) == "int" and "symmetric" not in changes:
        changes["symmetric"] = changes.get("bits", base.bits) == 8
    if changes.get("bits", base.bits) != base.bits:
        changes.setdefault("clip", 1.0)  # a share that was chosen for another width
    return dataclasses.replace(base, **changes)


def _format(name: Any) -> FormatSpec:
    if name not in FORMATS:
        raise ConfigError(f"{name!r} is not a format.{suggest(name, FORMATS)} Accepted: {', '.join(FORMATS)}")
    return FORMATS[name]


def _calibration(given: dict[str, Any], specs: list[FormatSpec]) -> str | None:
    path = given.get("calibration")
    if path is None:
        return None
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"calibration={path!r}: accepted is the path of a file that `hf-kvcache calibrate` wrote")
    if not any(spec.key.per == "channel" for spec in specs):
        raise ConfigError(
            f"calibration={str(path)!r} steers the rounding of keys whose scales are per channel, and {specs[0].name} has none: "
            "use it with int4, int3, int2 or a mixed format of these"
        )
    return os.fspath(path)


def _mapping(given: dict[str, Any], name: str) -> Mapping[Any, Any]:
    value = given.get(name, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}={value!r}: accepted is a dict of layer index to format name")
    return value


def _layer(index: Any) -> int:
    try:
        return int(index)
    except (TypeError, ValueError):
        raise ConfigError(f"layers has the key {index!r}: accepted are layer numbers, negative from the end") from None


def _integer(given: dict[str, Any], name: str, default: int | None, least: int) -> int | None:
    value = given.get(name, default)
    if value is default:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r}: accepted are whole numbers from {least}")
    return value
