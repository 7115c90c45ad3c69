"""`layers={0: "int8", -1: "int8"}`: other formats for some layers."""

from __future__ import annotations

import pytest
import torch

import hf_kvcache
from hf_kvcache.config import resolve
from tests.grids import CACHE, model, prompt


def run(name: str, **options: object) -> tuple[torch.Tensor, hf_kvcache.PagedCache]:
    """Logits of 40 tokens read through a cache that held 120 before, and the cache."""
    tiny = model("llama")
    cache = hf_kvcache.make_cache(name, tiny.config, page_size=16, **options)
    ids = prompt(2, 160)
    with torch.inference_mode(), hf_kvcache.attach(tiny):
        tiny(ids[:, :120], **{CACHE: cache})
        return torch.cat([tiny(ids[:, t : t + 1], **{CACHE: cache}).logits for t in range(120, 160)], dim=1), cache


SHORT = {"q_group_size": 16, "residual_length": 16}


def test_negative_layers_count_from_the_end() -> None:
    _, cache = run("paged_int4", layers={-1: "int8"}, **SHORT)
    assert [layer.spec.key.bits for layer in cache.layers] == [4, 8]
    _, cache = run("paged_int4", layers={0: "int8", -1: "int3"}, **SHORT)
    assert [layer.spec.key.bits for layer in cache.layers] == [8, 3]


def test_what_stands_for_a_layer_is_what_it_holds() -> None:
    both, _ = run("paged_int4", layers={0: "int8", -1: "int8"}, **SHORT)
    int8, _ = run("paged_int8", **SHORT)
    assert torch.equal(both, int8)


@pytest.mark.parametrize("better", ["int8", "exact"])
def test_more_bits_in_some_layers_bring_the_logits_nearer(better: str) -> None:
    exact, _ = run("paged_exact")
    plain, _ = run("paged_int2", **SHORT)
    some, _ = run("paged_int2", layers={0: better}, **SHORT)
    log_p = exact.log_softmax(-1)

    def divergence(logits: torch.Tensor) -> float:
        return (log_p.exp() * (log_p - logits.log_softmax(-1))).sum(-1).mean().item()

    assert divergence(some) < 0.8 * divergence(plain)


def test_the_report_says_what_each_layer_got() -> None:
    _, cache = run("paged_int4", layers={0: "int8"}, **SHORT)
    assert "layer 0: PagedLayer int8" in cache.describe()
    assert "layer 1: PagedLayer int4" in cache.describe()


def test_another_width_does_not_inherit_the_share_of_the_range() -> None:
    spec = resolve("paged_int2", {"value": {"bits": 4}, "key": {"group": 64}}).spec
    assert (spec.value.clip, spec.key.clip) == (1.0, 0.9)
    assert resolve("paged_int4", {"value": {"bits": 2, "clip": 0.75}}).spec.value.clip == 0.75
