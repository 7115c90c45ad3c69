"""The published figures of public models, and their bytes by hand-written arithmetic.

The configs hold what each model's `config.json` says about shapes, and nothing else of it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_kvcache.planner import layers_of, plan
from hf_kvcache.planning.weights import prefill_flops, weights_of

CONFIGS = Path(__file__).parent / "configs"
T = 65_536  # tokens: at a multiple of the page, a window of w keeps w tokens in whole pages
# Bytes of exact 16-bit keys and values of one row of T tokens: layers x tokens x heads x (D_k + D_v) x 2 bytes.
EXACT = {
    "llama-3.1-8b": 32 * T * 8 * (128 + 128) * 2,
    "llama-3.1-70b": 80 * T * 8 * (128 + 128) * 2,
    "llama-3.1-405b": 126 * T * 8 * (128 + 128) * 2,
    "qwen3-8b": 36 * T * 8 * (128 + 128) * 2,
    "qwen3-30b-a3b": 48 * T * 4 * (128 + 128) * 2,
    "mistral-7b-v0.1": 32 * 4096 * 8 * (128 + 128) * 2,
    "mixtral-8x7b-v0.1": 32 * T * 8 * (128 + 128) * 2,
    "gemma-2-9b": (21 * T + 21 * 4096) * 8 * (256 + 256) * 2,
    "gemma-3-27b": (10 * T + 52 * 1024) * 16 * (128 + 128) * 2,
    "gpt-oss-20b": (12 * T + 12 * 128) * 8 * (64 + 64) * 2,
    "gpt-oss-120b": (18 * T + 18 * 128) * 8 * (64 + 64) * 2,
    "deepseek-v2": 60 * T * (512 + 64) * 2,
    "deepseek-v3": 61 * T * (512 + 64) * 2,
    "kimi-k2": 61 * T * (512 + 64) * 2,
    "glm-4.5-air": 46 * T * 8 * (128 + 128) * 2,
    "phi-4": 40 * T * 10 * (128 + 128) * 2,
}
# A code a number, and 2 bytes of scale for each key and each value of a head.
FP8 = {
    "llama-3.1-70b": 80 * T * 8 * (128 + 2 + 128 + 2),
    "gemma-3-27b": (10 * T + 52 * 1024) * 16 * (128 + 2 + 128 + 2),
    "gpt-oss-20b": (12 * T + 12 * 128) * 8 * (64 + 2 + 64 + 2),
    "deepseek-v3": 61 * T * (512 + 2 + 64 * 2),  # latents; rope keys in 16 bits
}
# A page of 64 tokens: half a byte a number; keys: scale and zero for 32 tokens of a channel; values: for 32 channels of a
# token. The 128 newest tokens are not in pages but in a ring with room for a page more, in 16 bits.
PAGE4 = (64 * 128 // 2 + 2 * 128 * 4) + (64 * 128 // 2 + 64 * 4 * 4)
KIVI4 = {"llama-3.1-8b": 32 * 8 * ((T // 64 - 2) * PAGE4 + (128 + 64) * (128 + 128) * 2)}
# Published counts of parameters, in all and for a token, in billions.
PARAMETERS = {
    "llama-3.1-8b": (8.03, None),
    "llama-3.1-70b": (70.6, None),
    "llama-3.1-405b": (405.9, None),
    "qwen3-8b": (8.2, None),
    "qwen3-30b-a3b": (30.5, 3.3),
    "mistral-7b-v0.1": (7.24, None),
    "mixtral-8x7b-v0.1": (46.7, 12.9),
    "gemma-2-9b": (9.24, None),
    "gemma-3-27b": (27.0, None),
    "gpt-oss-20b": (20.9, 3.6),
    "gpt-oss-120b": (116.8, 5.1),
    "deepseek-v2": (236, 21),
    "deepseek-v3": (671, 37),
    "kimi-k2": (1026, 32),
    "glm-4.5-air": (106.9, 12),
    "phi-4": (14.7, None),
}


def config(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def test_every_config_has_its_arithmetic():
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(EXACT) == set(PARAMETERS)


@pytest.mark.parametrize(("name", "nbytes"), EXACT.items(), ids=EXACT)
def test_exact(name, nbytes):
    found = plan(layers_of(config(name)), "paged_exact", 1, T)
    assert found.nbytes == nbytes
    assert plan(layers_of(config(name)), "paged_exact", 32, T).nbytes == 32 * nbytes


@pytest.mark.parametrize(
    ("cache", "name", "nbytes"),
    [("paged_fp8", *item) for item in FP8.items()] + [("paged_kivi4", *item) for item in KIVI4.items()],
)
def test_compressed(cache, name, nbytes):
    assert plan(layers_of(config(name)), cache, 1, T).nbytes == nbytes


@pytest.mark.parametrize(("name", "counts"), PARAMETERS.items(), ids=PARAMETERS)
def test_weights(name, counts):
    """Published counts are rounded to three digits; active ones to two, and some count the input table, some not."""
    total, active = counts
    found = weights_of(config(name))
    assert found.total == pytest.approx(total * 1e9, rel=5e-3)
    if active is None:
        assert found.active == found.total - found.embedding
    else:
        assert found.active <= active * 1.1e9
        assert found.active + found.embedding >= active * 0.95e9


def test_a_step_reads_more_experts_the_more_rows_it_has():
    weights = weights_of(config("mixtral-8x7b-v0.1"))
    assert weights.read(16, 1) == weights.active * 2
    everything = (weights.total - weights.embedding) * 2
    assert weights.read(16, 1) < weights.read(16, 4) < everything
    assert weights.read(16, 64) == pytest.approx(everything, rel=1e-6)
    assert weights.nbytes(16) == weights.total * 2


def test_prefill_flops_of_a_model_by_hand():
    """8 B model, 4096 tokens: two for each weight and token, the head once; then pairs of tokens, QK and PV."""
    weights = weights_of(config("llama-3.1-8b"))
    pairs = 4096 * 4097 // 2
    head = 128_256 * 4096
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
    wanted = 2 * matrices * 4096 + 2 * head + 32 * 2 * pairs * 32 * (128 + 128)
    assert prefill_flops(config("llama-3.1-8b"), weights, 1, 4096) == wanted
    assert prefill_flops(config("llama-3.1-8b"), weights, 3, 4096) == 3 * wanted


def test_a_window_bounds_the_pairs():
    narrow = config("mistral-7b-v0.1")
    pairs = 4096 * 4097 // 2 + (T - 4096) * 4096
    assert prefill_flops(narrow, None, 1, T) == 32 * 2 * pairs * 32 * (128 + 128)
