"""Packed codes come back as they were."""

from __future__ import annotations

import pytest
import torch

from hf_kvcache.formats import packing
from hf_kvcache.formats.spec import PLANES

BITS = sorted(PLANES)


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 42, 64, 80, 96, 100, 128])
@pytest.mark.parametrize("bits", BITS)
def test_round_trip_is_exact(bits: int, length: int, dim: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 2, 5, length), dtype=torch.uint8).transpose(-1, dim)
    arrays = packing.pack(codes, bits, dim)
    assert [array.shape[dim] for array in arrays] == [-(-length * width // 8) for width in PLANES[bits]]
    assert torch.equal(packing.unpack(arrays, bits, dim, length), codes)


@pytest.mark.parametrize("bits", [b for b in BITS if b < 8])
def test_every_code_survives_in_every_place(bits: int) -> None:
    for code in range(2**bits):
        for place in range(11):
            codes = torch.full((11,), 2**bits - 1 - code, dtype=torch.uint8)
            codes[place] = code
            assert torch.equal(packing.unpack(packing.pack(codes, bits, 0), bits, 0, 11), codes)


def test_the_layout_is_planar() -> None:
    codes = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    assert packing.pack(codes, 4, 0)[0].tolist() == [1 | 3 << 4, 2 | 4 << 4]
    assert packing.pack(codes & 3, 2, 0)[0].tolist() == [1 | 2 << 2 | 3 << 4 | 0 << 6]
    low, high = packing.pack(torch.tensor([5, 2, 7, 4], dtype=torch.uint8), 3, 0)
    assert low.tolist() == [1 | 2 << 2 | 3 << 4 | 0 << 6]
    assert high.tolist() == [1 | 0 << 1 | 1 << 2 | 1 << 3]


def test_codes_past_the_end_are_zero() -> None:
    packed = packing.pack(torch.full((5,), 15, dtype=torch.uint8), 4, 0)[0]
    assert packed.tolist() == [255, 255, 15]
