"""The README's code runs, on a tiny model in the place of the one it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_code_runs(folder, capsys, tmp_path, monkeypatch):
    if Version(transformers.__version__) < Version("5.24"):
        pytest.skip("the README is written for transformers 5.24 and newer")
    monkeypatch.chdir(tmp_path)
    quickstart, ways, travel = blocks()
    code = re.sub(r'name = "[^"]+"', f"name = {str(folder)!r}", quickstart).replace(
        "The capital of France is", "w2 w3 w4"
    )
    names: dict[str, object] = {}
    exec(code, names)
    assert "PagedCache(paged_fp8, 10 columns)" in capsys.readouterr().out
    for code in (ways, travel):
        exec(code.replace("**inputs", "**inputs, max_new_tokens=2"), names)
