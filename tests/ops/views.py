"""Views made by hand for tests of attention: random tokens in pages, sinks, ring and call, NaN everywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_kvcache.formats import pages as codec
from hf_kvcache.formats.spec import FormatSpec, PageLayout
from hf_kvcache.ops.view import KVView

POISON = 0xFF  # NaN in every float dtype


@dataclass(frozen=True)
class Shape:
    """What a test view is made of.

    lengths: stored real tokens of each row. new: tokens of the call itself, as many as its queries under a window.
    """

    lengths: Sequence[int]
    heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    page: int = 32
    sinks: int = 0
    residual: int = 0
    new: int = 0
    window: int | None = None
    dtype: torch.dtype = torch.float32
    spread: float = 1.0  # of the values


def make_view(spec: FormatSpec, shape: Shape, seed: int = 0) -> KVView:
    """A view of `shape` in `spec`'s format. Every byte that no token owns is poison, and so are bogus table entries."""
    gen = torch.Generator().manual_seed(seed)
    H, P, D_k, D_v, B = shape.heads, shape.page, shape.key_dim, shape.value_dim, len(shape.lengths)
    name = str(shape.dtype).removeprefix("torch.")
    layout = PageLayout(spec, H, D_k, D_v, P, name, shape.dtype.itemsize, transposed=False)
    longest = max(shape.lengths)
    x = {
        "k": torch.randn(B, H, longest, D_k, generator=gen) * shape.spread,
        "v": torch.randn(B, H, longest, D_v, generator=gen) * shape.spread,
    }
    x["k"][..., :2] *= 4  # channels that stick out, as in real keys
    x = {side: t.to(shape.dtype) for side, t in x.items()}
    lengths = torch.tensor(shape.lengths, dtype=torch.int32)
    direct = spec.direct and shape.residual == 0
    sealed = lengths.clone() if direct else (lengths - shape.residual).clamp(min=0) // P * P
    count = -(-longest // P) + 1
    slab = torch.full((B * count + 1, layout.page_bytes), POISON, dtype=torch.uint8)
    order = torch.randperm(B * count, generator=gen)
    table = torch.full((B, count), 2**30, dtype=torch.int32)
    for b in range(B):
        for index in range(-(-int(sealed[b]) // P)):
            page = int(order[b * count + index])
            table[b, index] = page
            _write(slab[page : page + 1], layout, {s: t[b : b + 1] for s, t in x.items()}, index, int(sealed[b]))
    cut = len(slab) // 3
    slabs = (slab[:cut].clone(), slab[cut:].clone()) if cut else (slab,)
    addresses = torch.cat([s.data_ptr() + torch.arange(len(s)) * layout.page_bytes for s in slabs])
    exact: dict[str, torch.Tensor | None] = dict.fromkeys(
        ["sink_keys", "sink_values", "ring_keys", "ring_values", "new_keys", "new_values"]
    )
    for side, sides in (("k", "keys"), ("v", "values")):
        if not direct:
            C = P * max(1, -(-int((lengths - sealed).max()) // P))
            ring = torch.full((B, H, C, x[side].shape[3]), torch.nan, dtype=shape.dtype)
            for b in range(B):
                t = torch.arange(int(sealed[b]), int(lengths[b]))
                ring[b, :, t % C] = x[side][b, :, t]
            exact[f"ring_{sides}"] = ring
        if shape.sinks:
            sinks = torch.full((B, H, shape.sinks, x[side].shape[3]), torch.nan, dtype=shape.dtype)
            for b in range(B):
                n = min(shape.sinks, int(lengths[b]))
                sinks[b, :, :n] = x[side][b, :, :n]
            exact[f"sink_{sides}"] = sinks
        if shape.new:
            new = torch.randn(B, shape.new, H, x[side].shape[3], generator=gen) * shape.spread
            exact[f"new_{sides}"] = new.to(shape.dtype).transpose(1, 2)
    starts = longest - lengths
    offset = 0 if shape.window is None else max(0, longest - shape.window + 1 - shape.sinks)
    return KVView(
        layout, slabs, addresses, table, starts.to(torch.int32), lengths, sealed, longest,
        columns=longest + shape.new - offset, offset=offset, window=shape.window, **exact,
    )  # fmt: skip


def _write(page: torch.Tensor, layout: PageLayout, x: dict[str, torch.Tensor], index: int, end: int) -> None:
    """Encode tokens `index * P ..` of one row into a page; slots at or past `end` keep their poison."""
    P = layout.page_size
    used = min(P, end - index * P)
    for side, tokens in x.items():
        spec = layout.spec.key if side == "k" else layout.spec.value
        tile = tokens[:, :, index * P : index * P + used]
        tile = torch.cat((tile, tile[:, :, -1:].expand(-1, -1, P - used, -1)), dim=2)
        for name, values in codec.encode(tile, side, layout).items():
            field = codec.field_view(page, layout.fields[name])
            if used == P:
                field[:] = values
            elif "_codes" in name and side == "v":
                field[..., :used, :] = values[..., :used, :]
            else:
                assert spec.per == "token" or not spec.scaled, "pages with scales per channel are whole"
                field[..., :used] = values[..., :used]
