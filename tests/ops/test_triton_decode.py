"""The decode kernels in Triton's interpreter against float64, over formats and awkward shapes.

Run on their own, for the variable must be set before triton is first imported:

    TRITON_INTERPRET=1 pytest tests/ops -k triton
"""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in Triton's interpreter: set TRITON_INTERPRET=1", allow_module_level=True)

from hf_kvcache.formats.spec import FORMATS
from hf_kvcache.ops import reference
from hf_kvcache.ops.api import AttendCall
from hf_kvcache.ops.triton import launch, why_not
from hf_kvcache.ops.triton.run import decode
from tests.ops import interpreter
from tests.ops.triton_views import E5M2, EXACT, FP8, INT8, INT8_ZERO, Case, low, make

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
RINGED = {"lengths": (150, 37), "residual": 20, "sinks": 4, "new": 1}


def exact_and_tolerance(call: AttendCall) -> tuple[torch.Tensor, float]:
    """The answer in float64, and how far from it a kernel may be.

    That is twice the error of plain attention in the model's dtype on the same decoded bytes, and one unit in the
    last place of the largest output, for storing it.
    """
    query = call.query
    keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in reference.decode(call.view))
    seen = reference.visible(call)

    def attention(dtype: torch.dtype, softmax: torch.dtype) -> torch.Tensor:
        q, k, v = (x.to(dtype) for x in (query, keys, values))
        scores = (q @ k.transpose(-1, -2)) * call.scale
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        scores = torch.where(seen, scores.to(softmax), -torch.inf)
        if call.sinks is not None:
            extra = call.sinks.to(softmax).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, extra), -1)
        weights = torch.nan_to_num(scores.softmax(-1))[..., : k.shape[2]]
        return (weights.to(dtype) @ v).double()

    exact = attention(torch.float64, torch.float64)
    low_precision = attention(query.dtype, torch.float32)
    error = float((low_precision - exact).abs().max())
    return exact, 2 * error + torch.finfo(query.dtype).eps * float(exact.abs().max())


def check(case: Case, chip: str = "interpreter", **options: object) -> None:
    """Run one case as `chip` would, and compare."""
    view, query = make(case)
    call = AttendCall(query, view, case.dim**-0.5, **options)  # type: ignore[arg-type]
    assert why_not(call) is None
    with interpreter.readable(*view.slabs):
        out = decode(call, launch.CHIPS[chip])
    exact, tolerance = exact_and_tolerance(call)
    assert out.shape == exact.shape
    assert out.dtype == query.dtype
    error = float((out.double() - exact).abs().max())
    assert error <= tolerance, f"error {error:.2e}, tolerance {tolerance:.2e}"


SIDES = {
    **{name: (spec.key, spec.value) for name, spec in FORMATS.items()},
    "int8-plain": (INT8, INT8),
    "int8-zero": (INT8_ZERO, INT8_ZERO),
    "token4": (low(4), low(4)),
    "token3": (low(3), low(3)),
    "token2": (low(2), low(2)),
    "rotated4": (low(4, "channel", rotate=True), low(4, rotate=True)),
    "rotated2": (low(2, "channel", rotate=True), low(2, rotate=True)),
    "k4v2-page": (low(4, "channel"), low(2)),
    "exact-int4": (EXACT, low(4)),
    "token-groups": (low(4, "token", 16), low(2, "token", 16)),
    "value-channels": (low(4), low(4, "channel")),
}


@pytest.mark.parametrize("name", SIDES)
@pytest.mark.parametrize("chip", ["interpreter", "sm_80"], ids=["plain", "assembly"])
def test_every_format(name: str, chip: str) -> None:
    """Each format, as plain Triton and with NVIDIA's assembly; ring, sinks and a new token where it has them."""
    key, value = SIDES[name]
    more = {"lengths": (150, 37)} if key.direct and value.direct else RINGED
    check(Case(key, value, heads=1, **more), chip)  # type: ignore[arg-type]


