"""`python -m tests.conformance [ARCHITECTURE ...]`: the matrix as a table; `--models`: the README's rows."""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import warnings

import torch

from tests.conformance.architectures import ARCHITECTURES
from tests.conformance.matrix import FORMATS, MODES, cell, model_table


def main() -> int:
    """Print; 1 when a cell differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance")
    parser.add_argument("names", nargs="*", metavar="ARCHITECTURE", help="default: all")
    parser.add_argument("--models", action="store_true", help="print the README's table of models, run nothing")
    given = parser.parse_args()
    if given.models:
        print(model_table())
        return 0
    torch.set_num_threads(1)
    notes: dict[str, None] = {}
    print("| architecture | " + " | ".join(MODES) + " |\n|---" * 1 + "|---" * len(MODES) + "|")
    for name in given.names or ARCHITECTURES:
        row = []
        for mode in MODES:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                said = [cell(name, mode, fmt) for fmt in FORMATS]
            notes.update({f"{name}, {mode}, {fmt}: {s}": None for fmt, s in zip(FORMATS, said, strict=True) if s != "equal"})
            row.append(" ".join("=" if s == "equal" else s.partition(":")[0] for s in dict.fromkeys(said)))
        print(f"| {name} | " + " | ".join(row) + " |", flush=True)
    print(f"\n`=`: {', '.join(FORMATS)} all equal.", *notes, sep="\n")
    return int(any("DIFFERS" in note for note in notes))


if __name__ == "__main__":
    raise SystemExit(main())
