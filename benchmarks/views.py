"""Views of random bytes, of any format and size: what the kernel benchmarks attend to."""

from __future__ import annotations

import torch

from hf_kvcache.formats.pages import field_view
from hf_kvcache.formats.spec import FORMATS, FormatSpec, PageLayout, SideSpec
from hf_kvcache.ops.view import KVView


def _low(bits: int, per: str = "token", group: int | None = None, rotate: bool = False) -> SideSpec:
    return SideSpec("int", bits, per, group, symmetric=False, rotate=rotate)  # type: ignore[arg-type]


def _ringed(name: str, key: SideSpec, value: SideSpec) -> FormatSpec:
    return FormatSpec(name, key, value, residual=32, sinks=4)


# The library's formats, and the cheapest kernels of low bits: one scale a token.
SPECS: dict[str, FormatSpec] = {
    **FORMATS,
    "token4": _ringed("token4", _low(4), _low(4)),
    "token2": _ringed("token2", _low(2), _low(2)),
}
LATENTS: dict[str, FormatSpec] = {
    f"mla-{name}": FormatSpec(f"mla-{name}", key, SideSpec("exact", 16))
    for name, key in (("exact", SideSpec("exact", 16)), ("fp8", SideSpec("fp8_e4m3", 8)), ("int8", SideSpec("int", 8)))
}


def empty_view(
    spec: FormatSpec,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    batch: int = 1,
    tokens: int = 1024,
    value_dim: int | None = None,
) -> KVView:
    """A view with tables and lengths but only as much memory as its addresses need: to compile, not to run."""
    name = str(dtype).removeprefix("torch.")
    P = spec.page_size
    layout = PageLayout(spec, heads, dim, value_dim or dim, P, name, dtype.itemsize, True)
    slab = torch.empty(1, layout.page_bytes, dtype=torch.uint8)
    pages = tokens // P
    full = torch.full((batch,), tokens, dtype=torch.int32)
    exact = {}
    if spec.sinks:
        exact |= {
            f"sink_{s}": torch.empty(batch, heads, spec.sinks, d, dtype=dtype)
            for s, d in (("keys", dim), ("values", layout.value_dim))
        }
    if not spec.direct:
        capacity = -(-(spec.residual + 2 * P) // P) * P
        exact |= {
            f"ring_{s}": torch.empty(batch, heads, capacity, d, dtype=dtype)
            for s, d in (("keys", dim), ("values", layout.value_dim))
        }
        exact |= {
            f"new_{s}": torch.empty(batch, heads, 1, d, dtype=dtype)
            for s, d in (("keys", dim), ("values", layout.value_dim))
        }
    return KVView(
        layout, (slab,), torch.zeros(pages, dtype=torch.int64), torch.zeros(batch, pages, dtype=torch.int32),
        torch.zeros(batch, dtype=torch.int32), full, full, tokens, tokens + (0 if spec.direct else 1), **exact,
    )  # fmt: skip


def filled_view(
    spec: FormatSpec,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    batch: int,
    tokens: int,
    device: str,
    value_dim: int | None = None,
) -> KVView:
    """A view of `tokens` random tokens a row, its pages in random order."""
    P = spec.page_size
    layout = PageLayout(spec, heads, dim, value_dim or dim, P, str(dtype).removeprefix("torch."), dtype.itemsize, True)
    stored = tokens if spec.direct else tokens - 1
    sealed = stored if spec.direct else max(0, stored - spec.residual) // P * P
    used = -(-sealed // P)
    pages = torch.randint(0, 256, (batch * used, layout.page_bytes), dtype=torch.uint8, device=device)
    for name, field in layout.fields.items():
        at = field_view(pages, field)
        side = spec.key if name[0] == "k" else spec.value
        if name.endswith("_scale"):
            at.fill_(0.02)
        elif name.endswith("_zero"):
            at.fill_(-0.1)
        elif side.kind == "exact":
            at.copy_(torch.randn(field.shape, device=device))  # the same numbers in every page
        elif side.kind.startswith("fp8"):
            at.bitwise_and_(0xF7 if side.kind == "fp8_e4m3" else 0xBF)  # no NaN, no infinity
    table = torch.randperm(batch * used, device=device).view(batch, used).int()
    exact: dict[str, torch.Tensor] = {}
    for part, d in (("keys", dim), ("values", layout.value_dim)):
        if spec.sinks:
            exact[f"sink_{part}"] = torch.randn(batch, heads, spec.sinks, d, dtype=dtype, device=device)
        if not spec.direct:
            capacity = -(-(spec.residual + 2 * P) // P) * P
            exact[f"ring_{part}"] = torch.randn(batch, heads, capacity, d, dtype=dtype, device=device)
            exact[f"new_{part}"] = torch.randn(batch, heads, 1, d, dtype=dtype, device=device)

    def each(n: int) -> torch.Tensor:
        return torch.full((batch,), n, dtype=torch.int32, device=device)

    addresses = pages.data_ptr() + torch.arange(batch * used, device=device) * layout.page_bytes
    return KVView(layout, (pages,), addresses, table, each(0), each(stored), each(sealed), stored, tokens, **exact)


def bytes_read(view: KVView) -> int:
    """Bytes that one attention call must read: whole pages, and the exact tokens beside them."""
    layout = view.layout
    size = view.table.numel() * (layout.field_bytes("codes") + layout.field_bytes("scales"))
    tail = int((view.lengths - view.sealed).sum()) + view.batch * (view.sinks + view.new_tokens)
    return size + tail * layout.heads * (layout.key_dim + layout.value_dim) * layout.itemsize
