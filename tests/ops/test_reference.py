"""The oracle against a softmax written by hand, on numbers that are known without it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_kvcache.ops import reference
from hf_kvcache.ops.api import AttendCall
from tests.grids import FORMAT_NAMES, thinned
from tests.ops.cases import CASES, Case, assert_right, call_of, layer_of


def by_hand(
    query: list[float],
    keys: list[list[float]],
    values: list[list[float]],
    scale: float,
    cap: float | None,
    sink: float | None,
) -> list[float]:
    scores = [scale * sum(a * b for a, b in zip(query, key, strict=True)) for key in keys]
    if cap is not None:
        scores = [cap * math.tanh(s / cap) for s in scores]
    weights = [math.exp(s) for s in scores]
    total = sum(weights) + (math.exp(sink) if sink is not None else 0.0)
    return [sum(w * value[d] for w, value in zip(weights, values, strict=True)) / total for d in range(len(values[0]))]


@pytest.mark.parametrize("sink", [None, 0.7], ids=["", "sink"])
@pytest.mark.parametrize("cap", [None, 1.5], ids=["", "softcap"])
@pytest.mark.parametrize("window", [None, 5], ids=["", "window"])
@pytest.mark.parametrize("residual", [0, 6], ids=["pages", "ring"])
def test_against_a_softmax_by_hand(residual: int, window: int | None, cap: float | None, sink: float | None) -> None:
    case = Case(lengths=(21, 13), heads=2, groups=2, dims=(8, 8), residual=residual, window=window)
    layer = layer_of("exact", case)
    layer.kind.table.padding = np.array([0, 8])
    k, v = torch.randn(2, 2, 21, 8), torch.randn(2, 2, 21, 8)
    layer.update(k[:, :, :18], v[:, :, :18])
    view = layer.update(k[:, :, 18:], v[:, :, 18:])[0].current_view()
    query = torch.randn(2, 4, 3, 8)
    sinks = None if sink is None else torch.full((4,), sink)
    out = reference.attend(AttendCall(query, view, 0.3, softcap=cap, sinks=sinks))
    for b, start in enumerate((0, 8)):
        for h in range(4):
            for i in range(3):
                last = 18 + i
                first = max(start, 0 if window is None else last - window + 1)
                rows = slice(first, last + 1)
                expected = by_hand(
                    query[b, h, i].tolist(), k[b, h // 2, rows].tolist(), v[b, h // 2, rows].tolist(), 0.3, cap, sink
                )
                assert torch.allclose(out[b, h, i], torch.tensor(expected), atol=1e-6)


@pytest.mark.parametrize(("fmt", "case"), thinned(FORMAT_NAMES, CASES))
def test_against_float64(fmt: str, case: str) -> None:
    call = call_of(fmt, CASES[case])
    assert_right(reference.attend(call), call)


def test_a_masked_column_has_no_say() -> None:
    call = call_of("exact", Case(lengths=(40,)))
    mask = torch.ones(1, 1, 1, call.view.columns, dtype=torch.bool)
    mask[..., 3] = False
    masked = reference.attend(AttendCall(call.query, call.view, call.scale, mask))
    assert not torch.allclose(masked, reference.attend(call))
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert torch.allclose(masked, reference.attend(AttendCall(call.query, call.view, call.scale, additive)))


def test_nothing_to_see_gives_zeros() -> None:
    call = call_of("exact", Case(lengths=(40,)))
    mask = torch.zeros(1, 1, 1, call.view.columns, dtype=torch.bool)
    assert (reference.attend(AttendCall(call.query, call.view, call.scale, mask)) == 0).all()
