"""From a corpus to windows of token ids, and nothing lost in between."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hf_kvcache.evals.errors import EvalError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

DATASET = ("Salesforce/wikitext", "wikitext-2-raw-v1")
Bos = Literal["tokenizer", "always", "never"]


@dataclass(frozen=True)
class Text:
    """A corpus as one string. source: where it came from, in words."""

    source: str
    content: str

    @property
    def sha256(self) -> str:
        """Of the UTF-8 bytes, so that two runs can be told to have read the same."""
        return hashlib.sha256(self.content.encode()).hexdigest()


def read_file(path: str) -> Text:
    """A local text, one record a line. Raises EvalError when it cannot be read or holds nothing."""
    try:
        records = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EvalError(f"text file {path!r} cannot be read: {error}") from error
    return Text(Path(path).name, _join(records))


def read_dataset(split: Literal["test", "train"] = "test") -> Text:
    """A split of WikiText-2 raw, from the Hub or its local cache.

    Raises EvalError, in one line, without the `datasets` package or a way to the Hub.
    """
    try:
        import datasets
    except ImportError:
        raise EvalError("WikiText is read with `datasets`, which is not installed: give --text-file") from None
    path, name = DATASET
    try:
        records = datasets.load_dataset(path, name, split=split)["text"]
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise EvalError(f"data set {path} cannot be loaded ({reason}): give --text-file FILE") from error
    return Text(f"{path} {name} {split}", _join(records))


def read(path: str | None, split: Literal["test", "train"] = "test") -> Text:
    """The local text at `path`, or without one a split of WikiText-2 raw. Raises EvalError."""
    return read_file(path) if path else read_dataset(split)


def _join(records: Iterable[str]) -> str:
    """Records that hold something, with an empty line between them."""
    kept = [record.rstrip("\n") for record in records if record.strip()]
    if not kept:
        raise EvalError("the text holds no words")
    return "\n\n".join(kept)


def token_ids(tokenizer: PreTrainedTokenizerBase, content: str) -> list[int]:
    """The ids of a text alone: no token is added to it."""
    return list(tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"])


def bos_token(tokenizer: PreTrainedTokenizerBase, policy: Bos) -> int | None:
    """The id that opens each window, or None. `tokenizer` does what the tokenizer does to any text.

    Raises EvalError when one is asked for and the tokenizer has none.
    """
    if policy == "never":
        return None
    bos: int | None = tokenizer.bos_token_id
    if policy == "always":
        if bos is None:
            raise EvalError("--bos always: this tokenizer has no BOS token")
        return bos
    opening = tokenizer("a")["input_ids"][:1]
    return bos if bos is not None and opening == [bos] else None


def windows(ids: list[int], count: int, length: int, bos: int | None) -> torch.Tensor:
    """Cut `count` windows that feed `length` tokens each; int64 `[count, length + 1]`.

    The last column is a target only. The next window begins on that very token, so that every token of the
    stretch is predicted in one window and the boundaries lose none. With `bos`, it is the first token fed.
    Raises EvalError when the text is too short.
    """
    import torch

    fed = length if bos is None else length - 1
    possible = (len(ids) - 1) // fed
    if count > possible:
        raise EvalError(
            f"{count} windows of {length} tokens need {count * fed + 1} tokens, and the text has {len(ids)}: "
            f"at most {possible} such windows"
        )
    stretch = torch.tensor(ids[: count * fed + 1], dtype=torch.int64)
    rows = stretch.unfold(0, fed + 1, fed)
    return rows.clone() if bos is None else torch.cat([torch.full((count, 1), bos), rows], dim=1)
