"""accelerate: weights that are elsewhere, layers on several devices."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_kvcache
from tests.conformance.architectures import tiny
from tests.grids import model, padded

accelerate = pytest.importorskip("accelerate")


def generate(net: Any, **kwargs: Any) -> torch.Tensor:
    if kwargs:
        kwargs["cache_config"] = {"impl": "torch"}
    return net.generate(**padded((9, 30))[0], max_new_tokens=8, do_sample=False, **kwargs)


def fresh(name: str) -> Any:
    net = copy.deepcopy(tiny(name) if name.startswith("deepseek") else model(name))
    hf_kvcache.detach(net)
    return net


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
def test_offloaded_weights(name: str) -> None:
    net = fresh(name)
    expected = generate(net)
    accelerate.cpu_offload(net, execution_device=torch.device("cpu"))
    assert next(net.model.layers[0].parameters()).is_meta
    assert torch.equal(generate(net, cache_implementation="paged_exact"), expected)
    assert generate(net, cache_implementation="paged_int8").shape == expected.shape


def test_a_dispatched_model(tmp_path: Path) -> None:
    net = fresh("llama")
    expected = generate(net)
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
              "model.rotary_emb": "cpu", "lm_head": "cpu"}  # fmt: skip
    accelerate.dispatch_model(net, places, offload_dir=tmp_path, main_device="cpu", force_hooks=True)
    assert torch.equal(generate(net, cache_implementation="paged_exact"), expected)


@pytest.mark.parametrize("name", ["paged_exact", "paged_fp8", "paged_int4", "sliding_exact"])
def test_each_layer_s_pages_are_where_its_keys_are(name: str) -> None:
    cache = hf_kvcache.make_cache(name, model("llama").config, impl="torch")
    for tokens in (200, 1):
        for i, device in enumerate(("cpu", "meta")):
            keys = torch.zeros(2, 2, tokens, 16, device=device)
            cache.update(keys, keys, i)
    for layer, device in zip(cache.layers, ("cpu", "meta"), strict=True):
        assert {slab.device.type for slab in layer.store.slabs} == {device}
        assert layer.ring is None or layer.ring.keys.device.type == device
        assert layer.sinks is None or layer.sinks.keys.device.type == device
