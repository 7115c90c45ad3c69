"""Compiled encoding writes the very bytes that the codecs in `formats` write."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hf_kvcache.formats import pages as codec
from hf_kvcache.formats import steering
from hf_kvcache.formats.spec import FORMATS, FormatSpec, PageLayout, SideSpec
from hf_kvcache.memory.store import PageStore

pytest.importorskip("numba")
from hf_kvcache.ops.cpu import appending  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ODD = {
    "int8_groups": (SideSpec("int", 8, "token", 24), SideSpec("int", 8, "token", 16)),
    "channels": (SideSpec("int", 4, "channel", 8, symmetric=False), SideSpec("fp8_e4m3", 8, "channel")),
    "plain3": (SideSpec("int", 3, "token", 24, symmetric=False), SideSpec("int", 3, "token", symmetric=False)),
}
SPECS = {**FORMATS, **{name: FormatSpec(name, *sides) for name, sides in ODD.items()}}
DIRECT = [name for name, spec in SPECS.items() if spec.direct]
STEERED = [name for name, spec in SPECS.items() if steering.serves(spec.key)]
SHAPES = [(2, 64, 64, 32), (3, 80, 36, 16)]  # heads, key dim, value dim, page


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """`[B, H, T, D]` numbers of many sizes, some of them zero, tiny, equal or infinite."""
    x = torch.randn(shape) * torch.exp(4 * torch.randn(shape[:-1]))[..., None]
    x[0, :, 0] = 0
    x[-1, 0, 1] = 3.25
    x[0, 0, 2, :4] = torch.tensor([1e-7, -1e-7, 1e-30, -0.0])
    x[-1, -1, 3, 1] = torch.inf
    x[-1, -1, 4, :8] = torch.linspace(-448, 448, 8)
    return x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)  # as a model's keys stand in memory


def stores(spec: FormatSpec, shape: tuple[int, int, int, int], dtype: torch.dtype, pages: int) -> list[PageStore]:
    """Two equal stores: one for the codecs, one for the compiled encoder."""
    H, D_k, D_v, P = shape
    name = str(dtype).removeprefix("torch.")
    layout = PageLayout(spec, H, D_k, D_v, P, name, dtype.itemsize, transposed=False)
    out = [PageStore(layout, torch.device("cpu")) for _ in range(2)]
    for store in out:
        store.grow(pages)
        store.slabs[0].fill_(0x55)
    return out


def assert_same_bytes(expected: PageStore, actual: PageStore) -> None:
    """Field by field, so that a failure says which."""
    for name, field in expected.layout.fields.items():
        raw = slice(field.offset, field.offset + field.nbytes)
        wrong = (expected.slabs[0][:, raw] != actual.slabs[0][:, raw]).sum()
        assert wrong == 0, f"{wrong} bytes of {name} differ"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", DIRECT)
def test_tokens(name: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    spec, (H, D_k, D_v, P) = SPECS[name], shape
    B, T = 2, P + 5
    k, v = (numbers(B, H, T, D, dtype=dtype) for D in (D_k, D_v))
    expected, actual = stores(spec, shape, dtype, 8)
    rows = np.repeat(np.arange(B), T)
    columns = np.tile(np.arange(T), B)
    pages = np.random.default_rng(0).permutation(8)[rows * 2 + columns // P]
    slots = columns % P
    for side, x, sided in (("k", k, spec.key), ("v", v, spec.value)):
        flat = x.transpose(1, 2).flatten(0, 1)
        if sided.scaled:
            codes, scale, _ = codec.quantize_tokens(flat.unsqueeze(2), sided)
            expected.write_tokens(pages, slots, side, codes.squeeze(2), scale.squeeze(3))  # type: ignore[arg-type]
        else:
            expected.write_tokens(pages, slots, side, flat, None)  # type: ignore[arg-type]
    appending.write_tokens(actual.layout, actual.addresses, (rows, columns, pages, slots), k, v)
    assert_same_bytes(expected, actual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "rank"), [*((name, 0) for name in SPECS), *((name, 2) for name in STEERED)])
def test_pages(name: str, rank: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Whole pages whose tokens come partly from the ring, wrapped around, and partly from the call."""
    spec, (H, D_k, D_v, P) = SPECS[name], shape
    steer = steering.prepare(3 * torch.randn(H, D_k, rank)) if rank else None
    B, T, C = 3, 7, 2 * P
    ring = tuple(numbers(B, H, C, D, dtype=dtype) for D in (D_k, D_v))
    k, v = (numbers(B, H, T, D, dtype=dtype) for D in (D_k, D_v))
    expected, actual = stores(spec, shape, dtype, 4)
    rows, pages = np.array([0, 2]), np.array([3, 1])
    sources = np.stack([(np.arange(P) + 3 * P // 2) % C, np.arange(C + T - P, C + T)])
    for side, held, x in (("k", ring[0], k), ("v", ring[1], v)):
        both = torch.cat((held, x), dim=2)
        tokens = torch.stack([both[row, :, at] for row, at in zip(rows, sources, strict=True)])
        expected.write_pages(pages, codec.encode(tokens, side, expected.layout, steer))  # type: ignore[arg-type]
    appending.write_pages(actual.layout, actual.addresses, (rows, sources, pages), k, v, ring, steer)  # type: ignore[arg-type]
    assert_same_bytes(expected, actual)


def test_every_float_becomes_the_same_fp8_code() -> None:
    """All magnitudes that fp8 knows, ties and subnormals among them: a token of scale 1 for each sixteen of them."""
    for name, top, step in (("fp8", 448.0, 2.0**-10), ("fp8_e5m2", 57344.0, 2.0**-17)):
        plain = FORMATS[name].replace(**{side: replace(getattr(FORMATS[name], side), rotate=False) for side in ("key", "value")})
        small = torch.arange(0, 200) * step
        large = torch.cat((torch.logspace(-6, 8, 4000, base=2.0), torch.linspace(0, 1, 999) * top))
        x = torch.cat((small, small + step / 64, large))
        x = torch.cat((x, -x))[: 15 * (2 * len(x) // 15)].view(1, -1, 1, 15)
        x = torch.cat((torch.full_like(x[..., :1], top), x.clamp(-top, top)), dim=-1).transpose(1, 2)
        expected, actual = stores(plain, (1, 16, 16, 16), torch.float32, x.shape[2] // 16 + 1)
        columns = np.arange(x.shape[2])
        codes, scale, _ = codec.quantize_tokens(x[0].transpose(0, 1).unsqueeze(1), plain.key)
        assert (scale == 1).all()
        codes, scale = codes.squeeze(1), scale.squeeze(3).squeeze(1)[:, None]
        for side in ("k", "v"):
            expected.write_tokens(columns // 16, columns % 16, side, codes, scale)  # type: ignore[arg-type]
        where = (np.zeros_like(columns), columns, columns // 16, columns % 16)
        appending.write_tokens(actual.layout, actual.addresses, where, x, x)
        assert_same_bytes(expected, actual)


def test_it_says_what_it_serves() -> None:
    layout = stores(FORMATS["int8"], SHAPES[0], torch.float32, 1)[0].layout
    assert appending.serves(layout)
    assert not appending.serves(PageLayout(FORMATS["int8"], 2, 64, 64, 32, "float32", 4, transposed=True))
