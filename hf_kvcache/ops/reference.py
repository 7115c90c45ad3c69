"""The readable oracle: decode every token of a view, then one softmax in float32. It defines the answer.

Every other implementation is judged by this one and shares nothing with it but the codecs.
"""

from __future__ import annotations

import torch

from hf_kvcache.formats import pages as codec
from hf_kvcache.ops.api import AttendCall
from hf_kvcache.ops.view import KVView


def decode(view: KVView, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens of a view as plain tensors: keys `[B, H, columns, D_k]`, values `[B, H, columns, D_v]`.

    Columns that hold no token (left padding, tokens that a window has passed) are zeros.
    """
    layout, P = view.layout, view.layout.page_size
    tokens = view.column_tokens().tolist()
    out = []
    for side, head_dim in zip(codec.SIDES, (layout.key_dim, layout.value_dim), strict=True):
        sinks, ring, new = (
            (view.sink_keys, view.ring_keys, view.new_keys)
            if side == "k"
            else (view.sink_values, view.ring_values, view.new_values)
        )
        x = torch.zeros(view.batch, layout.heads, view.columns, head_dim, dtype=dtype, device=view.starts.device)
        history = view.columns - view.new_tokens
        for b in range(view.batch):
            length, sealed = int(view.lengths[b]), int(view.sealed[b])
            held = -1
            for c, t in enumerate(tokens[b][:history]):
                if t < 0 or t >= length:
                    continue
                if sinks is not None and t < sinks.shape[2]:
                    x[b, :, c] = sinks[b, :, t]
                elif t < sealed:
                    if t // P != held:
                        held = t // P
                        ids = view.table[b, held].reshape(1).cpu().numpy()
                        page = codec.decode(codec.gather(view.slabs, ids), side, layout)[0].to(dtype)
                    x[b, :, c] = page[:, t % P]
                else:
                    assert ring is not None
                    x[b, :, c] = ring[b, :, t % ring.shape[2]]
            if new is not None:
                first = sum(t < 0 for t in tokens[b][history:])
                x[b, :, history + first :] = new[b, :, first:]
        out.append(x)
    return out[0], out[1]


def visible(call: AttendCall) -> torch.Tensor:
    """Which columns each query may attend to, bool `[B, 1 or HQ, Q, columns]`; additive masks count as all visible."""
    view, Q = call.view, call.query.shape[2]
    starts = view.starts.view(-1, 1, 1, 1)
    token = view.column_tokens()[:, None, None, :]
    query = torch.arange(Q, device=starts.device).view(1, 1, -1, 1) + view.offset + view.columns - Q - starts
    seen = (token >= 0) & (token <= query)
    if view.window is not None:
        seen &= (token > query - view.window) | (token < view.sinks)
    if call.mask is not None and call.mask.dtype == torch.bool:
        seen = seen & call.mask
    return seen


def attend(call: AttendCall) -> torch.Tensor:
    """See `ops.api.attend`."""
    query, view = call.query, call.view
    keys, values = decode(view)
    if call.absorbed:
        keys, values = torch.cat((keys, values), dim=-1), keys
    groups = query.shape[1] // view.layout.heads
    keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    scores = query.float() @ keys.transpose(-1, -2) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    seen = visible(call)
    if call.mask is not None and call.mask.dtype != torch.bool:
        scores = scores + call.mask.float()
    scores = torch.where(seen, scores, -torch.inf)
    if call.sinks is not None:
        extra = call.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, extra), dim=-1)
    top = scores.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    weights = torch.exp(scores - top)
    total = weights.sum(dim=-1, keepdim=True)
    weights = (weights / torch.where(total == 0, torch.ones_like(total), total))[..., : view.columns]
    return (weights @ values).to(query.dtype)


def why_not(call: AttendCall) -> str | None:
    """It serves every call."""
    return None
