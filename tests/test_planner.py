"""The planner against hand-written arithmetic, and against caches that were really filled."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hf_kvcache import planner
from hf_kvcache.errors import ConfigError
from tests.grids import CACHE_NAMES

LLAMA_70B = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}


def exact(config: dict, batch: int, context: int) -> int:
    return planner.plan(planner.layers_of(config), "paged_exact", batch, context).nbytes


def test_known_sizes() -> None:
    """80 layers of 8 heads of 128 in 16 bits: 327,680 bytes a token, 80 GiB for 32 rows of 8192, 40 GiB for 131,072."""
    assert exact(LLAMA_70B, 1, 64) == 64 * 327_680
    assert exact(LLAMA_70B, 32, 8192) == 85_899_345_920
    assert exact(LLAMA_70B, 1, 131_072) == 40 * 2**30
    assert exact({**LLAMA_70B, "num_key_value_heads": 64}, 1, 64) == 8 * 64 * 327_680
    fp8 = planner.plan(planner.layers_of(LLAMA_70B), "paged_fp8", 1, 131_072)
    assert fp8.codes == 20 * 2**30
    assert fp8.scales == fp8.codes // 128 * 2  # a 2-byte scale for 128 codes


def test_latent_layers_hold_latent_and_rope_key() -> None:
    layers = planner.layers_of(
        {"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "hidden_size": 7168}
    )
    assert planner.plan(layers, "paged_exact", 1, 64).nbytes == 61 * 64 * (512 + 64) * 2


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, [4096] * 6),
        ({"model_type": "gemma2", "sliding_window": 4096}, [4096, None] * 3),
        ({"model_type": "gemma3_text", "sliding_window": 512}, [512] * 5 + [None]),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, [None] * 6),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 4}, [None] * 4 + [64] * 2),
        ({"layer_types": ["linear_attention", "full_attention"] * 3}, [None] * 6),
    ],
    ids=["mistral", "gemma2", "gemma3", "qwen2-off", "qwen2-on", "hybrid"],
)
def test_windows(config: dict, windows: list[int | None]) -> None:
    base = {"num_hidden_layers": 6, "num_attention_heads": 4, "hidden_size": 64}
    layers = planner.layers_of({**base, **config})
    assert [layer.window for layer in layers] == windows
    assert [layer.stored for layer in layers].count(False) == (3 if "layer_types" in config else 0)


def test_nested_text_config() -> None:
    layers = planner.layers_of({"text_config": LLAMA_70B, "vision_config": {"num_hidden_layers": 3}})
    assert len(layers) == 80


@pytest.mark.parametrize("name", CACHE_NAMES)
@pytest.mark.parametrize("context", [1, 16, 17, 63, 200])
def test_a_plan_equals_what_is_allocated(name: str, context: int) -> None:
    import torch
    from transformers import MistralConfig

    import hf_kvcache

    config = MistralConfig(
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, hidden_size=128, sliding_window=48
    )
    config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    cache = hf_kvcache.make_cache(name, config)
    for layer in range(3):
        keys = torch.randn(2, 2, context, 32, dtype=torch.bfloat16)
        cache.update(keys, keys, layer)
    held = cache.stats()["bytes"]
    del held["tables"]
    planned = planner.plan(planner.layers_of({**config.to_dict(), "head_dim": 32}), name, 2, context)
    assert {kind: getattr(planned, kind) for kind in held} == held


@pytest.mark.parametrize(
    ("change", "words"),
    [({"dtype": "int8"}, "accepted are float32"), ({"batch": 0}, "batch=0"), ({"name": "paged_fp9"}, "Did you mean")],
)
def test_errors(change: dict, words: str) -> None:
    arguments = {"name": "paged_fp8", "batch": 1, "context": 1, **change}
    with pytest.raises(ConfigError, match=words):
        planner.plan(planner.layers_of(LLAMA_70B), **arguments)
    with pytest.raises(ConfigError, match="does not say"):
        planner.layers_of({"hidden_size": 8})


def test_it_needs_no_torch() -> None:
    code = "import sys, hf_kvcache.planner; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
