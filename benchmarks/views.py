"""Views of random bytes, of any format and size: what the kernel benchmarks attend to."""

from __future__ import annotations

import torch

from hf_kvcache.formats.spec import FormatSpec, PageLayout
from hf_kvcache.ops.view import KVView


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
