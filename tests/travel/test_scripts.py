"""The example and the benchmark run, on a tiny model and a tokenizer of characters."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import prefix
from examples import shared_prefix
from hf_kvcache.evals import models
from tests.grids import VOCAB, model


class Characters:
    """A token a character."""

    def __call__(self, text: str, return_tensors: str | None = None) -> dict:
        ids = [ord(c) % (VOCAB - 2) + 2 for c in text]
        return {"input_ids": ids if return_tensors is None else torch.tensor([ids])}

    def decode(self, ids) -> str:
        return "".join(chr(int(i) + VOCAB - 4) for i in ids)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "load", lambda *_: (model("llama"), Characters()))
    monkeypatch.setattr(prefix, "load", models.load)


def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    shared_prefix.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert re.match(r"1408 of \d+ tokens found; \d", lines[3]), "the document and what each question begins with"


def test_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = "--document 256 --questions 2 --new 3 --chunk 64 --conversations 12 --active 3 --shares 0.5 1 --threads 1"
    prefix.main([*small.split(), "--output", str(tmp_path / "out")])
    half, whole, questions = (json.loads(line) for line in (tmp_path / "out").read_text().splitlines())
    assert questions["same"] == 2
    assert questions["hit_rate"] == 1.0
    assert 0.5 < half["of_best"] <= whole["of_best"] == 1.0
    assert "2 of 2 answers identical" in capsys.readouterr().out
