"""Values by layout object: layouts are asked for at every call, and hashing one costs more than all the rest of it."""

from __future__ import annotations

from typing import Generic, TypeVar

from hf_kvcache.formats.spec import PageLayout

T = TypeVar("T")
MOST = 1024  # entries; then it starts afresh


class ByIdentity(Generic[T]):
    """Values by layout object and further keys. A layout that is held here cannot pass its identity on to another."""

    def __init__(self) -> None:
        self._held: dict[tuple[object, ...], tuple[PageLayout, T]] = {}

    def get(self, layout: PageLayout, *keys: object) -> T | None:
        """The value, or None."""
        found = self._held.get((id(layout), *keys))
        return None if found is None else found[1]

    def put(self, layout: PageLayout, value: T, *keys: object) -> T:
        """Keep a value, and return it."""
        if len(self._held) >= MOST:
            self._held.clear()
        self._held[(id(layout), *keys)] = layout, value
        return value
