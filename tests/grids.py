"""What the crossed tests are crossed over: tiny random models, formats, awkward shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    T5Config,
)

from hf_kvcache.config import cache_names
from hf_kvcache.formats.spec import FORMATS

VOCAB = 67
WINDOW = 12  # of the models with a sliding window: shorter than a page and than most prompts

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}

# Name -> how its config is made. Every config sees all the shapes that its architecture is known for.
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SMALL),
    "qwen2": lambda: Qwen2Config(**SMALL),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=32),
    "phi3": lambda: Phi3Config(**SMALL),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=1024,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}),
    "t5": lambda: T5Config(
        vocab_size=VOCAB,
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    ),
    "mistral": lambda: MistralConfig(**SMALL, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(
        **SMALL, tie_word_embeddings=False, head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=16
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SMALL, tie_word_embeddings=False, head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=16
    ),
    "gpt_oss": lambda: GptOssConfig(
        **SMALL,
        head_dim=16,
        sliding_window=WINDOW,
        num_local_experts=2,
        num_experts_per_tok=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}

FULL = ("llama", "qwen2", "qwen3", "phi3", "gpt2", "gpt_neox")  # decoders in which every layer sees everything
SLIDING = ("mistral", "gemma2", "gemma3", "gpt_oss")
DECODERS = FULL + SLIDING

GAIN = {"t5": 0.9, "gpt_oss": 1.3}  # of random weights: T5 does not scale its scores, and gpt-oss routes tokens by them

# Caches of exact numbers: any of them has to equal transformers' DynamicCache.
EXACT: dict[str, dict[str, Any]] = {
    "pages": {"page_size": 16},
    "ring": {"page_size": 16, "residual_length": 16, "sinks": 2},
}

FORMAT_NAMES = tuple(FORMATS)
LOSSY = tuple(name for name in FORMATS if FORMATS[name].key.scaled or FORMATS[name].value.scaled)
# Names for the tests that build a cache of each: of the other layouts, some formats of each kind.
CACHE_NAMES = tuple(
    name for name in cache_names() if name.startswith("paged_") or name in ("sliding_exact", "sliding_fp8", "sliding_int4")
)


def thinned(first: Iterable[Any], second: Iterable[Any], every: int = 4) -> list[Any]:
    """Pairs for `parametrize`: one in `every` along each diagonal always runs, so that each value of either list meets
    several of the other; the rest is marked slow.
    """
    return [
        pytest.param(a, b, marks=() if (i + j) % every == 0 else pytest.mark.slow)
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]


@functools.cache
def model(name: str, attn: str | None = None) -> PreTrainedModel:
    """A tiny random model in float32, built once a session. Its weights are large enough that logits differ clearly."""
    config = CONFIGS[name]()
    if name == "gemma2":
        attn = attn or "eager"  # transformers before 5.22 leaves its soft-cap out of sdpa without a word
    torch.manual_seed(20)
    classes = {"t5": "T5ForConditionalGeneration", "gemma3": "Gemma3ForCausalLM"}
    if name in classes:
        cls = getattr(transformers, classes[name])
        built = cls._from_config(config, **({"attn_implementation": attn} if attn else {}))
    else:
        built = transformers.AutoModelForCausalLM.from_config(config, **({"attn_implementation": attn} if attn else {}))
    with torch.no_grad():
        for key, parameter in built.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, GAIN.get(name, 2.0) * parameter.shape[-1] ** -0.5)
            elif key.endswith("k_proj.bias"):
                parameter.normal_(0, 8.0)  # Qwen2's keys are known for their bias
    built.generation_config.pad_token_id = 0
    return built.eval().requires_grad_(False)


def prompt(batch: int = 1, length: int = 21, seed: int = 0) -> torch.Tensor:
    """Token ids `[batch, length]`, no padding among them."""
    return torch.randint(2, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(lengths: tuple[int, ...], seed: int = 0) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """A left-padded batch as a model takes it, and its rows without padding, `[1, length]` each."""
    rows = [prompt(1, n, seed + i) for i, n in enumerate(lengths)]
    width = max(lengths)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - row.shape[1] :] = row[0]
        mask[i, width - row.shape[1] :] = 1
    return {"input_ids": ids, "attention_mask": mask}, rows


def cache_keyword() -> str:
    """What models of this transformers call the cache that they take."""
    import inspect

    from transformers import LlamaForCausalLM

    names = inspect.signature(LlamaForCausalLM.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


CACHE = cache_keyword()


def cache_of(output: Any) -> Any:
    """The cache in a model's or `generate`'s output."""
    return output[CACHE]
