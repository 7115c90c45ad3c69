"""The decode kernels, compiled ahead of time with no GPU: what `benchmarks/compile.py` prints for all, held for a few.

In a process of its own without TRITON_INTERPRET (tens of seconds a kernel the first time, then triton's cache):

    pytest tests/ops/test_triton_compile.py
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter cannot compile", allow_module_level=True)

import torch

from benchmarks import aot
from benchmarks import compile as bench
from benchmarks.views import SPECS, empty_view
from hf_kvcache.ops.api import AttendCall
from hf_kvcache.ops.triton import launch, run

ISSUE_BOUND = {"exact": 0.25, "fp8": 0.6, "int8": 0.75, "token4": 1.0, "token2": 2.0}


@pytest.mark.parametrize("name", ISSUE_BOUND)
def test_hopper_can_issue_fast_enough(name: str) -> None:
    """No spills, wide loads, tensor cores, and the share of H200's memory clocks that instructions may take."""
    cells, wrong = bench.measure("sm_90", name, 128, 1)
    row = dict(zip(bench.COLUMNS, cells, strict=True))
    assert not wrong
    assert "HMMA" in row["mma"]
    assert float(row["bound H200"]) <= ISSUE_BOUND[name]


@pytest.mark.parametrize(("chip", "name"), [("sm_80", "fp8"), ("sm_100", "exact"), ("gfx942", "token4")])
def test_other_chips(chip: str, name: str) -> None:
    """The oldest without fp8 instructions, the newest, and AMD's."""
    cells, wrong = bench.measure(chip, name, 128, 1)
    assert not wrong
    assert "MMA" in cells[bench.COLUMNS.index("mma")].upper() or "MFMA" in cells[bench.COLUMNS.index("mma")].upper()


def test_latents() -> None:
    """Absorbed MLA on Hopper: tensor cores, no spills."""
    cells, wrong = bench.measure_latent("sm_90", "mla-exact")
    row = dict(zip(bench.COLUMNS, cells, strict=True))
    assert not wrong
    assert row["spilled"] == "0"
    assert "MMA" in row["mma"]


def test_a_spill_is_seen() -> None:
    """The complaints are not empty by construction: a kernel squeezed into 64 registers spills."""
    view = empty_view(SPECS["exact"], 8, 128, torch.bfloat16)
    with aot.launches("sm_90", maxnreg=64) as got:
        run.decode(AttendCall(torch.empty(1, 32, 1, 128, dtype=torch.bfloat16), view, 0.1), launch.CHIPS["sm_90"])
    _, kernel, options = got[0]
    _, wrong = bench.row("sm_90", "squeezed", kernel, options, 512, 64, True)
    assert any("spills" in w for w in wrong)
