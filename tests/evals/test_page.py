"""`hf-kvcache report`: tables from records, plots where matplotlib is installed, one page that needs nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hf_kvcache import cli
from hf_kvcache.evals import generation, memory, page, perplexity, retrieval, speed

BASE = {
    "schema": 1, "model": {"name": "<tiny>", "class": "Tiny", "dtype": "float32"}, "packages": {"torch": "2.0"},
    "machine": {"processor": "none", "threads": 1, "cores": 2, "device": "cpu"}, "git": {"commit": "c" * 40, "changed": False},
}  # fmt: skip


def record(metric: str, cache: str, protocol: dict[str, Any], **values: Any) -> dict[str, Any]:
    named = {"text": cache, "name": cache.partition(":")[0], "options": {}}
    return {**BASE, "metric": metric, "cache": named, "protocol": {**protocol, "seed": 0}, **values}


def quality(cache: str, bits: float, kl: float) -> dict[str, Any]:
    return record(
        perplexity.METRIC, cache, {"windows": 2}, text={"source": "essay", "sha256": "0"}, perplexity=17 + kl, change_percent=kl,
        change_interval=None, kl_mean=kl, kl_p99=kl, top1=1 - kl, bits_per_element=bits, bits_per_element_16bit_residual=None,
        bytes=bits * 1000, tokens_per_second=9.0,
    )  # fmt: skip


def fast(cache: str, context: int, rate: float) -> dict[str, Any]:
    numbers = {"prefill_tokens_per_second": 10 * rate, "decode_tokens_per_second": rate, "step_ms": 1000 / rate, "step_ms_p90": 9.0}
    return record(speed.METRIC, cache, {"context": context, "batch": 1}, **numbers)


RECORDS = [
    fast("paged_fp8", 512, 30.0), fast("dynamic", 512, 20.0), fast("dynamic", 64, 25.0),
    quality("paged_fp8", 8.25, 0.002), quality("dynamic", 32.0, 0.0), quality("paged_int4", 5.0, 0.01),
    record(retrieval.METRIC, "dynamic", {"length": 512, "depth": 0.5, "trials": 3}, found=3, nats=0.1),
    record(generation.METRIC, "paged_fp8", {"tokens": 2}, tokens=[[4, 6]], repetition=0.25),
    record(generation.METRIC, "dynamic", {"tokens": 2}, tokens=[[4, 5]], repetition=0.0),
    record(memory.METRIC, "dynamic", {"context": 64}, bytes=2**20, planned_bytes=2**21, peak_bytes=None, resident_bytes=None),
]  # fmt: skip


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(map(json.dumps, RECORDS)) + "\n")
    return path


def cells(text: str, first: str) -> list[list[str]]:
    """The cells of the table's rows that start with `first`."""
    rows = [line[8:-10].split("</td><td>") for line in text.splitlines() if line.startswith("<tr><td>")]
    return [row for row in rows if row[0] == first]


def test_a_page_has_a_table_for_each_kind(results, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert cli.main(["report", str(results), "--out", str(out)]) == 0
    assert "5 tables" in capsys.readouterr().out
    text = out.read_text()
    assert text.count("<table>") == 5
    assert text.index("Quality") < text.index("Retrieval") < text.index("Speed against")
    assert "&lt;tiny&gt; (float32) on essay; windows 2, seed 0" in text
    assert "<tiny>" not in text
    assert "http" not in text
    assert [row[1:3] for row in cells(text, "dynamic")] == [
        ["17.0000", "0.000"], ["512", "0.50"], ["100.0", "2.0"], ["64", "250.0"], ["512", "200.0"], ["64", "1.00"],
    ]  # fmt: skip
    assert cells(text, "paged_fp8")[1][1:] == ["50.0", "1.0", "25.0"]


def test_the_same_records_give_the_same_page():
    assert page.page(page.grouped(RECORDS), {}) == page.page(page.grouped(RECORDS), {})


def test_the_last_of_equal_cells_counts(results, tmp_path):
    newer = tmp_path / "newer.jsonl"
    newer.write_text(json.dumps(fast("dynamic", 512, 40.0)) + "\n")
    found = page.read([str(results), str(newer)])
    assert len(found) == len(RECORDS)
    rates = [r["decode_tokens_per_second"] for r in found if r["cache"]["text"] == "dynamic" and r["metric"] == speed.METRIC]
    assert rates == [40.0, 25.0]


def test_other_protocols_and_machines_make_other_tables():
    other = {**fast("dynamic", 64, 1.0), "machine": {**BASE["machine"], "processor": "another"}}
    batch = record(speed.METRIC, "dynamic", {"context": 64, "batch": 4})
    assert len(page.grouped([fast("dynamic", 64, 1.0), other, batch, fast("paged_fp8", 8, 2.0)])) == 3


def test_plots_are_in_the_page_and_beside_it(results, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out, plots = tmp_path / "page.html", tmp_path / "plots"
    assert cli.main(["report", str(results), "--out", str(out), "--plots", str(plots)]) == 0
    assert "3 plots" in capsys.readouterr().out
    assert sorted(path.name for path in plots.iterdir()) == ["01-quality.png", "04-speed.png", "05-memory.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots.iterdir())
    assert out.read_text().count('src="data:image/png;base64,') == 3


def test_without_matplotlib_the_page_has_no_plots(results, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(page, "installed", lambda package: False)
    out = tmp_path / "page.html"
    assert cli.main(["report", str(results), "--out", str(out)]) == 0
    assert 'pip install "hf-kvcache[eval]"' in capsys.readouterr().out
    assert "<img" not in out.read_text()
    assert cli.main(["report", str(results), "--out", str(out), "--plots", str(tmp_path / "plots")]) == 2


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "no records in"),
        ("{}", "not a file of records"),
        ("plain text", "not a file of records"),
        (json.dumps({**RECORDS[0], "schema": 9}), "a record of schema 9"),
        (json.dumps({**RECORDS[0], "metric": "taste"}), "metric 'taste': accepted are"),
    ],
)
def test_what_is_not_a_record_is_refused(lines, words, tmp_path, capsys):
    path = tmp_path / "results.jsonl"
    path.write_text(lines)
    assert cli.main(["report", str(path), "--out", str(tmp_path / "page.html")]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


def test_missing_files_and_folders_are_named(results, tmp_path, capsys):
    assert cli.main(["report", "none.jsonl"]) == 2
    assert "'none.jsonl': there is no such file" in capsys.readouterr().err
    assert cli.main(["report", str(results), "--out", str(tmp_path / "none" / "page.html")]) == 2
    assert "there is no folder" in capsys.readouterr().err
