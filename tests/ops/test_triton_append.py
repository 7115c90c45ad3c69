"""The append kernel writes the bytes that the codecs write (see test_triton_decode.py for how to run it)."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in Triton's interpreter: set TRITON_INTERPRET=1", allow_module_level=True)

from hf_kvcache.formats import pages as codec
from hf_kvcache.formats.spec import SideSpec
from hf_kvcache.ops.triton import append_why_not
from hf_kvcache.ops.triton.run import append
from tests.ops import interpreter
from tests.ops.triton_views import E5M2, EXACT, FP8, INT8, INT8_ROTATED, INT8_ZERO, Case, low

SIDES = {
    "exact": (EXACT, EXACT),
    "fp8": (FP8, FP8),
    "fp8_e5m2": (E5M2, E5M2),
    "int8": (INT8_ROTATED, INT8),
    "int8-zero": (INT8_ZERO, INT8_ZERO),
    "int4": (low(4), low(4, rotate=True)),
    "int3": (low(3), low(3)),
    "int2": (low(2), low(2)),
    "kivi4": (low(4, "channel", 32), low(4, "token", 32)),
    "rotated2": (low(2, "channel", rotate=True), low(2, rotate=True)),
    "value-channels": (low(4), low(4, "channel")),
    "clipped": (dataclasses.replace(low(2, "channel", 32), clip=0.9), dataclasses.replace(low(3), clip=0.75)),
}
AWKWARD = {
    "D80-rotated": Case(INT8_ROTATED, FP8, dim=80, heads=1),
    "D96": Case(FP8, INT8_ROTATED, dim=96, heads=1),
    "D64-V128": Case(INT8_ROTATED, low(4), dim=64, value_dim=128, heads=1, residual=8),
    "page-16": Case(FP8, FP8, page=16),
}


def inputs(case: Case, rows: int, count: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[count, H, rows, D]` with every kind of group: normal, zero, constant, one-hot, huge, tiny."""
    g = torch.Generator().manual_seed(0)
    out = []
    for dim in (case.layout.key_dim, case.layout.value_dim):
        x = torch.randn(count, case.heads, rows, dim, generator=g)
        x[0, 0, 0] = 0
        x[1, 0, 0] = 1.5
        x[2, 0, 0] = torch.nn.functional.one_hot(torch.tensor(5), dim)
        x[0, 0, -1] *= 1e3
        x[1, 0, -1] *= 1e-6
        x[2, 0, :, 3] = -2.0
        x[2, 0, 1] = float("inf")
        x[2, 0, 2, ::2] = -1e6
        out.append(x.to(case.dtype))
    return out[0], out[1]


def expected(case: Case, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The pages that the codecs write; bytes between fields stay 0xFF."""
    layout = case.layout
    pages = torch.full((len(keys), layout.page_bytes), 0xFF, dtype=torch.uint8)
    for name, x in (("k", keys), ("v", values)):
        for field, array in codec.encode(x, name, layout).items():  # type: ignore[arg-type]
            codec.field_view(pages, layout.fields[field]).copy_(array)
    return pages


def check(case: Case) -> None:
    """Whole pages: every byte."""
    assert append_why_not(case.layout) is None
    keys, values = inputs(case, case.page)
    got = torch.full((len(keys), case.layout.page_bytes), 0xFF, dtype=torch.uint8)
    where = got.data_ptr() + torch.arange(len(keys)) * case.layout.page_bytes
    with interpreter.readable(got):
        append(case.layout, keys, values, where)
    assert torch.equal(got, expected(case, keys, values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SIDES)
def test_pages(name: str, dtype: torch.dtype) -> None:
    """Each kind of side, as keys and as values."""
    key, value = SIDES[name]
    check(Case(key, value, residual=0 if key.direct and value.direct else 8, dtype=dtype))


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_shapes(name: str) -> None:
    """Head dims that are no power of two, small pages, keys and values of different size."""
    check(AWKWARD[name])


@pytest.mark.parametrize("sides", [(EXACT, EXACT), (FP8, FP8), (INT8_ROTATED, INT8)], ids=["exact", "fp8", "int8"])
def test_tokens(sides: tuple[SideSpec, SideSpec]) -> None:
    """One token at a time into a direct format: its own slot, and no byte beside it."""
    case = Case(*sides)
    keys, values = inputs(case, case.page)
    got = torch.full((len(keys), case.layout.page_bytes), 0xFF, dtype=torch.uint8)
    where = got.data_ptr() + torch.arange(len(keys)) * case.layout.page_bytes
    used = [0, 5, 63]
    with interpreter.readable(got):
        for slot in used:
            slots = torch.full((len(keys),), slot, dtype=torch.int32)
            append(case.layout, keys[:, :, slot : slot + 1], values[:, :, slot : slot + 1], where, slots)
    want = expected(case, keys, values)
    blank = torch.full_like(want, 0xFF)
    for field in case.layout.fields.values():
        axis = 2 if field.name == "k_codes" else 3
        target = codec.field_view(blank, field)
        target.index_copy_(
            axis, torch.tensor(used), codec.field_view(want, field).index_select(axis, torch.tensor(used))
        )
    assert torch.equal(got, blank)


def test_why_not() -> None:
    """Packed codes of a head dim that is no power of two are refused in words."""
    assert "power of two" in (append_why_not(Case(low(4), low(4), dim=80, residual=8).layout) or "")
