"""The README names what exists, and its table of caches is the code's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hf_kvcache.config import LAYOUTS
from hf_kvcache.formats.spec import FORMATS, FormatSpec, SideSpec

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "evals/README.md")
PATH = re.compile(r"(?:hf_kvcache|evals|tests|examples|benchmarks|requirements|\.ci)/[\w./-]*[\w/]")


def side(spec: SideSpec) -> str:
    """`8-bit int, rotated, per token` and the like."""
    if not spec.scaled:
        return "exact"
    kind = f"{spec.bits}-bit int" if spec.kind == "int" else spec.kind.removeprefix("fp8_")
    group = f"{spec.group} {'channels' if spec.per == 'token' else 'tokens'}" if spec.group else spec.per
    return f"{kind}{', rotated' if spec.rotate else ''}, a scale per {group}"


def exact_tokens(spec: FormatSpec) -> str:
    """`4 first, 128 newest` and the like."""
    parts = [f"{count} {which}" for count, which in ((spec.sinks, "first"), (spec.residual, "newest")) if count]
    return "all" if not spec.key.scaled and not spec.value.scaled else ", ".join(parts) or "none"


def table() -> str:
    """The rows of the README's table of formats."""
    return "\n".join(
        f"| `{name}` | {side(spec.key)} | {side(spec.value)} | {exact_tokens(spec)} | {spec.about} |"
        for name, spec in FORMATS.items()
    )


def models() -> str:
    """The rows of the README's table of models."""
    from tests.conformance.matrix import model_table

    return model_table()


def layouts() -> str:
    """The rows of the README's table of layouts."""
    return "\n".join(f"| `{name}` | {about} |" for name, about in LAYOUTS.items())


@pytest.mark.parametrize(("name", "rows"), [("caches", table), ("layouts", layouts), ("models", models)])
def test_tables_are_the_code_s(name, rows):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0]
    assert shown.strip().splitlines()[2:] == rows().splitlines(), f"the rows ought to be\n{rows()}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(PATH.findall(text)) | {link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link}
    missing = [
        path for path in named if not ((ROOT / path).exists() or (ROOT / document).parent.joinpath(path).exists())
    ]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_and_options_exist(document, capsys):
    from hf_kvcache import cli

    for command in (["plan"], ["advise"], ["report"], *(["eval", name] for name in cli.EVALS)):
        with pytest.raises(SystemExit):
            cli.main([*command, "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) | {"--no-deps"}
    text = (ROOT / document).read_text(encoding="utf-8")
    assert set(re.findall(r"(?<![\w<!-])--[a-z][a-z-]*", text)) <= known
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"^make (\w+)|`make (\w+)`", text, re.MULTILINE)) <= {(t, "") for t in targets} | {
        ("", t) for t in targets
    }


def test_the_plan_is_what_the_command_prints(capsys):
    from hf_kvcache import cli

    block = (ROOT / "README.md").read_text(encoding="utf-8").partition("<!-- plan -->\n")[2].partition("<!-- /plan -->")[0]
    command, shown = re.findall(r"```\w+\n(.*?)```", block, re.DOTALL)
    assert cli.main(command.split()[1:]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line in shown.splitlines()] == shown.splitlines()


def test_sizes():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200
    assert len((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) <= 100
