"""Tiny random models of many architectures: what the matrix is made of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from tests.grids import CONFIGS, SMALL, VOCAB, WINDOW
from tests.grids import model as grid_model

_MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA: dict[str, Any] = {
    **SMALL,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def _of(model_type: str, base: dict[str, Any] = SMALL, **options: Any) -> Callable[[], Any]:
    return lambda: AutoConfig.for_model(model_type, **{**base, **options})


MLA: dict[str, Callable[[], Any]] = {
    "deepseek_v2": _of("deepseek_v2", _MLA),
    "deepseek_v2_no_q_lora": _of("deepseek_v2", _MLA, q_lora_rank=None),
    "deepseek_v3": _of("deepseek_v3", _MLA),
    "deepseek_v3_no_q_lora": _of("deepseek_v3", _MLA, q_lora_rank=None),
    "minicpm3": _of("minicpm3", _MLA),
    "glm4_moe_lite": _of("glm4_moe_lite", _MLA),
    "mistral4": _of("mistral4", _MLA),
    "youtu": _of("youtu", _MLA),
    "longcat_flash": _of(
        "longcat_flash", {k: v for k, v in _MLA.items() if k != "num_hidden_layers"}, num_layers=1, num_hidden_layers=2,
        ffn_hidden_size=64, expert_ffn_hidden_size=32, zero_expert_num=1, moe_topk=2, head_dim=8,
    ),
}  # fmt: skip

ARCHITECTURES: dict[str, Callable[[], Any]] = {
    **CONFIGS,
    "qwen2_moe": _of("qwen2_moe", **_MOE, shared_expert_intermediate_size=32),
    "qwen3_moe": _of("qwen3_moe", **_MOE, head_dim=16),
    "mixtral": _of("mixtral", **_MOE),
    "gemma": _of("gemma", head_dim=32),
    "cohere": _of("cohere"),
    "cohere2": _of("cohere2", sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]),
    "olmo2": _of("olmo2"),
    "glm4": _of("glm4", head_dim=16),
    "granite": _of("granite"),
    "starcoder2": _of("starcoder2", sliding_window=None),
    "stablelm": _of("stablelm"),
    "smollm3": _of("smollm3", no_rope_layers=[1, 0]),
    "opt": _of("opt", ffn_dim=96, word_embed_proj_dim=64),
    "bloom": _of("bloom", n_layer=2, n_head=4),
    "falcon": _of("falcon", multi_query=True, new_decoder_architecture=False),
    "mpt": _of("mpt", d_model=64, n_heads=4, n_layers=2, max_seq_len=1024),
    "phi": _of("phi"),
    "qwen3_next": _of(
        "qwen3_next", **_MOE, head_dim=16, shared_expert_intermediate_size=32, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"],
    ),
    "bart": _of(
        "bart", {k: v for k, v in SMALL.items() if k != "num_hidden_layers"}, d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96,
        decoder_start_token_id=1, forced_eos_token_id=None,
    ),
    **MLA,
}  # fmt: skip


@functools.cache
def tiny(name: str) -> Any:
    """The model, built once: random weights in float32, large enough that logits differ clearly."""
    if name in CONFIGS:
        return grid_model(name)
    config = ARCHITECTURES[name]()
    torch.manual_seed(20)
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    if type(config) not in auto._model_mapping:  # a decoder that transformers lists under text with images
        auto = transformers.AutoModelForPreTraining
    built = auto.from_config(config)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
    built.generation_config.pad_token_id, built.generation_config.eos_token_id = 0, None
    assert config.get_text_config().vocab_size == VOCAB
    return built.eval().requires_grad_(False)
