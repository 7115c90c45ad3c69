"""MLA: latents in pages, attended to in absorbed form; equal to the stock path, which expands the whole history."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

import hf_kvcache
from hf_kvcache import planner
from hf_kvcache.errors import ImplError, UnsupportedModelError
from hf_kvcache.ops import reference, vectorised
from hf_kvcache.ops.api import attend
from tests.conformance.architectures import MLA, tiny
from tests.grids import CACHE, CACHE_NAMES, cache_of, model, padded, prompt, thinned
from tests.ops.cases import CASES, Case, call_of

DEEPSEEK_V3 = {
    "num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "hidden_size": 7168,
}  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "left padding": padded((5, 40))[0],
    "prefill in chunks": {"input_ids": prompt(2, 40), "prefill_chunk_size": 7},
    "beams": {"input_ids": prompt(2, 20), "num_beams": 3},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "pages": {"page_size": 16, "impl": "torch"},
    "ring": {"page_size": 16, "residual_length": 16, "sinks": 2, "impl": "torch"},
}


def generate(net: Any, **kwargs: Any) -> Any:
    given = {"max_new_tokens": 12, "do_sample": False, **kwargs}
    return net.generate(**given, return_dict_in_generate=True, output_logits=True)


@pytest.mark.parametrize(("name", "mode"), thinned(MLA, MODES, every=3))
def test_exact_equals_the_stock_path(name: str, mode: str) -> None:
    net = tiny(name)
    expected = generate(net, **MODES[mode])
    for layout, options in zip(("paged", "latent"), OPTIONS.values(), strict=True):
        got = generate(net, cache_implementation=f"{layout}_exact", cache_config=options, **MODES[mode])
        assert "MLA latents, rope keys exact" in cache_of(got).describe()
        assert torch.equal(got.sequences, expected.sequences)
        for a, b in zip(got.logits, expected.logits, strict=True):
            assert (a - b).abs().max() <= 1e-5 * max(1.0, float(b.abs().max()))


def test_the_history_is_never_expanded() -> None:
    net = copy.deepcopy(tiny("deepseek_v3"))
    hf_kvcache.detach(net)
    expanded: list[int] = []
    for layer in net.model.layers:
        layer.self_attn.kv_b_proj.register_forward_hook(lambda _, args, out: expanded.append(args[0].shape[2]))
    generate(net, input_ids=prompt(1, 30))
    assert max(expanded) == 41
    expanded.clear()
    out = generate(net, input_ids=prompt(1, 30), cache_implementation="latent_fp8", cache_config={"impl": "torch"})
    assert expanded == [30, 30], "each layer expands the prompt, once"
    assert cache_of(out).layers[0].layout.heads == 1
    hf_kvcache.detach(net)
    assert not any("expand_kv" in module.__dict__ for module in net.modules())


@pytest.mark.parametrize("fmt", [*(pytest.param(f, marks=pytest.mark.slow) for f in ("int8", "int2", "kivi4", "k8v4")), "fp8", "int4"])
def test_coded_latents_read_what_the_reference_reads(fmt: str) -> None:
    net = copy.deepcopy(tiny("deepseek_v3"))
    ids = prompt(2, 140)
    logits = []
    for impl in ("auto", "reference"):
        cache = hf_kvcache.make_cache(f"latent_{fmt}", net.config, residual_length=16, impl=impl)
        with hf_kvcache.attach(net):
            pieces = [net(ids[:, lo:hi], **{CACHE: cache}).logits for lo, hi in ((0, 130), (130, 131), (131, 136))]
        logits.append(torch.cat(pieces, dim=1))
    assert (logits[0] - logits[1]).abs().max() <= 2e-2 * logits[1].abs().max()
    assert cache.layers[0].spec.value.kind == "exact"


@pytest.mark.parametrize("fmt", ["exact", "fp8", "int4", "kivi2"])
@pytest.mark.parametrize("case", ["ragged", "seventeen queries", "ring, five queries", "sinks", "sinks before a window, ring",
                                  "bool mask", "softcap", "float mask", "sink logits"])  # fmt: skip
def test_the_op_against_the_reference(fmt: str, case: str) -> None:
    given: Case = dataclasses.replace(CASES[case], heads=1, groups=4, dims=(32, 16))
    call = call_of(fmt, given)
    query = torch.randn(*call.query.shape[:3], 48)
    call = dataclasses.replace(call, query=query, absorbed=True)
    got, expected = vectorised.attend(call), reference.attend(call)
    real = torch.arange(query.shape[2]) + call.view.offset + call.view.columns - query.shape[2] >= call.view.starts.view(-1, 1)
    assert got.shape == (*query.shape[:3], 32)
    assert (got - expected)[real[:, None].expand(got.shape[:3])].abs().max() <= 2e-5 * expected.abs().max()
    with pytest.raises(ImplError, match="no kernel for latents|general masks"):
        attend(call, "numba")


class Packed(torch.nn.Module):
    """Stands for a quantized layer: its weight is no matrix that one could multiply with."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", linear.weight.view(torch.uint8))
        self.calls: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(tuple(x.shape))
        return torch.nn.functional.linear(x, self.weight.view(torch.float32))


