"""From an attention call to launches."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from hf_kvcache.formats.spec import PageLayout
from hf_kvcache.ops.api import AttendCall
from hf_kvcache.ops.triton import launch, rotation
from hf_kvcache.ops.triton.append import append_rows
from hf_kvcache.ops.triton.decode import decode_merge, decode_split
from hf_kvcache.ops.triton.latent import latent_split
from hf_kvcache.ops.triton.sides import power, side

LOG2E = math.log2(math.e)
_TL = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _pair(
    keys: torch.Tensor | None, values: torch.Tensor | None, spare: torch.Tensor
) -> tuple[list[torch.Tensor], list[int]]:
    """Exact keys and values as kernel arguments, with their first three strides; `spare` where there are none."""
    if keys is None or values is None or keys.shape[2] == 0:
        return [spare, spare], [0] * 6
    keys, values = _unit_stride(keys), _unit_stride(values)
    return [keys, values], [*keys.stride()[:3], *values.stride()[:3]]


def _aligned(tensors: tuple[torch.Tensor, ...], strides: list[int]) -> bool:
    """Whether rows of these tensors can be loaded 16 bytes at a time."""
    return all(x.data_ptr() % 16 == 0 for x in tensors) and all(n % 16 == 0 for n in strides)


def _merge(mid_o: torch.Tensor, mid_l: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    B, HQ, Q, splits, D = mid_o.shape
    decode_merge[(B * HQ * Q,)](
        mid_o, mid_l, out if sinks is None else sinks, out, splits, HQ, Q, *out.stride()[:3],
        D=D, D_PAD=power(D), S_PAD=triton.next_power_of_2(splits), CHUNK=min(16, triton.next_power_of_2(splits)),
        SINK=sinks is not None, num_warps=4,
    )  # fmt: skip
    return out


def decode(call: AttendCall, chip: launch.Chip | None = None) -> torch.Tensor:
    """`[B, HQ, Q, D_v]`: see `AttendCall`. `chip` overrides the device's own (to compile for another one)."""
    view, layout = call.view, call.view.layout
    q = _unit_stride(call.query)
    B, HQ, Q, _ = q.shape
    H, D = layout.heads, layout.value_dim
    chip = chip or launch.chip_of(q.device)
    narrow = q.dtype != torch.float32
    key, value = (side(layout, s, chip.assembly, chip.native_fp8, narrow) for s in "kv")
    plan = launch.plan(chip, key, value, layout.page_size, q.element_size(), HQ // H * Q, B * H, view.max_length)
    exact = _TL[q.dtype]
    code = tl.float16 if narrow else tl.float32
    spare = q  # stands for a tensor that the kernel will not read

    sink, sink_strides = _pair(view.sink_keys, view.sink_values, spare)
    ring, ring_strides = _pair(view.ring_keys, view.ring_values, spare)
    new, new_strides = _pair(view.new_keys, view.new_values, spare)
    tail = view.sinks > 0 or view.ring_keys is not None or view.new_tokens > 0
    strides = [*sink_strides, *ring_strides, *new_strides]
    aligned = _aligned((*sink, *ring, *new), strides)
    pages = view.table.shape[1] > 0
    rotations = [rotation.signs(s.dim, q.dtype, q.device) if s.rotate else (spare, 1.0) for s in (key, value)]
    splits = plan.splits if pages else 0
    total = splits + tail
    out = torch.empty(B, HQ, Q, D, dtype=q.dtype, device=q.device)
    if total == 0:
        return out.zero_()
    mid_o = torch.empty(B, HQ, Q, total, D, dtype=torch.float32, device=q.device)
    mid_l = torch.empty(B, HQ, Q, total, dtype=torch.float32, device=q.device)
    cap = call.softcap
    tile = plan.tile
    blocks = triton.cdiv(HQ // H * Q, tile.rows)
    decode_split[(total, H * blocks, B)](
        q, view.table, view.addresses, view.starts, view.lengths, view.sealed, *sink, *ring, *new,
        rotations[0][0], rotations[1][0], mid_o, mid_l, H, HQ // H, Q, view.columns + view.offset, splits,
        call.scale * LOG2E if cap is None else 2 * LOG2E * call.scale / cap, (cap or 1.0) * LOG2E,
        rotations[0][1], rotations[1][1],
        view.window or 0, view.sinks, view.new_tokens,
        q.stride(0), q.stride(1), q.stride(2), view.table.stride(0), *strides,
        K=key, V=value, T=tile, XT=exact, KT=exact if key.kind == "exact" else code,
        VT=exact if value.kind == "exact" else code, DK_PAD=power(key.dim), DV_PAD=power(D),
        IP="ieee" if q.dtype == torch.float32 else "tf32", SOFTCAP=cap is not None, WINDOW=view.window is not None,
        PAGES=pages, TAIL=tail,
        RING=1 if view.ring_keys is None else view.ring_keys.shape[2], ALIGNED=aligned,
        num_warps=plan.warps, num_stages=tile.stages,
        **({"maxnreg": 255} if chip.assembly else {}),
    )  # fmt: skip
    return _merge(mid_o, mid_l, call.sinks, out)


def decode_latent(call: AttendCall, chip: launch.Chip | None = None) -> torch.Tensor:
    """Absorbed MLA over a view whose keys are latents and whose values are rope keys: `[B, HQ, Q, D_latent]`.

    call.query: `[B, HQ, Q, D_latent + D_rope]`, the key up-projection already in it.
    """
    view, layout = call.view, call.view.layout
    q = _unit_stride(call.query)
    B, HQ, Q, _ = q.shape
    chip = chip or launch.chip_of(q.device)
    narrow = q.dtype != torch.float32
    latent, rope = (side(layout, s, chip.assembly, chip.native_fp8, narrow) for s in "kv")
    plan = launch.latent_plan(chip, latent, rope, layout.page_size, q.element_size(), HQ * Q, B, view.max_length)
    sink, sink_strides = _pair(view.sink_keys, view.sink_values, q)
    ring, ring_strides = _pair(view.ring_keys, view.ring_values, q)
    new, new_strides = _pair(view.new_keys, view.new_values, q)
    strides = [*sink_strides, *ring_strides, *new_strides]
    tail = view.sinks > 0 or view.ring_keys is not None or view.new_tokens > 0
    pages = view.table.shape[1] > 0
    splits = plan.splits if pages else 0
    out = torch.empty(B, HQ, Q, latent.dim, dtype=q.dtype, device=q.device)
    if splits + tail == 0:
        return out.zero_()
    mid_o = torch.empty(B, HQ, Q, splits + tail, latent.dim, dtype=torch.float32, device=q.device)
    mid_l = torch.empty(B, HQ, Q, splits + tail, dtype=torch.float32, device=q.device)
    exact = _TL[q.dtype]
    tile = plan.tile
    latent_split[(splits + tail, triton.cdiv(HQ * Q, tile.rows), B)](
        q, view.table, view.addresses, view.starts, view.lengths, view.sealed, *sink, *ring, *new, mid_o, mid_l,
        HQ, Q, view.columns + view.offset, splits, call.scale * LOG2E, view.sinks, view.new_tokens,
        q.stride(0), q.stride(1), q.stride(2), view.table.stride(0), *(s for i, s in enumerate(strides) if i % 3 != 1),
        C=latent, R=rope, T=tile, XT=exact, KT=exact if latent.kind == "exact" or not narrow else tl.float16,
        IP="tf32" if narrow else "ieee", D_PAD=power(latent.dim), R_PAD=power(rope.dim), PAGES=pages, TAIL=tail,
        RING=1 if view.ring_keys is None else view.ring_keys.shape[2], ALIGNED=_aligned((*sink, *ring, *new), strides),
        num_warps=plan.warps, num_stages=tile.stages, **({"maxnreg": 255} if chip.assembly else {}),
    )  # fmt: skip
    return _merge(mid_o, mid_l, None, out)


def append(
    layout: PageLayout,
    keys: torch.Tensor,
    values: torch.Tensor,
    addresses: torch.Tensor,
    slots: torch.Tensor | None = None,
    chip: launch.Chip | None = None,
) -> None:
    """Encode tokens into pages, byte for byte as `formats.pages` does.

    keys, values: `[N, H, R, D]` in the model's dtype. addresses: int64 `[N]`, the pages they go into, each once.
    R is the page size (whole pages), or 1 with `slots`, int32 `[N]` (direct formats only).
    """
    N, H, R, _ = keys.shape
    if N == 0:
        return
    chip = chip or launch.chip_of(keys.device)
    keys, values = _unit_stride(keys), _unit_stride(values)
    key, value = (side(layout, s, False, False, False) for s in "kv")
    blocks = [s.dim & -s.dim for s in (key, value)]
    append_rows[(N, H, 2)](
        keys, values, addresses, addresses if slots is None else slots, *keys.stride()[:3], *values.stride()[:3],
        blocks[0] ** -0.5, blocks[1] ** -0.5, K=key, V=value, R=R, P=layout.page_size,
        DK_PAD=triton.next_power_of_2(key.dim), DV_PAD=triton.next_power_of_2(value.dim),
        K_STEPS=blocks[0].bit_length() - 1,
        V_STEPS=blocks[1].bit_length() - 1, XT=_TL[keys.dtype], num_warps=1 if R == 1 else 8, enable_fp_fusion=False,
    )  # fmt: skip
