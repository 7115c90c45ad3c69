"""Attention on a GPU: Triton kernels. triton itself is imported when a call has been accepted."""

from __future__ import annotations

import importlib.util

import torch

from hf_kvcache.formats.spec import PageLayout
from hf_kvcache.ops.api import AttendCall
from hf_kvcache.ops.triton.launch import interpreted

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def why_not(call: AttendCall) -> str | None:
    """None, or why the kernels cannot serve this call."""
    if call.absorbed:
        return latent_why_not(call)
    layout, device = call.view.layout, call.query.device
    if device.type != "cuda" and not (device.type == "cpu" and interpreted()):
        return f"the query is on {device.type}, not on a GPU"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if call.query.dtype not in _DTYPES:
        return f"the query is {call.query.dtype}; accepted: float16, bfloat16, float32"
    if not layout.transposed:
        return "the pages are in the CPU layout (transposed=False)"
    if call.mask is not None:
        return "a mask tensor was given; the kernels only know causal, padding and window masks"
    if (
        layout.spec.value.scaled
        and layout.spec.value.per == "channel"
        and layout.spec.value.groups(layout.page_size, 1) > 1
    ):
        return "values have several groups of tokens in a page; the kernels take one (group=None)"
    for name, side, summed in (
        ("key", layout.spec.key, layout.key_dim),
        ("value", layout.spec.value, layout.page_size),
    ):
        planes = {4: 2, 3: 4, 2: 4}.get(side.bits, 1)
        if summed < 16 * planes or summed % (8 if side.bits == 3 else planes):
            what = "head dim" if name == "key" else "page size"
            return f"{side.bits}-bit {name}s need a {what} of at least {16 * planes}, got {summed}"
    if layout.page_size & (layout.page_size - 1) or layout.page_size < 16:
        return f"page_size={layout.page_size} is not a power of two of 16 or more"
    return None


def attend(call: AttendCall) -> torch.Tensor:
    """Attention over the view, `[B, HQ, Q, D_v]`; see `hf_kvcache.ops.api.AttendCall`."""
    if call.absorbed:
        from hf_kvcache.ops.triton.run import decode_latent

        return decode_latent(call)
    if torch.compiler.is_compiling():
        from hf_kvcache.ops.triton import graph

        return graph.attend(call)
    from hf_kvcache.ops.triton.run import decode

    return decode(call)


def latent_why_not(call: AttendCall) -> str | None:
    """None, or why the absorbed MLA kernel cannot serve this call (see `run.decode_latent` for its shapes)."""
    layout = call.view.layout
    key, value = layout.spec.key, layout.spec.value
    if call.query.device.type != "cuda" and not interpreted():
        return f"the query is on {call.query.device.type}, not on a GPU"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if call.query.dtype not in _DTYPES:
        return f"the query is {call.query.dtype}; accepted: float16, bfloat16, float32"
    if not layout.transposed or layout.heads != 1:
        return "latents are stored as one head in the GPU layout (transposed=True)"
    if (
        key.rotate
        or (key.kind == "int" and key.bits != 8)
        or (key.scaled and (key.per, key.groups(1, layout.key_dim)) != ("token", 1))
    ):
        return "latents must be exact, fp8, or 8-bit with one scale a token, without rotation"
    if not key.symmetric or value.scaled:
        return "latents must be symmetric codes, and rope keys exact"
    if any(d & (d - 1) or d < 16 for d in (layout.key_dim, layout.value_dim, layout.page_size)):
        return "the latent dim, the rope dim and the page size must be powers of two of 16 or more"
    if call.mask is not None or call.softcap is not None or call.sinks is not None or call.view.window is not None:
        return "masks, soft caps, sink logits and windows are not served"
    return None


def append_why_not(layout: PageLayout) -> str | None:
    """None, or why the append kernel cannot encode pages of this layout."""
    if not layout.transposed:
        return "the pages are in the CPU layout (transposed=False)"
    for side, dim in ((layout.spec.key, layout.key_dim), (layout.spec.value, layout.value_dim)):
        axis = dim if side.per == "token" else layout.page_size
        group = min(side.group or axis, axis)
        if side.kind == "int" and side.bits < 8 and dim & (dim - 1):
            return f"packed codes need a head dim that is a power of two, got {dim}"
        if side.scaled and side.groups(layout.page_size, dim) > 1 and (group & (group - 1) or axis % group):
            return f"groups of {group} are no power of two that divides {axis}"
    return None
