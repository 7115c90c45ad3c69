"""The absorbed MLA kernel in Triton's interpreter against float64 (see test_triton_decode.py for how to run it)."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in Triton's interpreter: set TRITON_INTERPRET=1", allow_module_level=True)

from hf_kvcache.ops import reference
from hf_kvcache.ops.api import AttendCall
from hf_kvcache.ops.triton import latent_why_not, launch
from hf_kvcache.ops.triton.run import decode_latent
from tests.ops import interpreter
from tests.ops.triton_views import EXACT, FP8, INT8, Case, low, make

LATENT = {"heads": 1, "group": 16, "dim": 128, "value_dim": 32}
CASES = {
    "exact": Case(EXACT, EXACT, **LATENT),
    "fp8": Case(FP8, EXACT, **LATENT),
    "int8": Case(INT8, EXACT, **LATENT),
    "deepseek": Case(FP8, EXACT, lengths=(70,), heads=1, group=16, dim=512, value_dim=64),
    "heads-20-Q2": Case(EXACT, EXACT, heads=1, group=20, dim=128, value_dim=32, queries=2),
    "ring": Case(FP8, EXACT, lengths=(150, 30), residual=20, sinks=4, new=2, queries=2, **LATENT),
    "bf16": Case(FP8, EXACT, dtype=torch.bfloat16, **LATENT),
    "fp32": Case(FP8, EXACT, dtype=torch.float32, **LATENT),
}


@pytest.mark.parametrize("chip", ["interpreter", "sm_80"], ids=["plain", "assembly"])
@pytest.mark.parametrize("name", CASES)
def test_latents(name: str, chip: str) -> None:
    """Twice the error of plain attention in the model's dtype on the same bytes, and one unit in the last place."""
    case = CASES[name]
    view, _ = make(case)
    g = torch.Generator().manual_seed(1)
    width = view.layout.key_dim + view.layout.value_dim
    query = torch.randn(len(case.lengths), case.group, case.queries, width, generator=g).to(case.dtype)
    call = AttendCall(query, view, width**-0.5)
    assert latent_why_not(call) is None
    with interpreter.readable(*view.slabs):
        out = decode_latent(call, launch.CHIPS[chip])
    latents, rope = reference.decode(view)
    seen = reference.visible(call)

    def attention(dtype: torch.dtype) -> torch.Tensor:
        keys = torch.cat((latents, rope), -1).to(dtype)
        scores = (query.to(dtype) @ keys.transpose(-1, -2) * call.scale).to(torch.promote_types(dtype, torch.float32))
        weights = torch.where(seen, scores, -torch.inf).softmax(-1).to(dtype)
        return (weights @ latents.to(dtype)).double()

    exact = attention(torch.float64)
    error = float((attention(case.dtype) - exact).abs().max())
    tolerance = 2 * error + torch.finfo(case.dtype).eps * float(exact.abs().max())
    assert float((out.double() - exact).abs().max()) <= tolerance


def test_why_not() -> None:
    """Low-bit latents are refused in words."""
    view, _ = make(Case(low(4), EXACT, residual=8, **LATENT))  # type: ignore[arg-type]
    assert "8-bit" in (latent_why_not(AttendCall(torch.zeros(2, 16, 1, 160, dtype=torch.float16), view, 1.0)) or "")
