"""Low-bit integer codes: how near they come to the best scalar quantiser, and that packing loses nothing."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from hf_kvcache.errors import ConfigError
from hf_kvcache.formats import pages as codec
from hf_kvcache.formats.spec import FORMATS, FormatSpec, PageLayout, SideSpec

# Mean squared error of the best scalar quantiser of a standard normal value (Max 1960, Lloyd 1982), by bits. At 8 bits
# the high-resolution limit, sqrt(3) pi / 2 * 4^-8.
LEAST_ERROR = {2: 0.1175, 3: 0.03454, 4: 0.009497, 8: math.sqrt(3) * math.pi / 2 * 4.0**-8}
SIDES = {
    f"{name}-{which}": side
    for name, spec in FORMATS.items()
    for which, side in (("key", spec.key), ("value", spec.value))
    if side.kind == "int"
}


def round_trip(x: torch.Tensor, side: SideSpec) -> torch.Tensor:
    """`x` `[N, H, P, D]` through the bytes of pages, as keys."""
    layout = PageLayout(
        FormatSpec("test", side, side), x.shape[1], x.shape[3], x.shape[3], x.shape[2], "float32", 4, False
    )
    raw = torch.zeros(x.shape[0], layout.page_bytes, dtype=torch.uint8)
    for name, array in codec.encode(x, "k", layout).items():
        codec.field_view(raw, layout.fields[name]).copy_(array)
    return codec.decode(raw, "k", layout)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", SIDES)
def test_normal_values_come_back_within_1_3_of_the_best_error(name: str, dim: int) -> None:
    side = SIDES[name]
    x = torch.randn(8, 2, 64, dim, generator=torch.Generator().manual_seed(0))
    error = (round_trip(x, side) - x).pow(2).mean().sqrt().item()
    assert error <= 1.3 * math.sqrt(LEAST_ERROR[side.bits])


@pytest.mark.parametrize("bits", [2, 3])
def test_a_clipped_range_is_nearer_on_normal_values(bits: int) -> None:
    side = FORMATS[f"int{bits}"].value
    x = torch.randn(8, 2, 64, 64, generator=torch.Generator().manual_seed(0))
    whole = dataclasses.replace(side, clip=1.0)
    assert (round_trip(x, side) - x).pow(2).mean() < (round_trip(x, whole) - x).pow(2).mean()


@pytest.mark.parametrize("clip", [0.0, 0.4, 1.1, float("nan")])
def test_an_unusable_clip_is_refused(clip: float) -> None:
    with pytest.raises(ConfigError, match="clip"):
        dataclasses.replace(FORMATS["int2"].value, clip=clip)


def test_a_clip_needs_zero_points() -> None:
    with pytest.raises(ConfigError, match="symmetric=False"):
        SideSpec("int", 8, clip=0.9)


@pytest.mark.parametrize("tokens", [1, 7, 42])
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128])
@pytest.mark.parametrize("heads", [1, 3, 4])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_values_on_the_levels_come_back_exactly(bits: int, heads: int, dim: int, tokens: int) -> None:
    """Whole numbers from 0 to the highest code have scale 1 and zero 0: nothing is lost on the way through bytes."""
    top = 2**bits - 1
    codes = torch.randint(0, top + 1, (3, heads, tokens, dim), generator=torch.Generator().manual_seed(bits))
    codes[..., 0], codes[..., -1] = 0, top
    for transposed in (False, True):
        side = SideSpec("int", bits, "token", symmetric=False)
        layout = PageLayout(FormatSpec("test", side, side), heads, dim, dim, tokens, "float32", 4, transposed)
        raw = torch.zeros(3, layout.page_bytes, dtype=torch.uint8)
        for which in ("k", "v"):
            for name, array in codec.encode(codes.float(), which, layout).items():
                codec.field_view(raw, layout.fields[name]).copy_(array)
        for which in ("k", "v"):
            assert torch.equal(codec.decode(raw, which, layout), codes.float())
