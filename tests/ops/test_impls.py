"""Every implementation that can run here against the float64 answer, over all formats and cases."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hf_kvcache.errors import ImplError
from hf_kvcache.ops import api, decoding, reference
from tests.grids import FORMAT_NAMES, LOSSY, thinned
from tests.ops.cases import CASES, Case, assert_right, call_of

RUNNABLE = [name for name, report in api.impl_report("cpu").items() if report == "available" and name != "reference"]


@pytest.mark.parametrize(("fmt", "case"), thinned(FORMAT_NAMES, CASES))
@pytest.mark.parametrize("impl", RUNNABLE)
def test_against_float64(impl: str, fmt: str, case: str) -> None:
    call = call_of(fmt, CASES[case])
    reason = api._load(impl).why_not(call)
    if reason is not None:
        pytest.skip(reason)
    assert_right(api.attend(call, impl), call)


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_auto_serves_what_it_is_given(fmt: str) -> None:
    for case in ("ragged", "everything", "window, five queries", "bfloat16"):
        call = call_of(fmt, CASES[case])
        assert_right(api.attend(call), call)


@pytest.mark.parametrize(("fmt", "case"), thinned(FORMAT_NAMES, CASES))
def test_decoding_equals_the_reference(fmt: str, case: str) -> None:
    view = call_of(fmt, CASES[case]).view
    for side, expected in zip("kv", reference.decode(view), strict=True):
        assert torch.equal(decoding.decode(view, side, torch.float32), expected)


@pytest.mark.parametrize("scratch", [1, 3000, 20000])
@pytest.mark.parametrize(
    "case",
    [
        "ragged",
        "seventeen queries",
        "everything",
        "window",
        "sinks before a window",
        "sinks before a window, ring",
        "ring, five queries",
        "float mask",
    ],
)
def test_short_runs_change_nothing(case: str, scratch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_kvcache.ops import runs

    monkeypatch.setattr(runs, "SCRATCH", scratch)
    for fmt in ("exact", *LOSSY[::3]):
        call = call_of(fmt, CASES[case])
        assert_right(api.attend(call, "torch"), call)


@pytest.mark.parametrize("impl", RUNNABLE)
@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_a_loud_neighbour_changes_no_bit(fmt: str, impl: str) -> None:
    case = Case(lengths=(60, 60), groups=2, residual=4)
    outs = []
    for factor in (1.0, 100.0, float("nan")):
        call = call_of(fmt, case)
        view = call.view
        slabs = tuple(slab.clone() for slab in view.slabs)
        loud = int(view.table[1, 0])
        if factor != 1.0:
            for f in view.layout.fields.values():
                for slab in slabs[:1]:
                    slab[loud, f.offset : f.offset + f.nbytes] = 0xFF if factor != factor else 0x40
        addresses = torch.cat(
            [slab.data_ptr() + torch.arange(len(slab)) * view.layout.page_bytes for slab in slabs]
        ).to(torch.int64)
        call = dataclasses.replace(call, view=dataclasses.replace(view, slabs=slabs, addresses=addresses))
        if api._load(impl).why_not(call) is not None:
            pytest.skip(api._load(impl).why_not(call))
        outs.append(api.attend(call, impl)[0])
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_an_unknown_device_or_impl_says_why() -> None:
    call = call_of("exact", Case())
    with pytest.raises(ImplError, match="impl='triton' cannot serve this call: needs a GPU; the cache is on cpu"):
        api.attend(call, "triton")
    report = api.impl_report("cuda")
    assert report["numba"] == "needs the CPU; the cache is on cuda"
    assert set(report) == set(api.IMPLS)
