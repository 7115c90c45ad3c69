"""Imposed windows: a `sliding` cache equals transformers' own under a mask of sinks and window, in bounded memory."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import BloomConfig, MistralConfig, T5Config
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

import hf_kvcache
from hf_kvcache.errors import CacheUseError, ConfigError, UnsupportedModelError
from tests.grids import CACHE, FORMAT_NAMES, cache_of, model, padded, prompt, thinned

WINDOW, SINKS, NEW = 20, 3, 40
OPTIONS: dict[str, dict[str, Any]] = {
    "pages": {"page_size": 16, "window": WINDOW, "sinks": SINKS},
    "ring": {"page_size": 16, "window": WINDOW, "sinks": SINKS, "residual_length": 16},
    "no sinks": {"page_size": 16, "window": WINDOW, "sinks": 0},
}


def masked_attention(sinks: int) -> Any:
    """An attention function that sees all keys, and of them only the first `sinks` real ones and the newest `WINDOW`."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: Any = None, **kw: Any
    ) -> tuple[torch.Tensor, None]:
        Q, n = query.shape[2], key.shape[2]
        row, column = torch.arange(n - Q, n).view(-1, 1), torch.arange(n).view(1, -1)
        seen = (column <= row).expand(query.shape[0], 1, Q, n)
        seen = seen & mask if mask is not None else seen
        if kw.get("sliding_window") is None:
            start = seen[:, :, -1:].int().argmax(-1, keepdim=True)
            seen = seen & ((column > row - WINDOW) | (column < start + sinks))
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if kw.get("softcap"):
            scores = torch.tanh(scores / kw["softcap"]) * kw["softcap"]
        weights = torch.nan_to_num(torch.where(seen, scores, -torch.inf).softmax(-1))
        return (weights @ value).transpose(1, 2).contiguous(), None

    return attend


@contextlib.contextmanager
def masked(net: Any, sinks: int) -> Iterator[None]:
    """`net` under the mask of sinks and window, with transformers' own cache."""
    AttentionInterface.register("masked_by_hand", masked_attention(sinks))
    AttentionMaskInterface.register("masked_by_hand", AttentionMaskInterface()["sdpa"])
    before = net.config._attn_implementation
    net.config._attn_implementation_internal = "masked_by_hand"
    try:
        yield
    finally:
        net.config._attn_implementation_internal = before
        AttentionInterface._global_mapping.pop("masked_by_hand")
        AttentionMaskInterface._global_mapping.pop("masked_by_hand")


MODES: dict[str, dict[str, Any]] = {
    "greedy": {"input_ids": prompt(2, 12)},
    "a prompt past the window": {"input_ids": prompt(2, 3 * WINDOW)},
    "left padding": {**padded((5, 17, 33))[0]},
    "left padding past the window": {**padded((1, 22, 70))[0]},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "input_ids": prompt(2, 15)},
    "beams past the window": {"num_beams": 3, **padded((9, 50))[0]},
    "prefill in chunks": {"prefill_chunk_size": 7, "input_ids": prompt(2, 50)},
    "prefill in long chunks": {"prefill_chunk_size": 30, "input_ids": prompt(2, 65)},
    "prompt lookup": {"prompt_lookup_num_tokens": 4, "input_ids": prompt(1, 8).repeat(1, 4)},
    "sampling": {"do_sample": True, "num_return_sequences": 2, "top_k": 20},
}


def generate(net: Any, **kwargs: Any) -> Any:
    torch.manual_seed(3)
    given = {"input_ids": prompt(2), "max_new_tokens": NEW, "do_sample": False, **kwargs}
    return net.generate(**given, return_dict_in_generate=True, output_logits=True)


@pytest.mark.parametrize(
    ("name", "mode", "options"),
    [(name, *pair.values) if not pair.marks else pytest.param(name, *pair.values, marks=pair.marks)
     for i, name in enumerate(["llama", "gpt2", "gemma2"])
     for pair in thinned([*MODES][i:] + [*MODES][:i], OPTIONS, every=3)],
)  # fmt: skip
def test_exact_equals_a_mask_of_sinks_and_window(name: str, mode: str, options: str) -> None:
    net, given = model(name), OPTIONS[options]
    with masked(net, given["sinks"]):
        expected = generate(net, **MODES[mode])
    got = generate(net, cache_implementation="sliding_exact", cache_config=given, **MODES[mode])
    assert torch.equal(got.sequences, expected.sequences)
    for a, b in zip(got.logits, expected.logits, strict=True):
        assert (a - b).abs().max() <= 1e-5 * max(1.0, float(b.abs().max()))
    plain = generate(net, **MODES[mode])
    assert not all(torch.allclose(a, b) for a, b in zip(plain.logits, got.logits, strict=False)), "the window matters"


