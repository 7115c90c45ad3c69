"""Run something once some modules have been imported, by whomever. Standard library only."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence


class _Loader(importlib.abc.Loader):
    """A module's own loader, and a word to the finder after it ran."""

    def __init__(self, loader: importlib.abc.Loader, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.loaded(module.__name__)


class _Finder(importlib.abc.MetaPathFinder):
    """Watches imports of the awaited modules only."""

    def __init__(self) -> None:
        self._jobs: list[tuple[set[str], Callable[[], None]]] = []
        self._searching: set[str] = set()

    def __call__(self, modules: Sequence[str], job: Callable[[], None]) -> None:
        """Run `job` as soon as all of `modules` have been imported: now, if they already are."""
        missing = {name for name in modules if not _is_loaded(name)}
        if not missing:
            job()
            return
        self._jobs.append((missing, job))
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def cancel(self) -> None:
        """Forget all jobs that have not run."""
        self._jobs.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in self._searching or not any(name in missing for missing, _ in self._jobs):
            return None
        self._searching.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def loaded(self, name: str) -> None:
        """A module has run to its end."""
        ready = []
        for missing, job in self._jobs:
            missing.discard(name)
            if not missing:
                ready.append(job)
        self._jobs = [(missing, job) for missing, job in self._jobs if missing]
        if not self._jobs and self in sys.meta_path:
            sys.meta_path.remove(self)
        for job in ready:
            job()


def _is_loaded(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


when_imported = _Finder()
