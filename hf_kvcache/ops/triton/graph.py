"""The decode call as one opaque op, so that torch.compile and CUDA graphs can hold it.

The slabs are arguments although kernels reach pages by address: that is how a compiler learns that the op reads what
was written to them. Grids depend on shapes and `max_length` alone; lengths are read on the device.
"""

from typing import Optional

import torch

from hf_kvcache.formats.spec import PageLayout
from hf_kvcache.ops.api import AttendCall
from hf_kvcache.ops.view import KVView

_LAYOUTS: dict[str, PageLayout] = {}


@torch.library.custom_op("hf_kvcache::paged_decode", mutates_args=())
def paged_decode(
    query: torch.Tensor,
    slabs: list[torch.Tensor],
    addresses: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    sealed: torch.Tensor,
    sink_keys: Optional[torch.Tensor],  # noqa: UP045  (schemas are inferred from these spellings)
    sink_values: Optional[torch.Tensor],  # noqa: UP045
    ring_keys: Optional[torch.Tensor],  # noqa: UP045
    ring_values: Optional[torch.Tensor],  # noqa: UP045
    new_keys: Optional[torch.Tensor],  # noqa: UP045
    new_values: Optional[torch.Tensor],  # noqa: UP045
    sinks: Optional[torch.Tensor],  # noqa: UP045
    layout: str,
    scale: float,
    softcap: Optional[float],  # noqa: UP045
    window: Optional[int],  # noqa: UP045
    max_length: int,
    columns: int,
    offset: int,
) -> torch.Tensor:
    """`run.decode` on the parts of a call."""
    from hf_kvcache.ops.triton.run import decode

    view = KVView(
        _LAYOUTS[layout], tuple(slabs), addresses, table, starts, lengths, sealed, max_length, columns, offset, window,
        sink_keys, sink_values, ring_keys, ring_values, new_keys, new_values,
    )  # fmt: skip
    return decode(AttendCall(query, view, scale, None, softcap, sinks))


@paged_decode.register_fake
def _shape(query: torch.Tensor, *rest: object) -> torch.Tensor:
    layout = next(x for x in rest if isinstance(x, str))
    return query.new_empty(*query.shape[:3], _LAYOUTS[layout].value_dim)


@torch.compiler.assume_constant_result
def _name(layout: PageLayout) -> str:
    name = repr(layout)
    _LAYOUTS[name] = layout
    return name


def attend(call: AttendCall) -> torch.Tensor:
    """The call as one op."""
    v = call.view
    return paged_decode(
        call.query, list(v.slabs), v.addresses, v.table, v.starts, v.lengths, v.sealed, v.sink_keys, v.sink_values,
        v.ring_keys, v.ring_values, v.new_keys, v.new_values, call.sinks, _name(v.layout), call.scale, call.softcap,
        v.window, v.max_length, v.columns, v.offset,
    )  # fmt: skip