def test_packed_weights_are_unpacked_once() -> None:
    net = copy.deepcopy(tiny("deepseek_v3"))
    hf_kvcache.detach(net)
    expected = generate(net, input_ids=prompt(1, 30))
    packed = [Packed(layer.self_attn.kv_b_proj) for layer in net.model.layers]
    for layer, linear in zip(net.model.layers, packed, strict=True):
        layer.self_attn.kv_b_proj = linear
    got = generate(net, input_ids=prompt(1, 30), cache_implementation="paged_exact", cache_config={"impl": "torch"})
    assert torch.equal(got.sequences, expected.sequences)
    assert packed[0].calls == [(1, 1, 30, 32), (32, 32)], "the prompt, then the identity"


def test_attention_weights_are_given_when_asked_for() -> None:
    net = copy.deepcopy(tiny("deepseek_v3"))
    net.set_attn_implementation("eager")
    kwargs = {"input_ids": prompt(1, 20), "output_attentions": True}
    expected, got = generate(net, **kwargs), generate(net, cache_implementation="paged_exact", **kwargs)
    assert torch.equal(got.sequences, expected.sequences)
    assert (got.attentions[5][1] - expected.attentions[5][1]).abs().max() <= 1e-5


def test_an_imposed_window_over_latents() -> None:
    net = tiny("deepseek_v3")
    given = {"input_ids": prompt(2, 50), "cache_config": {"window": 20, "sinks": 3, "page_size": 16}}
    got = [generate(net, cache_implementation="sliding_exact", **{**given, "cache_config": {**given["cache_config"], "impl": impl}})
           for impl in ("torch", "reference")]  # fmt: skip
    assert torch.equal(got[0].sequences, got[1].sequences)
    assert not torch.equal(got[0].sequences, generate(net, input_ids=prompt(2, 50)).sequences)


def test_other_models_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="LlamaConfig has no multi-head latent attention: use paged_fp8"):
        hf_kvcache.make_cache("latent_fp8", model("llama").config)


def test_bytes_of_a_token() -> None:
    """DeepSeek-V3, a layer and token: 512 codes and 64 exact numbers; a 2-byte scale for the 512."""
    layers = planner.layers_of(DEEPSEEK_V3)
    for fmt, bits, scales in (("exact", 16, 0), ("fp8", 8, 2), ("int8", 8, 2), ("int4", 4, 512 // 32 * 4)):
        made = planner.plan(layers, f"latent_{fmt}", 1, 64_000)
        tokens = 61 * (64_000 - (64 if fmt == "int4" else 0))
        assert made.codes == tokens * (512 * bits + 64 * 16) // 8
        assert made.scales == tokens * scales


@pytest.mark.parametrize("name", [n.replace("paged", "latent") for n in CACHE_NAMES if n.startswith("paged")])
def test_a_plan_is_what_is_held(name: str) -> None:
    config = tiny("deepseek_v3").config
    cache = hf_kvcache.make_cache(name, config)
    for layer in range(2):
        cache.update(torch.randn(2, 1, 300, 32), torch.randn(2, 1, 300, 8), layer)
    held = cache.stats()["bytes"]
    del held["tables"]
    planned = planner.plan(planner.layers_of(config.to_dict()), name, 2, 300, dtype="float32")
    assert {kind: getattr(planned, kind) for kind in held} == held