SHAPES = {
    "one-token": Case(EXACT, EXACT, lengths=(1, 64)),
    "page-edges": Case(FP8, FP8, lengths=(128, 65)),
    "page-16": Case(EXACT, EXACT, page=16, lengths=(70, 16)),
    "page-128": Case(low(2), low(2), page=128, lengths=(300, 200), residual=16, new=1),
    "G1": Case(FP8, FP8, group=1),
    "G7": Case(INT8, INT8, group=7),
    "D80": Case(low(4, rotate=True), low(4, rotate=True), dim=80, **RINGED),
    "D96": Case(FP8, FP8, dim=96, heads=1),
    "D96-groups": Case(low(4, "channel"), low(4, "token", 32), dim=96, heads=1, **RINGED),
    "D128": Case(low(4), low(2), dim=128, heads=1, **RINGED),
    "D192-V128": Case(EXACT, EXACT, dim=192, value_dim=128, heads=1),
    "D256": Case(FP8, FP8, dim=256, heads=1, lengths=(90,)),
    "D64-V96": Case(low(4), low(4), dim=64, value_dim=96, heads=1, **RINGED),
    "Q3": Case(FP8, FP8, queries=3),
    "Q16-G8": Case(INT8, INT8, lengths=(70,), queries=16, group=8, heads=1),
    "Q5-new": Case(low(4), low(4), queries=5, lengths=(140, 70), residual=16, new=5),
    "Q2-new5": Case(low(4), low(4), queries=2, lengths=(140, 70), residual=16, new=5),
    "window": Case(FP8, FP8, window=70, lengths=(200, 300)),
    "window-Q4": Case(EXACT, EXACT, window=33, lengths=(200, 40), queries=4),
    "window-sinks": Case(low(4), low(4), window=90, lengths=(260, 30), residual=16, sinks=4, new=1),
    "only-ring": Case(low(4), low(4), lengths=(20, 3), residual=64, sinks=4, new=1),
    "only-sinks": Case(low(4), low(4), lengths=(2, 4), residual=64, sinks=4, new=2, queries=2),
    "prompt": Case(low(4), low(4), lengths=(0, 0), residual=64, new=20, queries=20, heads=1, group=2),
    "bf16": Case(EXACT, EXACT, dtype=BF16),
    "bf16-int4": Case(low(4, "channel", rotate=True), low(4, rotate=True), dtype=BF16, **RINGED),
    "fp32": Case(EXACT, EXACT, dtype=F32, heads=1),
    "fp32-int4": Case(low(4), low(4), dtype=F32, heads=1, **RINGED),
    "tiny-values": Case(E5M2, E5M2, spread=1e-3),
    "large-values": Case(FP8, INT8, spread=100.0),
}


@pytest.mark.parametrize("name", SHAPES)
def test_awkward_shapes(name: str) -> None:
    """Lengths, head dims, groups, windows, query counts and dtypes at their edges."""
    check(SHAPES[name])


@pytest.mark.parametrize("case", [Case(EXACT, EXACT), Case(low(4), low(4), **RINGED)], ids=["exact", "int4"])  # type: ignore[arg-type]
def test_softcap_and_sink_logits(case: Case) -> None:
    """Gemma's soft cap and gpt-oss's extra logit, together."""
    check(case, softcap=5.0, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0] * case.heads))


def test_many_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """More splits than there are tiles: the empty ones leave no trace."""
    plan = launch.plan
    monkeypatch.setattr(launch, "plan", lambda *a: dataclasses.replace(plan(*a), splits=5))
    check(Case(low(4), low(4), heads=1, lengths=(600, 40), residual=20, sinks=4, new=1))


def test_a_row_without_tokens_gives_zeros() -> None:
    """A query that stands in the left padding attends to nothing."""
    case = Case(EXACT, EXACT, lengths=(70, 2), queries=4, heads=1)
    view, query = make(case)
    with interpreter.readable(*view.slabs):
        out = decode(AttendCall(query, view, 0.125))
    assert torch.equal(out[1, :, :2], torch.zeros_like(out[1, :, :2]))


def test_addresses_beyond_32_bits() -> None:
    """Pages may lie more than 2**31 bytes apart, in one slab or in two."""
    case = Case(EXACT, EXACT, lengths=(100,), heads=1)
    view, query = make(case)
    far = torch.empty(2**32 + 2**20, dtype=torch.uint8)  # untouched memory costs nothing
    used = view.table[0, :2].long()
    places = torch.tensor([0, 2**32])
    for page, place in zip(used, places, strict=True):
        slab, row = (view.slabs[0], page) if page < len(view.slabs[0]) else (view.slabs[1], page - len(view.slabs[0]))
        far[place : place + view.layout.page_bytes] = slab[row]
    addresses = view.addresses.clone()
    addresses[used] = far.data_ptr() + places
    moved = dataclasses.replace(view, addresses=addresses)
    with interpreter.readable(*view.slabs, far):
        near, distant = (decode(AttendCall(query, v, 0.125)) for v in (view, moved))
    assert torch.equal(near, distant)


def test_reading_outside_is_seen() -> None:
    """The interpreter's bounds check works for memory that is reached by address."""
    view, query = make(Case(EXACT, EXACT, heads=1))
    with pytest.raises(Exception, match="out-of-bounds load"):
        decode(AttendCall(query, view, 0.125))


REFUSED = {
    "mask": ({}, {"mask": torch.ones(1, 1, 1, 100, dtype=torch.bool)}, "mask"),
    "page": ({"key": low(2), "value": low(2), "page": 32, "residual": 8}, {}, "page size of at least 64"),
    "head-dim": ({"key": low(2), "value": low(4), "dim": 32, "residual": 8}, {}, "head dim of at least 64"),
    "groups": ({"key": low(4), "value": low(4, "channel", 32), "residual": 8}, {}, "group=None"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_why_not(name: str) -> None:
    """What the kernels do not serve is refused in words."""
    fields, options, words = REFUSED[name]
    view, query = make(Case(**{"key": EXACT, "value": EXACT, **fields}))  # type: ignore[arg-type]
    assert words in (why_not(AttendCall(query, view, 1.0, **options)) or "")  # type: ignore[arg-type]
