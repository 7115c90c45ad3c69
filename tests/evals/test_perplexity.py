"""The command from end to end on a tiny model: table, records, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hf_kvcache.evals import perplexity, protocol, record, report, selftest

ROOT = Path(__file__).parents[2]


def arguments(folder, *more):
    small = ["--windows", "3", "--window", "64", "--prefill", "48", "--batch", "2"]
    return ["--model", str(folder), "--text-file", str(folder / "text.txt"), *small, *more]


def test_a_run_prints_a_table_and_appends_records(folder, tmp_path, capsys):
    out = tmp_path / "results.jsonl"
    for _ in range(2):
        assert perplexity.main(arguments(folder, "--caches", "paged_fp8:sinks=2", "--out", str(out))) == 0
    shown = capsys.readouterr().out
    assert "BOS       none before each window (tokenizer)" in shown
    assert "48 targets, mean context 56" in shown
    assert "dynamic DynamicCache, paged_fp8:sinks=2 PagedCache" in shown
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["cache"]["text"] for r in records] == ["dynamic", "paged_fp8:sinks=2"] * 2
    exact, fp8 = records[:2]
    assert fp8["schema"] == record.SCHEMA
    assert fp8["cache"] == {
        "text": "paged_fp8:sinks=2", "name": "paged_fp8", "options": {"sinks": 2},
        "class": "PagedCache", "layers": ["PagedLayer"],
    }  # fmt: skip
    assert fp8["protocol"]["targets"] == 3 * 16
    assert fp8["packages"]["torch"]
    assert fp8["git"] is None or len(fp8["git"]["commit"]) == 40
    assert fp8["control"]["agrees"]
    assert exact["kl_mean"] == 0
    assert exact["bits_per_element"] == 32
    assert fp8["kl_mean"] > 0
    assert fp8["bytes"] == sum(fp8["bytes_by_kind"].values())
    assert fp8["bits_per_element"] == 8 * fp8["bytes"] / fp8["elements"]
    assert fp8["bits_per_element_16bit_residual"] < fp8["bits_per_element"]
    low, high = fp8["change_interval"]
    assert low <= fp8["change_percent"] <= high


def test_the_same_seed_gives_the_same_numbers(folder, tmp_path):
    out = tmp_path / "results.jsonl"
    for _ in range(2):
        perplexity.main(arguments(folder, "--caches", "paged_int8", "--out", str(out)))
    records = [json.loads(line) for line in out.read_text().splitlines()]
    for key in ("perplexity", "change_interval", "kl_mean", "kl_p99", "control"):
        assert records[1][key] == records[3][key]


def test_a_failed_self_test_reports_nothing(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(selftest.NoiseCache, "_noisy", staticmethod(lambda states, stored: states))
    out = tmp_path / "results.jsonl"
    assert perplexity.main(arguments(folder, "--out", str(out))) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: self-test failed")
    assert "tokens/s" not in captured.out
    assert not out.exists()


def test_a_model_that_differs_with_a_cache_is_flagged(folder, monkeypatch, capsys):
    plain = protocol.one_pass
    monkeypatch.setattr(protocol, "one_pass", lambda *given: plain(*given) + 0.01)
    assert perplexity.main(arguments(folder, "--caches", "dynamic")) == 0
    assert "WARNING: the exact cache and one pass differ by -0.995 %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--caches", "paged_fp9"], "paged_fp8"),
        (["--caches", "paged_fp8:sinks"], "is not option=value"),
        (["--windows", "999"], "the text has 321: at most 5 such windows"),
        (["--prefill", "64"], "leaves nothing to score"),
        (["--text-file", "none-such.txt"], "cannot be read"),
        (["--model", "./none-such"], "there is none"),
        (["--device", "nowhere"], "nowhere"),
        (["--threads", "0"], "--threads is 0"),
        (["--device", "cuda:99"], "cuda:99"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(folder, capsys, more, words):
    assert perplexity.main(arguments(folder, *more)) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1


def test_a_data_set_out_of_reach_is_one_line(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert perplexity.main(["--model", str(folder)]) == 2
    assert (
        capsys.readouterr().err == "error: WikiText is read with `datasets`, which is not installed: give --text-file\n"
    )


def test_the_script_runs_by_its_path():
    done = subprocess.run(
        [sys.executable, str(ROOT / "evals" / "perplexity.py"), "--help"],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    assert "hf-kvcache eval perplexity --caches paged_fp8 paged_int8" in done.stdout


def test_git_state_is_of_the_package_and_none_outside_a_checkout(tmp_path, monkeypatch):
    stray = tmp_path / "hf_kvcache"
    stray.mkdir()
    (stray / "__init__.py").touch()
    monkeypatch.setattr(record.hf_kvcache, "__file__", str(stray / "__init__.py"))
    assert record.git_state() is None
    subprocess.run(["git", "-C", str(tmp_path), "init", "-q"], check=True)
    assert record.git_state() is None, "a package inside someone else's checkout is not of that checkout"


def test_the_table_has_no_negative_zeros():
    row = {
        "cache": {"text": "paged_exact"}, "perplexity": 17.2, "top1": 1.0, "kl_mean": -3e-9, "kl_p99": 2e-7,
        "change_percent": -4e-6, "change_interval": (-5e-6, 0.0204),
        "bits_per_element": 32.5, "bytes": 2**20, "tokens_per_second": 9.0,
    }  # fmt: skip
    cells = " ".join(report.table([row]).splitlines()[-1].split())
    assert cells == "paged_exact 17.2000 0.000 0.000 .. +0.020 0.000000 0.000000 100.00 32.50 1.00 9.0"
