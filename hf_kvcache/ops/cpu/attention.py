"""Decode attention on a CPU: fill in the record of a call and run the compiled driver."""

from __future__ import annotations

import functools
import math
import struct
import threading

import torch

from hf_kvcache.formats.spec import PageLayout
from hf_kvcache.ops.api import AttendCall
from hf_kvcache.ops.cpu import driver, threads
from hf_kvcache.ops.cpu.identity import ByIdentity
from hf_kvcache.ops.cpu.plan import QUERY_KINDS, Plan, plan
from hf_kvcache.ops.cpu.problem import CALL, PROBLEM
from hf_kvcache.ops.view import KVView

MAX_TOKENS = 16  # query tokens; more are better served by matrix products over decoded pages
SERIAL_BYTES = 192 << 10  # a call that reads less runs on one thread: waking another costs more
SPLIT_PAGES = 4  # a split is at least so long
ITEMS_PER_THREAD = 4  # so that threads end together

_CALL = struct.Struct("".join("d" if CALL[name].kind == "f" else "q" for name in CALL.names or ()))
_WORK, _MERGE = driver.work.address, driver.merge.address
_LOG2E = math.log2(math.e)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in QUERY_KINDS}


class _Workspace(threading.local):
    """Each thread's own memory: the record of the call, and scratch for every thread that it starts."""

    def __init__(self) -> None:
        self.record = torch.zeros(PROBLEM.itemsize, dtype=torch.uint8)
        self.address = self.record.data_ptr()
        self.bytes = memoryview(self.record.numpy())
        self.plan: Plan | None = None
        self.plans: ByIdentity[Plan] = ByIdentity()
        self.scratch: dict[tuple[Plan, int], torch.Tensor] = {}
        self.partial = torch.empty(0)


_workspace = _Workspace()


def why_not(call: AttendCall) -> str | None:
    """None, or why the compiled path cannot serve this call."""
    view, query = call.view, call.query
    layout = view.layout
    if call.mask is not None:
        return "it has no general masks"
    if call.absorbed:
        return "it has no kernel for latents"
    if query.shape[2] > MAX_TOKENS:
        return f"it serves up to {MAX_TOKENS} query tokens, not {query.shape[2]}"
    if query.dtype not in QUERY_KINDS:
        return f"it has no kernels for {query.dtype} queries"
    if _workspace.plans.get(layout, query.shape[1], query.shape[2], query.dtype, call.softcap is not None):
        return None  # served before
    return _unserved(layout)


@functools.lru_cache(maxsize=256)
def _unserved(layout: PageLayout) -> str | None:
    if layout.transposed:
        return "it reads pages with the summed axis outermost, not transposed ones"
    if layout.dtype not in _DTYPES:
        return f"it has no kernels for {layout.dtype} pages"
    if layout.page_size % 8:
        return f"it needs a page size that is a multiple of 8, not {layout.page_size}"
    return None


def attend(call: AttendCall) -> torch.Tensor:
    """See `ops.api.attend`. The output stands in memory as `[B, Q, HQ, D_v]`."""
    view, query = call.view, call.query
    layout = view.layout
    if query.stride(3) != 1:
        query = query.contiguous()
    rows, query_heads, tokens, _ = query.shape
    capped = call.softcap is not None
    space = _workspace
    chosen = space.plans.get(layout, query_heads, tokens, query.dtype, capped)
    if chosen is None:
        made = plan(layout, query_heads, tokens, query.dtype, capped)
        chosen = space.plans.put(layout, made, query_heads, tokens, query.dtype, capped)
    out = torch.empty(rows, tokens, query_heads, layout.value_dim, dtype=query.dtype).transpose(1, 2)
    team, splits = _shares(view, chosen)
    items = rows * layout.heads * splits
    scratch = space.scratch.get((chosen, team))
    if scratch is None:
        scratch = space.scratch[chosen, team] = torch.zeros(team * chosen.scratch_bytes, dtype=torch.uint8)
    if splits > 1 and space.partial.numel() < items * chosen.rows * (layout.value_dim + 2):
        space.partial = torch.empty(items * chosen.rows * (layout.value_dim + 2))
    sinks = None if call.sinks is None else call.sinks.float().contiguous()
    slope, cap = (0.0, 0.0) if call.softcap is None else (-2 * _LOG2E / call.softcap, call.softcap * _LOG2E)
    exact, keep = _exact_tokens(view)
    if space.plan is not chosen:
        space.bytes[CALL.itemsize :] = chosen.record
        space.plan = chosen
    _CALL.pack_into(
        space.bytes, 0,
        query.data_ptr(), *query.stride()[:3], out.data_ptr(), *out.stride()[:3],
        0 if sinks is None else sinks.data_ptr(),
        view.addresses.data_ptr(), view.table.data_ptr(), view.table.stride(0),
        view.starts.data_ptr(), view.lengths.data_ptr(), view.sealed.data_ptr(),
        0, 0, items, splits, scratch.data_ptr(), space.partial.data_ptr(),
        view.columns, view.offset, view.window or 0,
        *exact,
        call.scale * (1.0 if call.softcap is not None else _LOG2E), slope, cap,
    )  # fmt: skip
    threads.run(_WORK, space.address, team)
    if splits > 1:
        threads.run(_MERGE, space.address, 1)
    del keep
    return out


def _shares(view: KVView, chosen: Plan) -> tuple[int, int]:
    """Threads to use, and the splits that each (row, KV head) is cut into."""
    team = torch.get_num_threads()
    tokens = view.max_length if view.window is None else min(view.max_length, view.window)
    pairs = view.batch * view.layout.heads
    if team == 1 or view.batch * (tokens + view.new_tokens) * chosen.token_bytes < SERIAL_BYTES:
        return 1, 1
    longest = tokens // (SPLIT_PAGES * view.layout.page_size)
    splits = max(1, min(-(-ITEMS_PER_THREAD * team // pairs), longest))
    return min(team, pairs * splits), splits


def _exact_tokens(view: KVView) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    """Addresses and strides in bytes of sinks, ring and new tokens, as the record wants them; what must stay alive."""
    numbers: list[int] = []
    keep: list[torch.Tensor] = []
    layout = view.layout
    size = layout.itemsize
    for keys, values in ((view.sink_keys, view.sink_values), (view.ring_keys, view.ring_values)):
        if keys is None or values is None:
            numbers += (0,) * 7
            continue
        keys, values = keys.contiguous(), values.contiguous()
        keep += (keys, values)
        count = keys.shape[2]
        k_step, v_step = size * count * layout.key_dim, size * count * layout.value_dim
        numbers += (keys.data_ptr(), values.data_ptr())
        numbers += (layout.heads * k_step, k_step, layout.heads * v_step, v_step, count)
    if view.new_keys is None or view.new_values is None:
        numbers += (0,) * 9
    else:
        new = [x if x.stride(3) == 1 else x.contiguous() for x in (view.new_keys, view.new_values)]
        keep += new
        numbers += (new[0].data_ptr(), new[1].data_ptr())
        numbers += (size * step for x in new for step in x.stride()[:3])
        numbers.append(new[0].shape[2])
    return tuple(numbers), keep
