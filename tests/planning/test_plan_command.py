"""`hf-kvcache plan`: the table, the numbers in it, where configs come from, what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hf_kvcache
from hf_kvcache import cli
from hf_kvcache.planner import layers_of, plan
from hf_kvcache.planning import chips, fit

ROOT = Path(__file__).parents[2]
CONFIGS = Path(__file__).parent / "configs"
LLAMA_70B = ["--layers", "80", "--kv-heads", "8", "--head-dim", "128", "--heads", "64"]


def answer(capsys, *arguments: str) -> dict:
    assert cli.main(["plan", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return {**found, "caches": {row["name"]: row for row in found["caches"]}}


def test_known_sizes(capsys):
    """80 layers of 8 heads of 128 in 16 bits: 327,680 bytes a token, 80 GiB for 32 rows of 8192."""
    rows = answer(capsys, *LLAMA_70B, "--batch", "32", "--context", "8192")["caches"]
    for name in ("dynamic", "paged_exact"):
        assert rows[name]["bytes_per_token"] == 327_680
        assert rows[name]["nbytes"] == 85_899_345_920
        assert rows[name]["fits"] is None
    assert set(rows) == {"dynamic", *(name for name in hf_kvcache.cache_names() if not name.startswith("latent_"))}


def test_limits_are_where_it_stops_to_fit(capsys):
    """64 GiB, half of it for the cache: the limits fit and one more of either does not."""
    found = answer(
        capsys, *LLAMA_70B, "--memory", "64GiB", "--usable", "0.5", "--bandwidth", "2TB", "--batch", "2", "--context", "999"
    )
    room = 32 * 2**30
    assert found["machine"]["usable"] == room
    layers = layers_of({"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128})
    for name, row in found["caches"].items():
        if name == "dynamic":
            continue
        if name.startswith("sliding_"):  # no context is too long for its window
            assert row["longest_context"] is None
            assert plan(layers, name, 2, 10**9).nbytes <= room
            continue
        assert plan(layers, name, 2, row["longest_context"]).nbytes <= room < plan(layers, name, 2, row["longest_context"] + 1).nbytes
        assert plan(layers, name, row["largest_batch"], 999).nbytes <= room < plan(layers, name, row["largest_batch"] + 1, 999).nbytes
        assert row["floor_ms"] == pytest.approx(row["nbytes"] / 2e12 * 1e3)
        assert row["fits"]
    assert found["caches"]["dynamic"]["longest_context"] == room // (2 * 327_680)


def test_weights_take_room_and_time(capsys):
    arguments = [str(CONFIGS / "llama-3.1-8b.json"), "--gpu", "a100", "--context", "4096"]
    wide, narrow = answer(capsys, *arguments), answer(capsys, *arguments, "--weights", "4bit")
    count, table = 8.03e9, 128_256 * 4096
    assert wide["weights"]["bytes"] == pytest.approx(2 * count, rel=1e-3)
    assert narrow["weights"]["bytes"] == pytest.approx((count - 2 * table) * 4.5 / 8 + 2 * table * 2, rel=1e-3)
    row = wide["caches"]["dynamic"]
    assert row["floor_ms"] == pytest.approx((2 * (count - table) + 4096 * 131_072) / 2039e9 * 1e3, rel=1e-3)
    assert row["longest_context"] < narrow["caches"]["dynamic"]["longest_context"]
    assert wide["model"]["longest_trained_context"] == 131_072


def test_chips_are_added_up(capsys):
    one, four = (answer(capsys, *LLAMA_70B, "--gpu", "H100", "--gpus", n)["machine"] for n in ("1", "4"))
    assert four["memory"] == 4 * one["memory"] == 4 * 80 * 2**30
    assert four["bandwidth"] == 4 * one["bandwidth"] == 4 * 3350e9


def test_a_model_that_is_too_large_fits_nothing(capsys):
    row = answer(capsys, str(CONFIGS / "llama-3.1-405b.json"), "--gpu", "h100")["caches"]["paged_int2"]
    assert (row["fits"], row["longest_context"], row["largest_batch"]) == (False, 0, 0)


def test_windows_end_what_grows(capsys):
    row = answer(capsys, *LLAMA_70B, "--window", "128", "--memory", "1GiB")["caches"]["paged_exact"]
    assert row["longest_context"] is None
    assert row["largest_batch"] < 100


def test_the_table_for_people(capsys, tmp_path):
    (tmp_path / "config.json").write_text((CONFIGS / "gpt-oss-20b.json").read_text())
    assert cli.main(["plan", str(tmp_path), "--gpu", "rtx4090", "--weights", "4bit"]) == 0
    shown = capsys.readouterr().out
    assert "24 of 24 layers have a cache, 12 of them a window" in shown
    assert "20.91 B, 3.6 B for a token" in shown
    assert "made for 131,072 tokens" in shown
    for name in hf_kvcache.cache_names():
        if name.startswith("latent_"):  # the model has no latents
            continue
        assert f"\n{name} " in shown
    cli.main(["plan", *LLAMA_70B])
    without = capsys.readouterr().out
    assert "longest context" not in without
    assert "give --gpu h100" in without


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give a model or config"),
        (["--layers", "8"], "--kv-heads, --head-dim lacks"),
        (["--layers", "0", "--kv-heads", "1", "--head-dim", "8"], "--layers 0"),
        (["none/such/config.json"], "no config.json"),
        ([str(CONFIGS / "phi-4.json"), "--layers", "8"], "--layers goes without MODEL"),
        ([*LLAMA_70B, "--gpu", "h1000"], "Did you mean 'h100'?"),
        ([*LLAMA_70B, "--memory", "much"], "--memory 'much': accepted are amounts such as 80GB"),
        ([*LLAMA_70B, "--memory", "0GB"], "--memory '0GB'"),
        ([*LLAMA_70B, "--bandwidth", "1TB"], "--bandwidth needs --memory or --gpu"),
        ([*LLAMA_70B, "--gpu", "h100", "--gpus", "0"], "--gpus 0"),
        ([*LLAMA_70B, "--gpu", "h100", "--usable", "2"], "--usable 2.0"),
        ([*LLAMA_70B, "--context", "0"], "--context 0"),
        ([*LLAMA_70B, "--params", "many"], "--params 'many'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, words, capsys):
    assert cli.main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("text", "words"), [("[]", "holds a list"), ("{", "cannot be read"), ("{}", "does not say how many layers")])
def test_a_broken_config_is_one_line(text, words, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert cli.main(["plan", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_a_hub_id_offline_says_so():
    done = run(["plan", "nobody/none-such-model"], HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert done.stderr.startswith("hf-kvcache: error: the config of 'nobody/none-such-model' cannot be had from the Hub")
    assert "HF_HUB_OFFLINE is set" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [LLAMA_70B, [str(CONFIGS / "deepseek-v3.json")]], ids=["numbers", "config.json"])
def test_it_answers_quickly_and_without_torch(arguments):
    """Half a second of the processor, so that a busy machine does not fail it; far less where nothing else runs."""
    code = (
        "import sys, time; from hf_kvcache import cli; cli.main(sys.argv[1:]);"
        "heavy = {'torch', 'numpy', 'transformers', 'huggingface_hub'} & set(sys.modules);"
        "print(time.process_time(), *heavy)"
    )
    command = [sys.executable, "-c", code, "plan", *arguments, "--gpu", "h100", "--batch", "32"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    seconds, *heavy = done.stdout.splitlines()[-1].split()
    assert not heavy
    assert float(seconds) < 0.5


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hf_kvcache.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, **environment})


@pytest.mark.parametrize("name", chips.CHIPS)
def test_chips_are_plausible(name):
    found = chips.chip(name.upper().replace("-", " "))
    assert found is chips.CHIPS[name]
    assert 10 < found.memory / 2**30 < 1000
    assert 10**11 < found.bandwidth < 10**13


AMOUNTS = {"80GB": 80e9, "80 GiB": 80 * 2**30, "1.5g": 1.5 * 2**30, "7": 7, "2TB/s": 2e12}


@pytest.mark.parametrize(("text", "wanted"), AMOUNTS.items())
def test_amounts(text, wanted):
    assert chips.amount(text, "--memory") == wanted


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 1000, 1023, 1024])
def test_most_finds_the_limit(limit):
    assert fit.most(lambda n: n <= limit) == limit


def test_most_without_a_limit():
    assert fit.most(lambda n: True) is None
