"""Views made by hand for kernel tests: every byte that no query may read is poison."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvcache.formats import pages as codec
from hf_kvcache.formats.spec import FormatSpec, PageLayout, SideSpec
from hf_kvcache.ops.view import KVView

POISON = 0xFF  # NaN in float16, bfloat16, float32 and both fp8 encodings; the largest code in integers
BOGUS = 2**30  # a page id far past the pool

EXACT = SideSpec("exact", 16)
FP8 = SideSpec("fp8_e4m3", 8)
E5M2 = SideSpec("fp8_e5m2", 8)
INT8 = SideSpec("int", 8)
INT8_ROTATED = SideSpec("int", 8, rotate=True)
INT8_ZERO = SideSpec("int", 8, symmetric=False)


def low(bits: int, per: str = "token", group: int | None = None, rotate: bool = False) -> SideSpec:
    """An integer side with zero points."""
    return SideSpec("int", bits, per, group, symmetric=False, rotate=rotate)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    """One view and the queries on it. lengths: real tokens in the store, a row each; starts: left padding."""

    key: SideSpec
    value: SideSpec
    lengths: tuple[int, ...] = (100, 37)
    heads: int = 2
    group: int = 4
    dim: int = 64
    value_dim: int | None = None
    page: int = 64
    queries: int = 1
    new: int = 0
    sinks: int = 0
    residual: int = 0
    window: int | None = None
    dtype: torch.dtype = torch.float16
    spread: float = 1.0

    @property
    def layout(self) -> PageLayout:
        """The layout of the view's pages."""
        spec = FormatSpec("test", self.key, self.value, self.residual, self.sinks, self.page)
        name = str(self.dtype).removeprefix("torch.")
        value_dim = self.value_dim or self.dim
        return PageLayout(spec, self.heads, self.dim, value_dim, self.page, name, self.dtype.itemsize, True)


def make(case: Case, seed: int = 0) -> tuple[KVView, torch.Tensor]:
    """The view of a case, and a query `[B, HQ, Q, D_k]`."""
    g = torch.Generator().manual_seed(seed)
    layout, P, B, H = case.layout, case.page, len(case.lengths), case.heads
    direct = layout.spec.direct

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * case.spread

    sealed = [n if direct else max(0, n - case.residual) // P * P for n in case.lengths]
    most = max(-(-n // P) for n in sealed)
    count = B * most + 3
    keys, values = (normal(count, H, P, d) for d in (layout.key_dim, layout.value_dim))
    keys[..., ::8] *= 4  # outlier channels
    pages = torch.full((count, layout.page_bytes), POISON, dtype=torch.uint8)
    fields = {name: codec.field_view(pages, f) for name, f in layout.fields.items()}
    for side, x in (("k", keys.to(case.dtype)), ("v", values.to(case.dtype))):
        for name, array in codec.encode(x, side, layout).items():
            fields[name].copy_(array)
    longest = max(case.lengths)
    offset = 0
    if case.window is not None and not case.sinks:
        offset = max(0, longest + case.new - case.window - case.queries)
    order = torch.randperm(count, generator=g)
    table = torch.full((B, most + 2), BOGUS, dtype=torch.int32)
    for b, n in enumerate(sealed):
        used = -(-n // P)
        table[b, :used] = order[b * most : b * most + used]
        table[b, : max(0, offset - (longest - n)) // P] = BOGUS  # pages that the window has passed
        if n % P:
            poison_slots(layout, fields, int(table[b, used - 1]), n % P)
    for page in order[B * most :]:
        pages[page] = POISON
    half = count // 2
    slabs = (pages[:half].clone(), pages[half:].clone())
    addresses = torch.cat([s.data_ptr() + torch.arange(len(s)) * layout.page_bytes for s in slabs])
    capacity = -(-(case.residual + 2 * P) // P) * P

    def exact(n: int, d: int) -> torch.Tensor:
        return normal(B, H, n, d).to(case.dtype)

    extra: dict[str, torch.Tensor] = {}
    for name, d in (("keys", layout.key_dim), ("values", layout.value_dim)):
        if case.sinks:
            extra[f"sink_{name}"] = exact(case.sinks, d)
        if not direct:
            ring = torch.full((B, H, capacity, d), float("nan"), dtype=case.dtype)
            for b, (n, s) in enumerate(zip(case.lengths, sealed, strict=True)):
                slots = torch.arange(s, n) % capacity
                ring[b][:, slots] = exact(n - s, d)[b]
            extra[f"ring_{name}"] = ring
        if case.new:
            # [B, T, H, D] memory, as projections leave it
            extra[f"new_{name}"] = exact(case.new, d).transpose(1, 2).contiguous().transpose(1, 2)
    view = KVView(
        layout=layout,
        slabs=slabs,
        addresses=addresses,
        table=table,
        starts=torch.tensor([longest - n for n in case.lengths], dtype=torch.int32),
        lengths=torch.tensor(case.lengths, dtype=torch.int32),
        sealed=torch.tensor(sealed, dtype=torch.int32),
        max_length=longest,
        columns=longest + case.new - offset,
        offset=offset,
        window=case.window,
        **extra,
    )
    query = normal(B, case.queries, H * case.group, layout.key_dim).to(case.dtype).transpose(1, 2)
    return view, query


def poison_slots(layout: PageLayout, fields: dict[str, torch.Tensor], page: int, used: int) -> None:
    """Poison the slots from `used` on of one page of a direct format."""
    for name, field in fields.items():
        raw = field[page].view(torch.uint8) if field.dtype != torch.uint8 else field[page]
        size = field.element_size()
        if name == "k_codes":
            raw[:, used:] = POISON
        else:  # value codes, and scales of both sides: tokens are the last axis
            raw[..., used * size :] = POISON
