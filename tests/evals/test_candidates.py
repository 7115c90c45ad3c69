"""From `name:option=value` to a cache, and the bytes it holds."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, QuantizedCache

import hf_kvcache
from hf_kvcache.evals.candidates import builder, bytes_by_kind, held_bytes, held_elements, parse
from hf_kvcache.evals.errors import EvalError


def test_options_are_literals_else_strings():
    spec = parse(
        "paged_int8:residual_length=32,rotate=False,impl=torch,layers={0: 'fp8', -1: 'exact'},max_cache_len=None"
    )
    assert spec.name == "paged_int8"
    assert spec.options == {
        "residual_length": 32,
        "rotate": False,
        "impl": "torch",
        "layers": {0: "fp8", -1: "exact"},
        "max_cache_len": None,
    }
    assert parse("dynamic").options == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("paged_fp8:", "is not option=value"),
        ("paged_fp8:sinks", "'sinks' is not option=value"),
        ("paged_fp8:sinks=", "is not option=value"),
        ("paged_fp8:a b=1", "is not option=value"),
        ("paged_fp8:sinks=1,sinks=2", "option 'sinks' is given twice"),
        (":sinks=1", "has no name"),
        ("", "has no name"),
    ],
)
def test_a_malformed_spec_is_refused_in_words(text, words):
    with pytest.raises(EvalError, match=words):
        parse(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("paged_fp9", "paged_fp8"),
        ("paged_fp8:sink=4", "sinks"),
        ("dynamic:nbits=4", "nbits"),
        ("quantized:backend=nothing", "nothing"),
        ("quantized", "backend"),
    ],
)
def test_a_cache_that_cannot_be_built_is_refused_before_anything_runs(tiny, text, words):
    with pytest.raises(EvalError, match=words) as caught:
        builder(parse(text), tiny.config)
    assert "\n" not in str(caught.value)


def test_each_call_builds_a_fresh_cache(tiny):
    build = builder(parse("paged_int8:sinks=4"), tiny.config)
    first, second = build(), build()
    assert isinstance(first, hf_kvcache.PagedCache)
    assert first is not second


def fill(cache, tokens=10, dtype=torch.float32):
    for layer in range(2):
        cache.update(torch.randn(3, 2, tokens, 16, dtype=dtype), torch.randn(3, 2, tokens, 8, dtype=dtype), layer)
    return cache


def test_bytes_and_elements_of_an_exact_cache():
    cache = fill(DynamicCache())
    assert held_elements(cache) == 2 * 3 * 2 * 10 * (16 + 8)
    assert held_bytes(cache) == 4 * held_elements(cache)
    assert bytes_by_kind(cache) == {}


def test_storage_counts_once_and_in_full():
    """Two views of one storage hold it once; a view of a part holds it all."""
    cache = DynamicCache()
    both = torch.randn(1, 2, 10, 16)
    cache.update(both[..., :4, :], both[..., 4:5, :], 0)
    cache.layers[0].keys, cache.layers[0].values = both[..., :4, :], both[..., 4:5, :]
    assert held_bytes(cache) == both.numel() * 4


def test_bytes_of_a_quantized_cache_of_transformers(tiny):
    quantized = pytest.importorskip("transformers.cache_utils")
    if not hasattr(quantized, "Fp8QuantizedLayer"):
        pytest.skip("this version of transformers has no fp8 cache")
    cache = fill(QuantizedCache("fp8", tiny.config))
    codes = 2 * 3 * 2 * 10 * (16 + 8)
    assert codes <= held_bytes(cache) <= codes + 64  # codes, a scale a tensor


def test_our_caches_count_themselves(tiny):
    cache = builder(parse("paged_fp8"), tiny.config)()
    fill(cache)
    assert held_bytes(cache) == cache.nbytes == sum(bytes_by_kind(cache).values()) > 0


def test_nf4_takes_four_bits_and_its_scales(tiny):
    pytest.importorskip("bitsandbytes")
    cache = builder(parse("quantized:backend=nf4"), tiny.config)()
    keys, values = torch.randn(2, 2, 40, 16), torch.randn(2, 2, 40, 16)
    cache.update(keys, values, 0)
    codes = keys.numel()  # two sides, half a byte each
    assert codes * 1.125 <= held_bytes(cache) <= codes * 1.125 + 256
    back, _ = cache.update(keys[:, :, :1], values[:, :, :1], 0)
    assert 0.05 < (back[:, :, :40] - keys).pow(2).mean().sqrt() < 0.15
    with pytest.raises(EvalError, match="no_such"):
        builder(parse("quantized:backend=nf4,no_such=3"), tiny.config)
