"""The Space: what its buttons do, and that bad input comes back as a sentence."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

SPACE = Path(__file__).parents[2] / "examples" / "space"


@pytest.fixture
def actions(monkeypatch):
    monkeypatch.syspath_prepend(str(SPACE))
    sys.modules.pop("actions", None)
    import actions

    return actions


def test_generate_side_by_side(actions, folder, monkeypatch):
    pages = "paged_exact:impl=torch"  # nothing has to be compiled
    monkeypatch.setattr(actions, "choices", lambda: [pages])
    rows, texts = actions.generate(str(folder), "w2 w3 w4", [pages, "no_such_cache"], 6)
    assert [row[0] for row in rows] == ["dynamic", pages]
    assert [row[3] for row in rows] == ["6 of 6", "6 of 6"]
    dynamic, exact = texts.split("\n\n")
    assert exact.rpartition(": ")[2] == dynamic.rpartition(": ")[2]


@pytest.mark.parametrize(
    ("prompt", "caches", "tokens", "words"),
    [
        ("", [], 8, "Write a prompt"),
        (None, None, None, "Write a prompt"),
        ("w2 " * 4000, [], 8, "characters; 4,000 are the most"),
        ("w2", [], 0, "Tokens: from 1"),
        ("w2", [], math.nan, "Tokens: from 1"),
        ("w2", None, 10_000, "Tokens: from 1"),
    ],
)
def test_bad_requests_are_sentences(actions, folder, prompt, caches, tokens, words):
    rows, text = actions.generate(str(folder), prompt, caches, tokens)
    assert rows == []
    assert words in text


def test_a_missing_model_is_a_sentence(actions):
    assert actions.generate("./none-such", "w2", [], 4)[1].startswith("The model is not here")


def test_plan(actions):
    shown = actions.plan(80, 8, 128, 70, 32, 8192, "h100", "4bit")
    assert "327,680" in shown
    assert "h100" in shown


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((None, 8, 128, 8, 1, 10, "h100", "16bit"), "--layers lacks"),
        ((0, 8, 128, 8, 1, 10, "h100", "16bit"), "--layers 0"),
        ((8, 8, 128, -8, 1, 10, "h100", "16bit"), "--params"),
        ((8, 8, 128, None, 1, 10, "h1000", None), "h1000"),
        ((8, 8, 128, 8, 1, math.inf, None, None), "infinity"),
        ((8, 8, 128, 8, 1, 10, None, "5bit"), "invalid choice"),
    ],
)
def test_a_bad_plan_is_a_sentence(actions, numbers, words):
    assert words in actions.plan(*numbers)


def test_measured(actions, tmp_path):
    assert "No report is here" in actions.measured(tmp_path / "report.html")
    (tmp_path / "report.html").write_text('<p class="x">')
    assert "&lt;p class=&quot;x&quot;&gt;" in actions.measured(tmp_path / "report.html")


def test_the_header_names_what_is_there():
    header = (SPACE / "README.md").read_text(encoding="utf-8").split("---")[1]
    fields = dict(line.split(": ", 1) for line in header.strip().splitlines())
    assert (SPACE / fields["app_file"]).is_file()
    assert fields["sdk"] == "gradio"
    assert len(fields["short_description"]) <= 60
    assert "gradio" in (SPACE / "requirements.txt").read_text()


def test_the_app_can_be_built(actions):
    pytest.importorskip("gradio")
    import app

    assert {tab.label for tab in app.build().blocks.values() if hasattr(tab, "label")} >= {"Generate", "Plan", "Measured"}
