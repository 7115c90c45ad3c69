"""`hf-kvcache calibrate`: a text in, a file out that a cache takes."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

import hf_kvcache
from hf_kvcache import calibration, cli


def test_the_command_writes_a_file_that_a_cache_takes(folder, tmp_path, capsys) -> None:
    out = str(tmp_path / "c.json")
    small = ["--windows=2", "--window=32", f"--text-file={folder / 'text.txt'}", f"--out={out}"]
    assert cli.main(["calibrate", str(folder), *small]) == 0
    assert out in capsys.readouterr().out
    config = AutoConfig.from_pretrained(folder)
    assert set(calibration.read(out)) == set(range(config.num_hidden_layers))
    cache = hf_kvcache.make_cache("paged_int4", config, calibration=out)
    assert all(layer.steer is not None for layer in cache.paged_layers)


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--rank=0"], "--rank is 0"), (["--rank=9"], "1 to 8"), (["--windows=0"], "--windows is 0"), (["--window=9999"], "at most")],
)
def test_wrong_options_are_one_line(folder, options, words, capsys) -> None:
    text = f"--text-file={folder / 'text.txt'}"
    assert cli.main(["calibrate", str(folder), text, *options]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
