"""torch.compile: a user's compiled model gives the same tokens; caches and our attention stay outside its graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import hf_kvcache
from tests.grids import CACHE, model, prompt

STEPS = 24


def compiled(net: Any) -> tuple[Any, CompileCounter]:
    torch._dynamo.reset()
    counter = CompileCounter()
    return torch.compile(net, backend=counter), counter


def text(net: Any, forward: Any, cache: Any) -> torch.Tensor:
    """Greedy tokens by hand."""
    ids = new = prompt(1, 20)
    for _ in range(STEPS):
        new = forward(new, **{CACHE: cache}).logits[:, -1:].argmax(-1)
        ids = torch.cat((ids, new), dim=1)
    return ids


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("cache", ["paged_exact", "paged_int4"])
def test_a_compiled_model(name: str, cache: str) -> None:
    net = copy.deepcopy(model(name))
    hf_kvcache.detach(net)
    with hf_kvcache.attach(net):
        options = {"residual_length": 8, "page_size": 32, "impl": "torch"}
        expected = text(net, net, hf_kvcache.make_cache(cache, net.config, **options))
        forward, counter = compiled(net)
        assert torch.equal(text(net, forward, hf_kvcache.make_cache(cache, net.config, **options)), expected)
        first = counter.frame_count
        text(net, forward, hf_kvcache.make_cache(cache, net.config, **options))
    assert counter.op_count > 0, "something was compiled"
    assert counter.frame_count == first, "a second text compiles nothing new"
    torch._dynamo.reset()
