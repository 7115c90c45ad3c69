"""From a layout and a shape to a plan: which kernels run over a page, in which order, with which scratch."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from hf_kvcache.formats.hadamard import block_size
from hf_kvcache.formats.spec import ALIGN, PLANES, PageLayout, SideSpec
from hf_kvcache.ops.cpu import kernels
from hf_kvcache.ops.cpu.machine import vectors
from hf_kvcache.ops.cpu.problem import DIRECT, INNER, OUTER, PLAN, SIDE

MAX_BLOCK = 8  # query rows that a kernel handles together
QUERY_KINDS = (torch.float32, torch.bfloat16, torch.float16)


class Stored(NamedTuple):
    """One array of codes: field name, kind as the kernels call it."""

    field: str
    kind: str


class Range(NamedTuple):
    """A part of a side that one kernel handles: output columns `column .. column + width`, byte rows from `first`."""

    column: int
    width: int
    first: int
    rows: int
    weights: int  # which group's weights
    chunk: int  # where the sums go (OUTER)


@dataclass(frozen=True)
class Side:
    """A side of the layout in the words of the driver: `summed` is D for keys, P for values, `width` the other."""

    name: Literal["k", "v"]
    spec: SideSpec
    summed: int
    width: int
    rows: int
    layout: PageLayout

    @property
    def arrays(self) -> list[Stored]:
        """The arrays that hold the codes."""
        spec = self.spec
        if spec.kind == "exact":
            return [Stored(f"{self.name}_codes", self.layout.dtype)]
        if spec.kind != "int" or spec.bits == 8:
            kind = spec.kind if spec.kind != "int" else "int8" if spec.symmetric else "uint8"
            return [Stored(f"{self.name}_codes", kind)]
        kinds = ("bits2", "bits1_high") if spec.bits == 3 else (f"bits{spec.bits}",)
        return [Stored(f"{self.name}_codes{i or ''}", kind) for i, kind in enumerate(kinds[: len(PLANES[spec.bits])])]

    @property
    def groups(self) -> int:
        """Groups along the grouped axis."""
        return self.layout.fields[f"{self.name}_scale"].shape[1] if self.spec.scaled else 1

    @property
    def group(self) -> int:
        """Values in a group."""
        axis = self.width if self.mode == INNER else self.summed
        return min(self.spec.group or axis, axis)

    @property
    def fused(self) -> bool:
        """Whether the softmax kernel applies the scales: one of them for each token of the page."""
        return self.spec.scaled and self.spec.per == "token" and self.groups == 1

    @property
    def mode(self) -> int:
        """Whether scales multiply the weights or the sums, or nothing that is left to the driver."""
        if not self.spec.scaled or self.fused:
            return DIRECT
        return INNER if (self.spec.per == "channel") == (self.name == "k") else OUTER

    @property
    def planes(self) -> int:
        """The most values that a byte of this side holds."""
        return max(kernels.PLANES.get(kind, 1) for _, kind in self.arrays)

    @property
    def block(self) -> int:
        """Query rows that a kernel handles together."""
        most = MAX_BLOCK
        while self.mode == OUTER and most > 1 and most * self.planes > vectors().registers * 3 // 4:
            most //= 2
        return -(-self.rows // -(-self.rows // most))

    @property
    def weight_stride(self) -> int:
        """Weights of a query row, with those of codes that only fill the last bytes."""
        return max(self.byte_rows(kind) * kernels.PLANES.get(kind, 1) for _, kind in self.arrays)

    def byte_rows(self, kind: str) -> int:
        """Rows of bytes in an array."""
        return -(-self.summed // kernels.PLANES.get(kind, 1))

    def ranges(self, kind: str, first_chunk: int) -> tuple[list[Range], list[int]]:
        """How kernels cut one array, and the group of each chunk of sums (OUTER)."""
        n, planes = self.byte_rows(kind), kernels.PLANES.get(kind, 1)
        if self.mode == INNER:
            cuts = range(0, self.width, self.group)
            return [Range(c, min(self.group, self.width - c), 0, n, g, 0) for g, c in enumerate(cuts)], []
        if self.mode == DIRECT:
            return [Range(0, self.width, 0, n, 0, 0)], []
        size = math.gcd(n, self.group)
        out, chunk_groups = [], []
        for first in range(0, n, size):
            out.append(Range(0, self.width, first, size, 0, first_chunk + len(chunk_groups)))
            chunk_groups += [min((first + p * n) // self.group, self.groups - 1) for p in range(planes)]
        return out, chunk_groups


@dataclass(frozen=True, eq=False)
class Plan:
    """A filled `PLAN` record, and the tables that it points into. `row_bytes`: of one token in all heads."""

    record: bytes
    tables: tuple[np.ndarray, ...]
    scratch_bytes: int
    rows: int
    token_bytes: int


@functools.lru_cache(maxsize=256)
def plan(layout: PageLayout, query_heads: int, tokens: int, query_dtype: torch.dtype, softcap: bool) -> Plan:
    """Choose and compile the kernels for one shape; a fraction of a second the first time, then remembered."""
    groups = query_heads // layout.heads
    rows, D_k, D_v, P = groups * tokens, layout.key_dim, layout.value_dim, layout.page_size
    key = Side("k", layout.spec.key, D_k, P, rows, layout)
    value = Side("v", layout.spec.value, P, D_v, rows, layout)
    exact_block = -(-rows // -(-rows // MAX_BLOCK))
    padded = max(-(-rows // block) * block for block in (key.block, value.block, exact_block))
    query_stride = -(-max(key.weight_stride, D_k) // 16) * 16
    record = np.zeros((), PLAN)
    tables: list[np.ndarray] = []
    weights = parts = 0
    for name, side, stride in (("key", key, query_stride), ("value", value, P)):
        filled, side_tables, chunks = _fill(side, stride, padded)
        record[name] = filled
        tables += side_tables
        weights = max(weights, side.groups * padded * stride if side.mode == INNER else 0)
        parts = max(parts, chunks * padded * side.width)
    k_scale, k_zero, k_step = _fused_scales(key)
    v_scale, v_zero, v_step = _fused_scales(value)
    at, scratch_bytes = _places(
        query=padded * query_stride * 4, rotated=padded * query_stride * 4, scores=padded * P * 4,
        out=padded * D_v * 4, weights=weights * 4, parts=parts * 4, state=3 * rows * 4, ranges=2 * rows * 8,
    )  # fmt: skip
    values = {
        "heads": layout.heads, "groups": groups, "tokens": tokens, "rows": rows, "padded": padded,
        "key_dim": D_k, "value_dim": D_v, "page": P,
        "query_kind": QUERY_KINDS.index(query_dtype), "query_stride": query_stride, "exact_bytes": layout.itemsize,
        "key_rotation": block_size(D_k) if layout.spec.key.rotate else 0,
        "value_rotation": block_size(D_v) if layout.spec.value.rotate else 0,
        "key_codes": layout.fields["k_codes"].offset, "value_codes": layout.fields["v_codes"].offset,
        "k_scale": k_scale, "k_zero": k_zero, "k_step": k_step,
        "v_scale": v_scale, "v_zero": v_zero, "v_step": v_step,
        "softmax": kernels.softmax(
            P, D_v, _factor(key) if key.fused else None, key.fused and not key.spec.symmetric,
            _factor(value) if value.fused else None, value.fused and not value.spec.symmetric, softcap,
        ),
        "exact_softmax": kernels.softmax(P, D_v, None, False, None, False, softcap),
        "dots": kernels.dots(layout.dtype, exact_block, D_k, query_stride, P),
        "exact_product": kernels.product(layout.dtype, exact_block, D_v, P, D_v, 0, 0),
        "exact_block": exact_block, "exact_blocks": -(-rows // exact_block), "scratch_bytes": scratch_bytes,
        **at,
    }  # fmt: skip
    for name, number in values.items():
        record[name] = number
    token_bytes = layout.page_bytes // P
    return Plan(record.tobytes(), tuple(tables), scratch_bytes, rows, token_bytes)


def _factor(side: Side) -> float:
    return kernels.FACTOR.get(side.arrays[0].kind, 1.0)


def _fused_scales(side: Side) -> tuple[int, int, int]:
    """Offsets of scales and zeros in a page and the step from head to head, for the softmax kernel."""
    if not side.fused:
        return 0, 0, 0
    fields = side.layout.fields
    scale = fields[f"{side.name}_scale"]
    zero = fields[f"{side.name}_zero"].offset if not side.spec.symmetric else 0
    return scale.offset, zero, scale.nbytes // side.layout.heads


def _fill(side: Side, weight_stride: int, padded: int) -> tuple[np.ndarray, list[np.ndarray], int]:
    """The driver's record of a side, the tables that it points to, and the number of its chunks."""
    fields, outer = side.layout.fields, side.mode == OUTER
    passes: list[tuple[int, ...]] = []
    chunk_groups: list[int] = []
    for array in side.arrays:
        field = fields[array.field]
        size = kernels.BYTES.get(array.kind, 1)
        ranges, more = side.ranges(array.kind, len(chunk_groups))
        chunk_groups += more
        plane_out = padded * side.width if outer else 0
        for r in ranges:
            kernel = kernels.product(
                array.kind, side.block, r.width, weight_stride, side.width, side.byte_rows(array.kind), plane_out
            )
            out = r.chunk * padded * side.width + r.column
            codes = field.offset + r.column * size
            head, stride = field.nbytes // side.layout.heads, side.width * size
            passes.append((kernel, r.weights * padded * weight_stride, r.first, r.rows, codes, head, stride, out))
    tables = [np.array(passes, np.int64), np.array(chunk_groups or [0], np.int64)]
    record = np.zeros((), SIDE)
    zero = f"{side.name}_zero"
    values = {
        "mode": side.mode, "passes": tables[0].ctypes.data, "pass_count": len(passes),
        "blocks": -(-side.rows // side.block), "block": side.block, "summed": side.summed,
        "weight_stride": weight_stride, "width": side.width, "planes": side.planes,
        "groups": side.groups, "group": side.group, "factor": _factor(side),
        "scale": fields[f"{side.name}_scale"].offset if side.spec.scaled else 0,
        "zero": fields[zero].offset if zero in fields else -1,
        "scale_step": fields[f"{side.name}_scale"].nbytes // side.layout.heads if side.spec.scaled else 0,
        "chunks": tables[1].ctypes.data, "chunk_count": len(chunk_groups),
    }  # fmt: skip
    for name, number in values.items():
        record[name] = number
    return record, tables, len(chunk_groups)


def _places(**sizes: int) -> tuple[dict[str, int], int]:
    """Lay arrays out one after another on cache lines: `at_<name>` offsets, and the bytes of all."""
    at, end = {}, 0
    for name, size in sizes.items():
        at[f"at_{name}"] = end
        end += -(-size // ALIGN) * ALIGN
    return at, end
