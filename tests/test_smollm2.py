"""A real model: exact pages write what DynamicCache writes. Runs where `make demo` has prepared SmolLM2-135M."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_kvcache.evals.models import SMOLLM2, home, load
from tests.grids import CACHE

pytestmark = pytest.mark.skipif(
    not (home() / "smollm2" / "model.safetensors").is_file(), reason="SmolLM2-135M is not here: `make demo` prepares it"
)
PROMPTS = ["Once upon a time a river", "List three fruits, one a line.\nApple\nPear\nApple\nPear\nApple\n"]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "prefill in chunks": {"prefill_chunk_size": 5},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
}


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    model, tokenizer = load(SMOLLM2)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model, tokenizer


@pytest.mark.parametrize("mode", MODES)
def test_exact_pages_write_the_same_tokens(smollm2: tuple[Any, Any], mode: str) -> None:
    model, tokenizer = smollm2
    texts = PROMPTS[1:] if mode == "prompt lookup" else PROMPTS  # lookup takes one row
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    written = []
    for cache in (None, "paged_exact"):
        torch.manual_seed(0)
        given = {"do_sample": False, "max_new_tokens": 20, **MODES[mode], "cache_implementation": cache}
        written.append(model.generate(**inputs, **given))
    assert torch.equal(*written)


@torch.no_grad()
def test_logits_are_those_of_dynamic_cache_over_pages(smollm2: tuple[Any, Any]) -> None:
    from transformers import DynamicCache

    import hf_kvcache

    model, tokenizer = smollm2
    ids = tokenizer(" ".join(PROMPTS) * 6, return_tensors="pt").input_ids[:, :140]
    steps = [ids[:, :100], *ids[:, 100:116].split(1, 1), ids[:, 116:140]]  # a prompt, single tokens, a chunk
    with hf_kvcache.attach(model):
        ours, theirs = hf_kvcache.make_cache("paged_exact", model.config), DynamicCache(config=model.config)
        for step in steps:
            a, b = (model(step, **{CACHE: cache}).logits for cache in (ours, theirs))
            assert (a - b).abs().max() / b.abs().max() < 1e-5
