"""Models whose key projection has a large bias (Qwen2): what is lost, which layers are named, what the remedy gives."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import hf_kvcache
from tests.grids import CACHE

VOCABULARY, D, SLOW_DIMS = 97, 64, 20  # of 32 dims, those from 20 on turn by less than 1 / 10 within 32 tokens


def biased(norm: float, slow: bool = False) -> PreTrainedModel:
    """A random Qwen2 of three layers; the first has a key bias of `norm` a head, in slow dims of RoPE or in all."""
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=1, eos_token_id=None, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 2.0 * parameter.shape[-1] ** -0.5)
            elif name.endswith("proj.bias"):
                parameter.zero_()
        bias = torch.randn(2, D)
        if slow:
            bias[:, torch.arange(D) % (D // 2) < SLOW_DIMS] = 0
        model.model.layers[0].self_attn.k_proj.bias.copy_((bias * norm / bias.norm(dim=1, keepdim=True)).flatten())
    return model.eval()


@torch.inference_mode()
def divergence(model: PreTrainedModel, name: str, **options: Any) -> float:
    """Mean KL to the exact cache: 256 tokens at once, then 144 in chunks of 16."""
    ids = torch.randint(2, VOCABULARY, (2, 400), generator=torch.Generator().manual_seed(0))
    log_p = []
    with hf_kvcache.attach(model):
        for cache in (
            hf_kvcache.make_cache("paged_exact", model.config),
            hf_kvcache.make_cache(name, model.config, **options),
        ):
            model(ids[:, :256], **{CACHE: cache})
            steps = [model(ids[:, at : at + 16], **{CACHE: cache}).logits for at in range(256, 400, 16)]
            log_p.append(torch.cat(steps, dim=1).log_softmax(-1))
    exact, ours = log_p
    return (exact.exp() * (exact - ours)).sum(-1).mean().item()


def generate(model: PreTrainedModel, name: str, **options: Any) -> None:
    model.generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False, cache_implementation=name, cache_config=options
    )


@pytest.mark.parametrize("name", ["paged_int4", "paged_kivi4"])
def test_zero_points_absorb_a_bias_that_rope_hardly_turns(name: str) -> None:
    without, loud = divergence(biased(0), name), divergence(biased(600, slow=True), name)
    assert loud < 1.15 * without  # a rotation keeps a constant constant: each channel's zero point holds its share


def test_a_bias_that_rope_turns_costs_quality_and_an_exact_layer_gives_it_back() -> None:
    model = biased(600)
    clean = divergence(biased(0), "paged_int4", layers={0: "exact"})
    assert divergence(model, "paged_int4") > 2 * divergence(biased(0), "paged_int4")
    assert divergence(model, "paged_int4", layers={0: "exact"}) < 1.15 * clean


@pytest.mark.parametrize("name", ["paged_int4", "paged_int8", "paged_fp8"])
def test_generate_names_the_layers_and_the_remedy(name: str) -> None:
    with pytest.warns(UserWarning, match=r"key bias of layers 0 .*'layers': \{0: 'exact'\}"):
        generate(biased(600), name)


def test_only_what_zero_points_cannot_absorb_is_named() -> None:
    model = biased(600, slow=True)
    with pytest.warns(UserWarning, match="layers 0"):
        generate(model, "paged_int8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, "paged_int4")


@pytest.mark.parametrize(("norm", "options"), [(0, {}), (8, {}), (600, {"layers": {0: "exact"}})])
def test_silence_where_nothing_is_lost(norm: float, options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(biased(norm), "paged_int4", **options)
