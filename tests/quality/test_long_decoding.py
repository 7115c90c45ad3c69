"""Hundreds of steps over many seals: a sealed page is encoded once, so the error does not pile up."""

from __future__ import annotations

import pytest
import torch

import hf_kvcache
from tests.grids import CACHE, model, prompt

STEPS = 512


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paged_int4", "paged_int2", "paged_kivi4"])
def test_divergence_does_not_trend_upward_over_512_greedy_steps(name: str) -> None:
    """Along the exact cache's own greedy text; each half's mean must be within the other's noise."""
    tiny = model("llama")
    caches = [hf_kvcache.make_cache(n, tiny.config) for n in ("paged_exact", name)]
    token, divergence = prompt(8, 192), []
    with torch.inference_mode(), hf_kvcache.attach(tiny):
        for _ in range(STEPS):
            exact, ours = (tiny(token, **{CACHE: cache}).logits[:, -1].log_softmax(-1) for cache in caches)
            divergence.append((exact.exp() * (exact - ours)).sum(-1))
            token = exact.argmax(-1, keepdim=True)
    kl = torch.stack(divergence).mean(1)
    assert kl[64:].min() > 0  # pages have been read
    first, second = kl[128:320].mean(), kl[320:].mean()
    assert second < 1.25 * first
