"""A decode step of one DeepSeek-V3-shaped attention layer on the CPU: transformers' own cache, and latents in pages.

`python benchmarks/latent.py --history 8192`: both in one process, in turns, medians and the ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import torch
import transformers
from transformers import DeepseekV3Config, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

import hf_kvcache
from hf_kvcache.integration import absorbing
from hf_kvcache.integration.bases import BASES


def layer_of(heads: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """The attention layer, its weights random, and its config."""
    config = DeepseekV3Config(num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=heads)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return DeepseekV3Attention(config, 0).to(dtype).eval().requires_grad_(False), config


def step(layer: Any, x: torch.Tensor, cache: Any, ours: bool) -> tuple[float, torch.Tensor]:
    """Seconds of one decode step, and its output; the cache is as before afterwards."""
    cos = torch.ones(1, 1, layer.qk_rope_head_dim, dtype=x.dtype)
    layer.config._attn_implementation_internal = BASES["sdpa"] if ours else "sdpa"
    start = time.perf_counter()
    out = layer(x, (cos, torch.zeros_like(cos)), None, cache)[0]
    seconds = time.perf_counter() - start
    cache.crop(-1)
    return seconds, out


def main() -> None:
    """Print one line for each cache, and the ratio."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--history", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--caches", nargs="+", default=["latent_exact", "latent_fp8"])
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    dtype = getattr(torch, given.dtype)
    layer, config = layer_of(given.heads, dtype)
    absorbing.attach(layer)
    latents = torch.randn(1, 1, given.history, config.kv_lora_rank, dtype=dtype)
    rope = torch.randn(1, 1, given.history, config.qk_rope_head_dim, dtype=dtype)
    caches = {"stock": DynamicCache(config=config)}
    caches |= {name: hf_kvcache.make_cache(name, config) for name in given.caches}
    for cache in caches.values():
        cache.update(latents, rope, 0)
    x = torch.randn(1, 1, config.hidden_size, dtype=dtype)
    times: dict[str, list[float]] = {name: [] for name in caches}
    outputs = {}
    with torch.no_grad():
        for _ in range(given.rounds):
            for name, cache in caches.items():
                seconds, outputs[name] = step(layer, x, cache, name != "stock")
                times[name].append(seconds)
    threads = f"{torch.get_num_threads()} threads, torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{given.heads} heads, {config.kv_lora_rank}+{config.qk_rope_head_dim}, {given.history} tokens, {given.dtype}, {threads}")
    stock = statistics.median(times["stock"])
    for name, values in times.items():
        gap = float((outputs[name] - outputs["stock"]).abs().max() / outputs["stock"].abs().max())
        median = statistics.median(values)
        print(f"{name}: {1e3 * median:.1f} ms, stock / this = {stock / median:.1f}, largest difference {gap:.1e} of the output")


if __name__ == "__main__":
    main()
