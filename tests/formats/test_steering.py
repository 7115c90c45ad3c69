"""Steered rounding: the same bytes from every encoder, and errors that cancel where the queries look."""

from __future__ import annotations

import pytest
import torch

from hf_kvcache.formats import hadamard, steering
from hf_kvcache.formats.pages import dequantize_tokens, quantize_tokens
from hf_kvcache.formats.spec import FORMATS, SideSpec


def directions(heads: int, head_dim: int, rank: int, size: float = 4.0, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return size * torch.randn(heads, head_dim, rank, dtype=torch.float64, generator=random)


def test_gains_are_the_greedy_minimum() -> None:
    """For one channel at a time, against the minimum found by solving for all later errors at once."""
    m = directions(2, 6, 2)
    gains = steering.prepare(m)[:, :, 1].double()
    for h in range(2):
        metric = torch.eye(6, dtype=torch.float64) + m[h] @ m[h].T
        for d in range(6):  # channels before d have error e; those after it are free: minimise over d and these
            e = torch.randn(d, dtype=torch.float64)
            free = torch.linalg.solve(metric[d:, d:], -metric[d:, :d] @ e)
            assert free[0].item() == pytest.approx(-(gains[h, d] @ (m[h, :d].T @ e)).item(), abs=1e-6)


@pytest.mark.parametrize("name", ["int4", "int3", "int2", "k4v2"])
def test_scores_along_the_directions_get_better(name: str) -> None:
    spec = FORMATS[name].key
    m = directions(3, 64, 2)
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    rotated = hadamard.rotate(m.float().transpose(1, 2)).transpose(1, 2) if spec.rotate else m

    def error(steer: torch.Tensor | None) -> tuple[float, float]:
        e = dequantize_tokens(*quantize_tokens(x, spec, steer), spec) - (hadamard.rotate(x) if spec.rotate else x)
        return (e @ rotated.float()).pow(2).mean().item(), e.pow(2).mean().item()

    plain, steered = error(None), error(steering.prepare(rotated))
    assert steered[0] < 0.2 * plain[0]
    assert steered[1] < 1.5 * plain[1]  # what it costs in all other directions


def test_no_directions_change_nothing() -> None:
    x = torch.randn(2, 3, 64, 64)
    plain = quantize_tokens(x, FORMATS["int4"].key)
    steered = quantize_tokens(x, FORMATS["int4"].key, steering.prepare(torch.zeros(3, 64, 1)))
    assert all(torch.equal(a, b) for a, b in zip(plain, steered, strict=True))


def test_constant_and_zero_groups_stay_exact() -> None:
    x = torch.full((1, 2, 64, 64), 0.5)
    x[:, 1] = 0
    spec = SideSpec("int", 4, "channel", 32, symmetric=False)
    found = quantize_tokens(x, spec, steering.prepare(directions(2, 64, 1)))
    assert torch.equal(dequantize_tokens(*found, spec), x)