@pytest.mark.parametrize("fmt", [f if f in ("exact", "int4") else pytest.param(f, marks=pytest.mark.slow) for f in FORMAT_NAMES])
def test_every_format_reads_what_its_own_reference_reads(fmt: str) -> None:
    """In float32 and along one fixed text: the reference decodes everything, and one softmax."""
    net = copy.deepcopy(model("llama"))
    ids = prompt(2, 150)
    logits = []
    for impl in ("auto", "reference"):
        cache = hf_kvcache.make_cache(f"sliding_{fmt}", net.config, window=40, residual_length=16, impl=impl)
        with hf_kvcache.attach(net):
            pieces = [net(ids[:, lo:hi], **{CACHE: cache}).logits for lo, hi in ((0, 120), (120, 121), (121, 128))]
        logits.append(torch.cat(pieces, dim=1))
    assert (logits[0] - logits[1]).abs().max() <= 2e-2 * logits[1].abs().max()


def test_one_token_at_a_time_needs_no_attention_of_ours() -> None:
    net = copy.deepcopy(model("llama"))
    hf_kvcache.detach(net)
    ids = prompt(1, 3 * WINDOW)
    expected = []
    with masked(net, SINKS):
        expected = net(ids).logits
    cache = hf_kvcache.make_cache("sliding_exact", net.config, **OPTIONS["pages"])
    got = torch.cat([net(ids[:, i : i + 1], **{CACHE: cache}).logits for i in range(ids.shape[1])], dim=1)
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert cache.layers[0].keys.shape[2] == SINKS + WINDOW - 1  # what a next token sees, itself left out


def test_many_tokens_through_another_attention_are_refused() -> None:
    net = copy.deepcopy(model("llama"))
    hf_kvcache.detach(net)
    cache = hf_kvcache.make_cache("sliding_exact", net.config, **OPTIONS["pages"])
    with pytest.raises(CacheUseError, match="60 tokens pass an imposed window of 20"):
        net(prompt(1, 3 * WINDOW), **{CACHE: cache})


def test_three_turns() -> None:
    net = model("llama")
    for options in OPTIONS.values():
        ids, held, theirs = prompt(2, 9), None, None
        for turn in range(3):
            with masked(net, options["sinks"]):
                theirs = cache_of(expected := generate(net, input_ids=ids, **({CACHE: theirs} if theirs else {})))
            asked = {CACHE: held} if held else {"cache_implementation": "sliding_exact", "cache_config": options}
            got = generate(net, input_ids=ids, **asked)
            held = cache_of(got)
            assert torch.equal(got.sequences, expected.sequences)
            ids = torch.cat((got.sequences, prompt(2, 30, seed=turn + 5)), dim=1)


@pytest.mark.parametrize("fmt", ["exact", "fp8", "int4", "kivi2"])
def test_memory_is_flat_over_2000_steps(fmt: str) -> None:
    """Pages, ring and sinks: not a byte more after the window has filled. A block table grows by 8 bytes a page."""
    config = model("llama").config
    cache = hf_kvcache.make_cache(f"sliding_{fmt}", config, window=64, page_size=32)
    k, v = torch.randn(2, 1, 2, 1, 16)
    sizes = []
    for step in range(2000):
        for layer in range(2):
            cache.update(k, v, layer)
        if step in (300, 1000, 1999):
            sizes.append(cache.stats())
    parts = [{key: n for key, n in s["bytes"].items() if key != "tables"} for s in sizes]
    assert parts[0] == parts[1] == parts[2]
    assert sizes[0]["pages"] == sizes[2]["pages"]
    assert sizes[2]["pages"]["live"] <= 64 // 32 + 1
    assert sizes[2]["bytes"]["tables"] - sizes[0]["bytes"]["tables"] <= 8 * (1700 // 32 + 16)


def test_a_plan_is_what_is_held() -> None:
    from hf_kvcache import planner

    config = model("llama").config
    for context in (5, 40, 300):
        for fmt in ("exact", "int4"):
            cache = hf_kvcache.make_cache(f"sliding_{fmt}", config, window=64, page_size=32)
            k, v = torch.randn(2, 2, 2, context, 16)
            for layer in range(2):
                cache.update(k, v, layer)
            layers = planner.layers_of(config.to_dict())
            planned = planner.plan(
                layers, f"sliding_{fmt}", 2, context, dtype="float32", window=64, page_size=32
            )
            assert planned.nbytes == cache.nbytes - cache.stats()["bytes"]["tables"]


def test_it_says_what_it_does_and_whom_it_cannot_serve() -> None:
    text = hf_kvcache.make_cache("sliding_int8", model("gemma2").config, window=100).describe()
    assert "the model's window of 12 tokens" in text
    assert "the first 4 tokens and the newest 100, imposed" in text
    with pytest.raises(UnsupportedModelError, match="no full attention layer to impose a window on.*Use paged_fp8"):
        hf_kvcache.make_cache("sliding_fp8", MistralConfig(sliding_window=12))
    for config in (T5Config(), BloomConfig()):
        with pytest.raises(UnsupportedModelError, match="biases by the distance of tokens"):
            hf_kvcache.make_cache("sliding_fp8", config)
    with pytest.raises(ConfigError, match="window=8 is for sliding_<format> caches"):
        hf_kvcache.make_cache("paged_fp8", model("llama").config, window=8)
    with pytest.raises(ConfigError, match="window=0: accepted are whole numbers from 1"):
        hf_kvcache.make_cache("sliding_fp8", model("llama").config, window=0)
