"""Every example runs, on a tiny random model where it takes one."""

from __future__ import annotations

import runpy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def main_of(name: str) -> Callable[[list[str]], int | None]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


def test_every_example_has_a_test():
    tested = {"quickstart", "compare_caches", "long_context", "kv_cache_from_scratch", "bnb_4bit_weights"}
    elsewhere = {"demo", "shared_prefix"}  # `make demo` runs the one, tests/travel the other
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested | elsewhere


def test_quickstart(folder, capsys):
    main_of("quickstart")(["--model", str(folder), "--prompt", "w2 w3 w4", "--cache", "paged_exact"])
    shown = capsys.readouterr().out
    assert shown.startswith("w2 w3 w4 w")
    assert "layer 0-1: PagedLayer exact" in shown
    assert "18 tokens in" in shown


def test_compare_caches(folder, capsys):
    caches = ["paged_exact:impl=torch", "paged_int8:impl=torch"]
    arguments = ["--model", str(folder), "--prompt", "w2 w3 w4", "--tokens", "8", "--caches", *caches]
    assert main_of("compare_caches")(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[0] == "dynamic"
    assert lines[3].endswith("8 of 8")
    dynamic, exact, _ = (line.partition(": ")[2] for line in lines[-3:] if line)
    assert len(dynamic.split()) == 8
    assert exact.endswith(dynamic)
    assert main_of("compare_caches")(["--model", str(folder), "--caches", "paged_fp9"]) == 2


def test_long_context(folder, capsys):
    arguments = ["--model", str(folder), "--text-file", str(folder / "text.txt"), "--tokens", "400", "--piece", "128"]
    assert main_of("long_context")([*arguments, "--cache", "paged_int8"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("planned ") == 2
    assert "after 423 tokens" in shown


def test_kv_cache_from_scratch(capsys):
    main_of("kv_cache_from_scratch")(["--prompt", "32", "--tokens", "16"])
    shown = capsys.readouterr().out
    assert "16 tokens, the same with and without a cache" in shown
    rows = [line.replace(",", "").split() for line in shown.splitlines() if line.endswith(("prefill", "decode"))]
    without, with_ = ([int(row[i]) for row in rows] for i in (1, 2))
    assert without[0] == with_[0] == 3 * 32 * 32 * 32 + 2 * 32 * 32 * 32
    assert without == sorted(without)
    assert with_[1] == 3 * 32 * 32 + 2 * 33 * 32
    assert len((EXAMPLES / "kv_cache_from_scratch.py").read_text().splitlines()) <= 120


def test_bnb_4bit_weights(folder, capsys):
    pytest.importorskip("accelerate")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other packages, at import and at use
        pytest.importorskip("bitsandbytes")
        assert main_of("bnb_4bit_weights")(["--model", str(folder), "--prompt", "w2 w3", "--tokens", "4"]) == 0
    shown = capsys.readouterr().out
    assert "5 tokens in paged_int4" in shown
