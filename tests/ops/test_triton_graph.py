"""The decode call inside a compiled graph (see test_triton_decode.py for how to run it)."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in Triton's interpreter: set TRITON_INTERPRET=1", allow_module_level=True)

from hf_kvcache.ops import triton as kernels
from hf_kvcache.ops.api import AttendCall
from hf_kvcache.ops.triton import graph
from tests.ops import interpreter
from tests.ops.triton_views import FP8, Case, low, make

CASES = {
    "fp8": Case(FP8, FP8, heads=1),
    "int4": Case(low(4), low(4), heads=1, lengths=(150, 37), residual=20, sinks=4, new=1),
}


@pytest.mark.parametrize("name", CASES)
def test_compiled_whole(name: str) -> None:
    """torch.compile holds the call without a graph break, and the answer is the same."""
    view, query = make(CASES[name])

    def layer(q: torch.Tensor) -> torch.Tensor:
        return kernels.attend(AttendCall(q * 2, view, 0.125)) + 1

    with interpreter.readable(*view.slabs):
        want = layer(query)
        got = torch.compile(layer, fullgraph=True, backend="eager")(query)
    assert torch.equal(got, want)


def test_op_is_well_formed() -> None:
    """Schema and fake implementation agree with what the op does."""
    view, query = make(CASES["int4"])
    v = view
    args = (
        query, list(v.slabs), v.addresses, v.table, v.starts, v.lengths, v.sealed, v.sink_keys, v.sink_values,
        v.ring_keys, v.ring_values, v.new_keys, v.new_values, None, graph._name(v.layout), 0.125, None, None,
        v.max_length, v.columns, v.offset,
    )  # fmt: skip
    with interpreter.readable(*view.slabs):
        torch.library.opcheck(graph.paged_decode, args, test_utils=("test_schema", "test_faketensor"))
