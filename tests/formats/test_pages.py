"""Encoding and decoding pages: error within half a step element by element, for every format, side and shape."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hf_kvcache.formats import hadamard, scalar
from hf_kvcache.formats import pages as codec
from hf_kvcache.formats.spec import FORMATS, FormatSpec, PageLayout, SideSpec

P = 64
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def sides() -> dict[str, SideSpec]:
    """Every distinct side of every format, and each with the groups that a user may ask for."""
    out: dict[str, SideSpec] = {}
    for fmt in FORMATS.values():
        for side in (fmt.key, fmt.value):
            for group in (side.group, None, 32, 64):
                new = dataclasses.replace(side, group=group) if side.scaled else side
                rotated = "-rotated" if new.rotate else ""
                clipped = f"-clip{new.clip}" if new.clip < 1 else ""
                out[f"{new.kind}{new.bits}-{new.per}-g{new.group}{rotated}{clipped}"] = new
    return out


SIDES = sides()


def layout_of(side: SideSpec, dim: int, transposed: bool, dtype: torch.dtype = torch.float32) -> PageLayout:
    spec = FormatSpec("test", side, side)
    return PageLayout(spec, 2, dim, dim, P, str(dtype).removeprefix("torch."), dtype.itemsize, transposed)


def stored(x: torch.Tensor, layout: PageLayout, which: codec.Side) -> torch.Tensor:
    """Pages that hold `x` `[N, H, P, D]` on one side and garbage elsewhere."""
    raw = torch.full((x.shape[0], layout.page_bytes), 0xFF, dtype=torch.uint8)
    for name, array in codec.encode(x, which, layout).items():
        field = codec.field_view(raw, layout.fields[name])
        assert array.shape == field.shape
        assert array.dtype == field.dtype
        field.copy_(array)
    return raw


def half_step(x: torch.Tensor, raw: torch.Tensor, layout: PageLayout, which: codec.Side) -> torch.Tensor:
    """How far a decoded value may be from `x` (both in the basis that was encoded), from the scales that are stored."""
    side = layout.spec.key
    scale = spread(raw, layout, f"{which}_scale")
    if side.kind == "int":
        step, span = scale / 2, scale * (2**side.bits - 1)
    else:
        digits, least = (3, 2.0**-9) if side.kind == "fp8_e4m3" else (2, 2.0**-16)
        step = torch.maximum(x.abs() * 2.0 ** -(digits + 1), scale * least / 2)  # normal and subnormal codes
        span = torch.zeros_like(step)
    if side.clip < 1.0:  # a value past the levels gets the nearest of them
        low = spread(raw, layout, f"{which}_zero")
        step = step + (x - torch.minimum(torch.maximum(x, low), low + span)).abs()
    # Subtracting the zero, division, product and sum round once each, in float32, numbers up to |x| + span; a scale may
    # be too small for float32's normal numbers.
    return step + 4 * 2.0**-24 * (x.abs() + span) + 1e-37


def spread(raw: torch.Tensor, layout: PageLayout, name: str) -> torch.Tensor:
    """Stored scales or zeros, one for each value: `[N, H, P, D]`."""
    side = layout.spec.key
    axis = layout.key_dim if side.per == "token" else P
    x = codec.field_view(raw, layout.fields[name]).float()
    x = x.repeat_interleave(min(side.group or axis, axis), dim=2)[:, :, :axis]
    return x.transpose(2, 3) if side.per == "token" else x


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
@pytest.mark.parametrize("name", SIDES)
def test_round_trip_within_half_a_step(name: str, dim: int, transposed: bool) -> None:
    side = SIDES[name]
    for which in ("k", "v"):
        layout = layout_of(side, dim, transposed)
        x = torch.randn(3, 2, P, dim) * torch.logspace(-2, 2, dim)
        raw = stored(x, layout, which)
        if side.kind == "exact":
            assert torch.equal(codec.decode(raw, which, layout), x)
            continue
        inside = hadamard.rotate(x) if side.rotate else x
        out = codec.decode(raw, which, layout, unrotate=False)
        assert ((out - inside).abs() <= half_step(inside, raw, layout, which)).all()
        back = codec.decode(raw, which, layout)
        expected = hadamard.rotate(out) if side.rotate else out
        assert torch.equal(back, expected)


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_exact_pages_keep_the_bits(dtype: torch.dtype, transposed: bool) -> None:
    x = torch.randn(2, 2, P, 24).to(dtype)
    layout = layout_of(FORMATS["exact"].key, 24, transposed, dtype)
    for which in ("k", "v"):
        assert torch.equal(codec.decode(stored(x, layout, which), which, layout), x)


def special_pages(dim: int) -> dict[str, torch.Tensor]:
    one_hot = torch.zeros(1, 2, P, dim)
    one_hot[:, :, 5, 7] = 3.0
    lone = torch.zeros(1, 2, P, dim)
    lone[..., 3] = 1e4
    mixed = torch.randn(1, 2, P, dim)
    mixed[0, 0] = 0.0
    return {
        "zero": torch.zeros(1, 2, P, dim),
        "constant": torch.full((1, 2, P, dim), 0.7),
        "minus": torch.full((1, 2, P, dim), -3.0),
        "one hot": one_hot,
        "loud channel": lone,
        "tiny": torch.randn(1, 2, P, dim) * 1e-30,
        "denormal": torch.randn(1, 2, P, dim) * 1e-42,
        "huge": torch.randn(1, 2, P, dim) * 1e4,
        "half zero": mixed,
    }


@pytest.mark.parametrize("name", [name for name in SIDES if SIDES[name].scaled])
@pytest.mark.parametrize("case", special_pages(64))
def test_special_groups_stay_finite_and_within_half_a_step(name: str, case: str) -> None:
    side, x = SIDES[name], special_pages(64)[case]
    layout = layout_of(side, 64, False)
    raw = stored(x, layout, "k")
    inside = hadamard.rotate(x) if side.rotate else x
    out = codec.decode(raw, "k", layout, unrotate=False)
    assert torch.isfinite(out).all()
    assert ((out - inside).abs() <= half_step(inside, raw, layout, "k")).all()
    if case == "zero":
        assert (codec.decode(raw, "k", layout) == 0).all()


@pytest.mark.parametrize("value", [500.0, 1e4, 7e4, 3e38, float("inf")])
@pytest.mark.parametrize("name", [name for name in SIDES if SIDES[name].scaled])
def test_encoding_saturates(name: str, value: float) -> None:
    side = SIDES[name]
    layout = layout_of(side, 64, False)
    for sign in (1.0, -1.0):
        x = torch.randn(1, 2, P, 64)
        x[:, :, 9, 11] = sign * value
        out = codec.decode(stored(x, layout, "k"), "k", layout)
        assert torch.isfinite(out).all()
        if side.symmetric and not side.rotate and value < 1e30:
            assert torch.allclose(out[:, :, 9, 11], x[:, :, 9, 11], rtol=0.13)


def test_a_scale_never_leaves_its_largest_value_out_of_range() -> None:
    x = torch.rand(4096) * torch.logspace(-30, 30, 4096)
    up = scalar.ceil_bfloat16(x).float()
    assert (up >= x).all()
    assert (up <= x * (1 + 2.0**-7)).all()


def test_a_zero_point_never_lies_above_its_smallest_value() -> None:
    x = torch.cat(
        [torch.randn(2048) * torch.logspace(-9, 4, 2048), torch.tensor([0.0, -0.0, 1e-9, -1e-9, 65504.0, -65504.0])]
    )
    down = scalar.floor_float16(x).float()
    assert (down <= x).all()
    assert (x - down <= x.abs() * 2.0**-10 + 2.0**-24).all()


@pytest.mark.parametrize("name", [name for name in SIDES if SIDES[name].scaled])
def test_codes_do_not_depend_on_how_pages_are_batched(name: str) -> None:
    side = SIDES[name]
    x = torch.randn(5, 3, P, 96)
    x[2] *= 100
    whole = codec.quantize_tokens(x, side)
    for n in range(5):
        for all_, one in zip(whole, codec.quantize_tokens(x[n : n + 1], side), strict=True):
            assert (all_ is None) == (one is None)
            assert all_ is None or torch.equal(all_[n : n + 1], one)
    if side.per == "token":
        pieces = [codec.quantize_tokens(x[:, :, t : t + 1], side) for t in range(P)]
        assert torch.equal(torch.cat([codes for codes, _, _ in pieces], dim=2), whole[0])
        assert torch.equal(torch.cat([scale for _, scale, _ in pieces], dim=3), whole[1])


@pytest.mark.parametrize("name", [name for name in SIDES if SIDES[name].scaled])
def test_the_scale_follows_the_data(name: str) -> None:
    side = SIDES[name]
    x = torch.randn(1, 2, P, 64)
    codes, scale, _ = codec.quantize_tokens(x, side)
    codes100, scale64, _ = codec.quantize_tokens(x * 64, side)
    if side.symmetric:  # a power of two moves every exponent alike
        assert torch.equal(codes, codes100)
        assert torch.equal(scale.float() * 64, scale64.float())
    else:
        assert torch.allclose(scale.float() * 64, scale64.float(), rtol=0.02)


@pytest.mark.parametrize("sizes", [(7,), (3, 4), (1, 1, 5)])
def test_gather_takes_pages_in_any_order(sizes: tuple[int, ...]) -> None:
    import numpy as np

    data = torch.arange(7 * 64, dtype=torch.int32).to(torch.uint8).view(7, 64)
    slabs = tuple(torch.split(data, list(sizes)))
    for ids in ([0], [6], [0, 1, 2], [2, 1, 0], [6, 0, 3, 3, 4], list(range(7)), [5, 6, 0, 1]):
        assert torch.equal(codec.gather(slabs, np.array(ids)), data[ids])
    assert codec.gather(slabs[:1], np.array([0])).data_ptr() == slabs[0].data_ptr()
