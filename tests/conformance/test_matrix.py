"""Every architecture generates in every way with every kind of format what it ought to."""

from __future__ import annotations

import pytest

from tests.conformance.architectures import ARCHITECTURES
from tests.conformance.matrix import FORMATS, MODES, cell

CELLS = [
    pytest.param(name, mode, fmt, marks=() if (i + j) % len(MODES) == 0 and (i + k) % 3 == 0 else pytest.mark.slow)
    for i, name in enumerate(ARCHITECTURES)
    for j, mode in enumerate(MODES)
    for k, fmt in enumerate(FORMATS)
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "mode", "fmt"), CELLS)
def test_cell(name: str, mode: str, fmt: str) -> None:
    said = cell(name, mode, fmt, "torch")  # which compiles nothing for each shape
    assert not said.startswith("DIFFERS"), said


def test_there_are_enough() -> None:
    assert len(ARCHITECTURES) >= 20
