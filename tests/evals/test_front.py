"""`hf-kvcache eval front`: which caches, which rows are on the front, the table, the plot."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from hf_kvcache import cli
from hf_kvcache.evals import front
from hf_kvcache.evals.candidates import parse
from hf_kvcache.formats.spec import FORMATS


def result(text: str, bits: float, kl: float, narrow: float | None = None) -> dict[str, Any]:
    return {
        "cache": {"text": text, "name": text.partition(":")[0]}, "bits_per_element": bits, "kl_mean": kl,
        "bits_per_element_16bit_residual": narrow, "change_percent": 100 * kl, "top1": 1 - kl,
    }  # fmt: skip


def test_the_front_is_what_nothing_as_small_beats() -> None:
    results = [
        result("dynamic", 32, 0.0), result("paged_c", 8, 0.01), result("paged_b", 5, 0.02),
        result("paged_a", 9, 0.3, 4.0), result("paged_d", 5, 0.05), result("quantized:backend=quanto", 6, 0.02),
    ]  # fmt: skip
    rows = front.ranked(results)
    assert [(row["cache"]["text"], row["bits"], row["front"]) for row in rows] == [
        ("paged_a", 4.0, True),
        ("paged_b", 5, True),
        ("paged_d", 5, False),
        ("quantized:backend=quanto", 6, False),
        ("paged_c", 8, True),
    ]
    starred = [line.split()[1] for line in front.table(rows).splitlines() if line.startswith("*")]
    assert starred == ["paged_a", "paged_b", "paged_c"]


def test_every_format_is_measured_and_every_entry_can_be_read() -> None:
    caches = front.every_cache()
    names = {parse(text).name for text in caches}
    assert names >= {f"paged_{name}" for name in FORMATS if name != "exact"}
    assert "paged_exact" not in names


def test_rivals_come_with_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "installed", lambda package: package == "hqq")
    rivals = [parse(text).options for text in front.every_cache() if text.startswith("quantized")]
    assert {(o["backend"], o["nbits"]) for o in rivals} == {("hqq", 4), ("hqq", 2)}


@pytest.mark.parametrize("module", ["no_such_package", "no_such_package.inner"])
def test_an_absent_package_is_notinstalled(module: str) -> None:
    assert not front.installed(module)


def test_a_run_prints_the_table_and_draws_the_plot(folder, tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "front.png"
    small = ["--windows=3", "--window=64", "--prefill=48", "--batch=3", f"--text-file={folder / 'text.txt'}"]
    caches = ["--caches", "paged_fp8", "paged_int2:residual_length=0,page_size=16,q_group_size=16"]
    assert cli.main(["eval", "front", str(folder), *small, *caches, "--plot", str(plot)]) == 0
    shown = capsys.readouterr().out
    assert "paged_int2:residual_length=0" in shown
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("plot", "words"), [("front.txt", ".png"), ("no/such/front.png", "no such folder")])
def test_a_plot_that_cannot_be_written_is_refused_first(folder, plot, words, capsys) -> None:
    assert cli.main(["eval", "front", str(folder), "--plot", plot]) == 2
    assert words in capsys.readouterr().err


def test_a_plot_needs_matplotlib(folder, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(front.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["eval", "front", str(folder), "--plot", "front.png"]) == 2
    assert "matplotlib" in capsys.readouterr().err
