"""Append on a CPU: fill in the record of what is written and run the compiled encoder."""

from __future__ import annotations

import functools
import threading

import numpy as np
import torch

from hf_kvcache.formats.hadamard import block_size
from hf_kvcache.formats.spec import PageLayout
from hf_kvcache.ops.cpu import encoder, threads
from hf_kvcache.ops.cpu.identity import ByIdentity
from hf_kvcache.ops.cpu.plan import QUERY_KINDS
from hf_kvcache.ops.cpu.problem import APPEND, ENCODED_SIDE

_KINDS = {"exact": encoder.EXACT, "int": encoder.INT, "fp8_e4m3": encoder.E4M3, "fp8_e5m2": encoder.E5M2}
_STORED = {str(dtype).removeprefix("torch."): n for n, dtype in enumerate(QUERY_KINDS)}


class _Workspace(threading.local):
    """Each thread's own records and scratch, by layout; and the latest places, which many layers share."""

    def __init__(self) -> None:
        self.records: ByIdentity[tuple[np.ndarray, np.ndarray, int]] = ByIdentity()
        self.where: tuple[np.ndarray, ...] = ()
        self.lists: list[np.ndarray] = []
        self.numbers: tuple[int, ...] = ()


_workspace = _Workspace()


@functools.lru_cache(maxsize=256)
def serves(layout: PageLayout) -> bool:
    """Whether pages of this layout can be written here."""
    return not layout.transposed and layout.dtype in _STORED and layout.page_size % 8 == 0


def write_tokens(
    layout: PageLayout, addresses: torch.Tensor, where: tuple[np.ndarray, ...], keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Encode tokens of a direct format into their slots.

    where: int64 `[N]` each: rows, columns of `keys` and `values` (`[B, H, T, D]`), page ids, slots.
    """
    _run(encoder.write_tokens.address, layout, addresses, where, keys, values, None)


def write_pages(
    layout: PageLayout,
    addresses: torch.Tensor,
    where: tuple[np.ndarray, ...],
    keys: torch.Tensor,
    values: torch.Tensor,
    ring: tuple[torch.Tensor, torch.Tensor],
    steer: torch.Tensor | None = None,
) -> None:
    """Encode whole pages.

    where: int64 rows `[N]`, sources `[N, P]` and page ids `[N]`. A source is a slot of `ring` (keys and values
    `[B, H, C, D]`), or C plus a column of `keys` and `values` (`[B, H, T, D]`). steer: see `formats.pages.encode`.
    """
    rows, sources, pages = where
    _run(encoder.write_pages.address, layout, addresses, (rows, sources, pages, pages), keys, values, ring, steer)


def _run(
    function: int,
    layout: PageLayout,
    addresses: torch.Tensor,
    where: tuple[np.ndarray, ...],
    keys: torch.Tensor,
    values: torch.Tensor,
    ring: tuple[torch.Tensor, torch.Tensor] | None,
    steer: torch.Tensor | None = None,
) -> None:
    space = _workspace
    found = space.records.get(layout)
    if found is None:
        found = space.records.put(layout, _prepare(layout))
    longs, _, record = found
    if len(where) != len(space.where) or any(a is not b for a, b in zip(where, space.where, strict=True)):
        space.where, space.lists = where, [np.ascontiguousarray(x, np.int64) for x in where]
        space.numbers = (len(where[0]), *(x.ctypes.data for x in space.lists))
    new = [x if x.stride(3) == 1 else x.contiguous() for x in (keys, values)]
    old = [x if x.stride(3) == 1 else x.contiguous() for x in ring or ()]
    longs[:7] = (addresses.data_ptr(), *space.numbers, old[0].shape[2] if old else 0)
    for n, at in enumerate((_KEY, _VALUE)):
        longs[at : at + 4] = (new[n].data_ptr(), *new[n].stride()[:3])
        if old:
            longs[at + 4 : at + 8] = (old[n].data_ptr(), *old[n].stride()[:3])
    longs[_STEER : _STEER + 2] = (0, 0) if steer is None else (steer.data_ptr(), steer.shape[3])
    threads.run(function, record, 1)


_KEY, _VALUE = (APPEND.fields[name][1] // 8 for name in ("key", "value"))  # type: ignore[index]
_STEER = _KEY + ENCODED_SIDE.fields["steer"][1] // 8  # type: ignore[index]


def _prepare(layout: PageLayout) -> tuple[np.ndarray, np.ndarray, int]:
    """The record of a layout as int64 numbers, the scratch that it points to, and the record's address."""
    scratch = np.empty(5 * layout.page_size * max(layout.key_dim, layout.value_dim) + 64, np.uint8)
    record = np.zeros(1, APPEND)
    record["heads"], record["page"], record["scratch"] = layout.heads, layout.page_size, scratch.ctypes.data
    for name, side in (("key", "k"), ("value", "v")):
        record[name] = _side(layout, side)
    return record.view(np.int64), scratch, record.ctypes.data


def _side(layout: PageLayout, side: str) -> np.ndarray:
    spec = layout.spec.key if side == "k" else layout.spec.value
    dim = layout.key_dim if side == "k" else layout.value_dim
    axis = dim if spec.per == "token" else layout.page_size
    record = np.zeros((), ENCODED_SIDE)
    offsets, head = dict.fromkeys(_NAMES, 0), dict.fromkeys(_NAMES, 0)
    for name in _NAMES:
        if f"{side}_{name}" in layout.fields:
            field = layout.fields[f"{side}_{name}"]
            offsets[name], head[name] = field.offset, field.nbytes // layout.heads
    values = {
        "is_key": side == "k", "dim": dim, "stored": _STORED[layout.dtype],
        "kind": _KINDS[spec.kind], "bits": spec.bits,
        "rotation": block_size(dim) if spec.rotate else 0, "per_channel": spec.per == "channel",
        "group": min(spec.group or axis, axis), "groups": spec.groups(layout.page_size, dim),
        "symmetric": spec.symmetric, "clip": spec.clip,
        "codes": offsets["codes"], "codes_head": head["codes"], "more": offsets["codes1"], "more_head": head["codes1"],
        "scale": offsets["scale"], "zero": offsets["zero"], "scale_head": head["scale"],
    }  # fmt: skip
    for name, number in values.items():
        record[name] = number
    return record


_NAMES = ("codes", "codes1", "scale", "zero")
