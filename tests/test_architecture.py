"""The arrows of the design: who may import whom, read from the source."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import hf_kvcache
from hf_kvcache.ops.api import IMPLS

ROOT = Path(hf_kvcache.__file__).parent
MODULES = {
    ".".join(("hf_kvcache", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
STANDARD_ONLY = (
    "hf_kvcache.errors",
    "hf_kvcache.config",
    "hf_kvcache.formats.spec",
    "hf_kvcache.planner",
    *(name for name in MODULES if name.startswith("hf_kvcache.planning")),
)


def imports(module: str) -> set[str]:
    """All that a module's source imports, inside functions too, as full names; not what is for type checking only."""
    out: set[str] = set()
    tree = ast.parse(MODULES[module].read_text())
    skipped = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            out.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                source = ".".join([*above, *([source] if source else [])])
            for alias in node.names:
                name = f"{source}.{alias.name}"
                out.add(name if name in MODULES else source)
    return out


def under(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("module", [name for name in STANDARD_ONLY if name in MODULES])
def test_standard_library_only(module: str) -> None:
    for name in imports(module):
        if module == "hf_kvcache.planning.source" and under(name, "huggingface_hub"):
            continue  # inside the function that is called for a Hub id only; tests/planning sees to that
        assert name.split(".")[0] in sys.stdlib_module_names or name in STANDARD_ONLY, f"{module} imports {name}"


@pytest.mark.parametrize(
    "module", [m for m in MODULES if under(m, *(f"hf_kvcache.{p}" for p in ("formats", "memory", "ops")))]
)
def test_lower_parts_know_no_transformers_and_nothing_above(module: str) -> None:
    allowed = {
        "formats": ("hf_kvcache.errors", "hf_kvcache.formats"),
        "memory": ("hf_kvcache.errors", "hf_kvcache.formats", "hf_kvcache.memory"),
        "ops": ("hf_kvcache.errors", "hf_kvcache.formats", "hf_kvcache.ops"),
    }[module.split(".")[1]]
    for name in imports(module):
        assert not under(name, "transformers"), f"{module} imports {name}"
        assert not under(name, "hf_kvcache") or under(name, *allowed), f"{module} imports {name}"


@pytest.mark.parametrize("implementation", IMPLS.values())
def test_implementations_import_none_of_each_other(implementation: str) -> None:
    others = [other for other in IMPLS.values() if other != implementation]
    for module in MODULES:
        if under(module, implementation):
            for name in imports(module):
                assert not under(name, *others), f"{module} imports {name}"


def test_triton_and_numba_are_imported_in_one_place_each() -> None:
    for module in MODULES:
        for name in imports(module):
            assert not under(name, "triton") or under(module, IMPLS["triton"]), f"{module} imports {name}"
            assert not under(name, "numba") or under(module, IMPLS["numba"]), f"{module} imports {name}"


def test_only_integration_patches_transformers() -> None:
    for module in MODULES:
        for name in imports(module):
            if under(name, "transformers.generation", "transformers.masking_utils", "transformers.modeling_utils"):
                assert under(module, "hf_kvcache.integration", "hf_kvcache.evals", "hf_kvcache.cli"), (
                    f"{module} imports {name}"
                )


def test_layers_and_caches_do_not_import_upwards() -> None:
    above = {
        "hf_kvcache.layers": ("hf_kvcache.caches", "hf_kvcache.integration", "hf_kvcache.config"),
        "hf_kvcache.caches": ("hf_kvcache.integration",),
    }
    for module in MODULES:
        for part, forbidden in above.items():
            if under(module, part):
                for name in imports(module):
                    assert not under(name, *forbidden), f"{module} imports {name}"


def test_the_checker_sees_imports() -> None:
    assert "transformers.cache_utils" in imports("hf_kvcache.layers.paged")
    assert "hf_kvcache.formats.scalar" in imports("hf_kvcache.formats.pages")


@pytest.mark.parametrize("module", MODULES)
def test_files_stay_small(module: str) -> None:
    limit = 800 if under(module, IMPLS["triton"], IMPLS["numba"]) else 400
    assert len(MODULES[module].read_text().splitlines()) <= limit
