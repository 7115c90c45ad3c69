"""Windows lose no target and all have the same context; the text says what it is."""

from __future__ import annotations

import hashlib

import pytest
import torch

from hf_kvcache.evals import text
from hf_kvcache.evals.errors import EvalError


@pytest.mark.parametrize("bos", [None, 7])
@pytest.mark.parametrize(("count", "length"), [(1, 4), (3, 8), (5, 5)])
def test_every_token_of_the_stretch_is_a_target_in_one_window(count, length, bos):
    ids = list(range(100, 200))
    rows = text.windows(ids, count, length, bos)
    assert rows.shape == (count, length + 1)
    targets = rows[:, 1:] if bos is None else rows[:, 2:]
    fed = length if bos is None else length - 1
    assert sorted(targets.flatten().tolist()) == ids[1 : count * fed + 1]
    for row, following in zip(rows, rows[1:], strict=False):
        assert following[0 if bos is None else 1] == row[-1], "a window begins on the last target of the one before"


def test_bos_opens_every_window():
    assert text.windows(list(range(50)), 4, 6, bos=9)[:, 0].tolist() == [9] * 4


def test_too_short_a_text_says_how_many_windows_there_are():
    with pytest.raises(EvalError, match=r"4 windows of 16 tokens need 65 tokens, and the text has 50: at most 3"):
        text.windows(list(range(50)), 4, 16, None)
    assert text.windows(list(range(49)), 3, 16, None).shape == (3, 17)


def test_records_are_joined_and_empty_ones_dropped(tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_text("one\n\n  \ntwo = a\n", encoding="utf-8")
    found = text.read_file(str(file))
    assert (found.source, found.content) == ("corpus.txt", "one\n\ntwo = a")
    assert found.sha256 == hashlib.sha256(b"one\n\ntwo = a").hexdigest()


@pytest.mark.parametrize("content", [b"", b" \n\n", b"\xff\xfe\xff"])
def test_a_file_without_words_is_refused(tmp_path, content):
    file = tmp_path / "corpus.txt"
    file.write_bytes(content)
    with pytest.raises(EvalError, match="holds no words|cannot be read"):
        text.read_file(str(file))


class Words:
    """As much of a tokenizer as the policy asks for."""

    def __init__(self, bos_token_id: int | None, adds: bool) -> None:
        self.bos_token_id, self.adds = bos_token_id, adds

    def __call__(self, content: str) -> dict[str, list[int]]:
        return {"input_ids": [self.bos_token_id] * self.adds + [5] * len(content)}


@pytest.mark.parametrize(
    ("policy", "bos", "adds", "expected"),
    [
        ("tokenizer", 1, True, 1),
        ("tokenizer", 1, False, None),
        ("tokenizer", None, False, None),
        ("always", 1, False, 1),
        ("never", 1, True, None),
    ],
)
def test_bos_policy(policy, bos, adds, expected):
    assert text.bos_token(Words(bos, adds), policy) == expected


def test_bos_cannot_be_forced_on_a_tokenizer_without_one():
    with pytest.raises(EvalError, match="no BOS token"):
        text.bos_token(Words(None, False), "always")


def test_windows_are_int64():
    assert text.windows(list(range(20)), 1, 8, None).dtype == torch.int64
