"""Views of random bytes, of any format and size: what the kernel benchmarks attend to."""

from __future__ import annotations

import torch

from hf_kvcache.formats.spec import FORMATS, FormatSpec, PageLayout, SideSpec
from hf_kvcache.ops.view import KVView

def _low(bits: int, per: str = "token", group: int | None = None, rotate: bool = False) -> SideSpec:
    return SideSpec("int", bits, per, group, symmetric=False, rotate=rotate)  # type: ignore[arg-type]


def _ringed(name: str, key: SideSpec, value: SideSpec) -> FormatSpec:
    return FormatSpec(name, key, value, residual=32, sinks=4)


# One of each kind of kernel, whatever formats the library names.
SPECS: dict[str, FormatSpec] = {
    **{name: FORMATS[name] for name in ("exact", "fp8", "fp8_e5m2", "int8")},
    "int4": _ringed("int4", _low(4), _low(4)),
    "int3": _ringed("int3", _low(3), _low(3)),
    "int2": _ringed("int2", _low(2), _low(2)),
    "int4-channel": _ringed("int4-channel", _low(4, "channel", rotate=True), _low(4, rotate=True)),
    "int2-channel": _ringed("int2-channel", _low(2, "channel", rotate=True), _low(2, rotate=True)),
    "kivi4": _ringed("kivi4", _low(4, "channel", 32), _low(4, "token", 32)),
    "kivi2": _ringed("kivi2", _low(2, "channel", 32), _low(2, "token", 32)),
    "k8v4": _ringed("k8v4", SideSpec("int", 8, rotate=True), _low(4, rotate=True)),
}


def empty_view(
    spec: FormatSpec, heads: int, dim: int, dtype: torch.dtype, batch: int = 1, tokens: int = 1024, value_dim: int | None = None
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
        exact |= {f"sink_{s}": torch.empty(batch, heads, spec.sinks, d, dtype=dtype) for s, d in (("keys", dim), ("values", layout.value_dim))}
    if not spec.direct:
        capacity = -(-(spec.residual + 2 * P) // P) * P
        exact |= {f"ring_{s}": torch.empty(batch, heads, capacity, d, dtype=dtype) for s, d in (("keys", dim), ("values", layout.value_dim))}
        exact |= {f"new_{s}": torch.empty(batch, heads, 1, d, dtype=dtype) for s, d in (("keys", dim), ("values", layout.value_dim))}
    return KVView(
        layout, (slab,), torch.zeros(pages, dtype=torch.int64), torch.zeros(batch, pages, dtype=torch.int32),
        torch.zeros(batch, dtype=torch.int32), full, full, tokens, tokens + (0 if spec.direct else 1), **exact,
    )  # fmt: skip
