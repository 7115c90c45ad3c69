"""How many weights a model has, how many a step reads, and what a prefill computes: from its config alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_kvcache.errors import ConfigError
from hf_kvcache.planner import LayerShape, first_of, layers_of

# Bits of a stored weight, scales included. 4 bits: a 16-bit scale for 32 weights. Embeddings and the head keep 16 bits.
WEIGHT_BITS = {"32bit": 32.0, "16bit": 16.0, "8bit": 8.0, "4bit": 4.5}
_PLAIN_MLP = ("gpt2", "gpt_neox", "gptj", "gpt_bigcode", "opt", "phi", "falcon", "bloom", "codegen", "starcoder2", "mpt", "t5")
_TIED = ("gemma", "gpt2", "gpt_bigcode", "opt", "bloom", "falcon", "t5")  # unless the config says otherwise


@dataclass(frozen=True)
class Weights:
    """Matrices of the decoder; norms and biases, some thousandths of a percent to a few thousandths, are left out.

    dense: read in every step, without embeddings. head: the output head, read in every step. embedding: the input
    table if it is not the head itself; a step reads one row of it. expert: of one routed expert in one layer; routed:
    experts of such a layer; chosen: how many of them a token goes through; expert_layers: layers that have them.
    """

    dense: int
    head: int
    embedding: int
    expert: int = 0
    routed: int = 0
    chosen: int = 0
    expert_layers: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.head + self.embedding + self.expert * self.routed * self.expert_layers

    @property
    def active(self) -> int:
        """Those that one token goes through."""
        return self.dense + self.head + self.expert * self.chosen * self.expert_layers

    def nbytes(self, bits: float) -> int:
        """Bytes in memory."""
        wide = (self.head + self.embedding) * max(bits, 16.0)
        return round((wide + (self.total - self.head - self.embedding) * bits) / 8)

    def read(self, bits: float, batch: int) -> int:
        """Bytes that a decode step of `batch` rows reads. Experts: as many as even routing is expected to touch."""
        touched = self.routed * (1 - (1 - self.chosen / self.routed) ** batch) if self.routed else 0.0
        return round((self.head * max(bits, 16.0) + (self.dense + self.expert * touched * self.expert_layers) * bits) / 8)


def weights_of(config: Mapping[str, Any]) -> Weights | None:
    """From a `config.json` as a dict; None where it does not say how wide the model is."""
    config = {**config, **config.get("text_config", {})}
    hidden = first_of(config, "hidden_size", "n_embd", "d_model", "dim")
    vocab = config.get("vocab_size")
    if hidden is None or vocab is None:
        return None
    family = config.get("model_type", "")
    layers = layers_of(config)
    inner = first_of(config, "intermediate_size", "n_inner", "d_ff", "ffn_dim") or 4 * hidden
    matrices = 2 if family in _PLAIN_MLP else 3
    tied = config.get("tie_word_embeddings", family.startswith(_TIED))
    routed = first_of(config, "num_local_experts", "n_routed_experts", "num_experts") or 0
    plain = len(layers)
    expert = shared = chosen = 0
    if routed:
        width = config.get("moe_intermediate_size") or inner
        expert = 3 * hidden * width
        chosen = first_of(config, "num_experts_per_tok", "experts_per_token", "num_experts_per_token") or 1
        plain = config.get("first_k_dense_replace") or 0
        shared = 3 * hidden * (config.get("shared_expert_intermediate_size") or width * (config.get("n_shared_experts") or 0))
        shared += hidden * routed  # the router
    attention = sum(_attention(config, hidden, shape) for shape in layers)
    dense = attention + plain * matrices * hidden * inner + (len(layers) - plain) * shared
    return Weights(dense, vocab * hidden, 0 if tied else vocab * hidden, expert, routed, chosen, len(layers) - plain if routed else 0)


def _attention(config: Mapping[str, Any], hidden: int, shape: LayerShape) -> int:
    """Weights of one layer's attention. A layer without a cache counts as one of the same heads."""
    heads, key, value = query_shape(config)
    if config.get("kv_lora_rank"):
        latent, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
        rank = int(config.get("q_lora_rank") or 0)
        query = hidden * rank + rank * heads * key if rank else hidden * heads * key
        return query + hidden * (latent + rope) + latent * heads * (key - rope + value) + heads * value * hidden
    key, value = (shape.key_dim, shape.value_dim) if shape.stored else (key, value)
    kv_heads = shape.heads or first_of(config, "num_key_value_heads") or heads
    return hidden * heads * key + hidden * kv_heads * (key + value) + heads * value * hidden


def query_shape(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Query heads, and the widths of a query and of a value at prefill (latent attention expands them)."""
    config = {**config, **config.get("text_config", {})}
    heads = first_of(config, "num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads")
    if heads is None:
        raise ConfigError("the config does not say how many attention heads the model has")
    if config.get("kv_lora_rank"):
        value = config.get("v_head_dim") or 128
        return heads, (config.get("qk_nope_head_dim") or 128) + config["qk_rope_head_dim"], value
    hidden = first_of(config, "hidden_size", "n_embd", "d_model", "dim") or 0
    width = first_of(config, "head_dim", "d_kv") or hidden // heads
    return heads, width, config.get("v_head_dim") or width


def prefill_flops(config: Mapping[str, Any], weights: Weights | None, batch: int, context: int) -> int:
    """Floating-point operations of a prefill, 2 for a multiplication with its addition.

    Weights (where known) act on every token, the head on the last one of a row; a token attends to what it sees.
    """
    heads, key, value = query_shape(config)
    latent = bool(config.get("kv_lora_rank"))
    pairs = 0
    for shape in layers_of(config):
        if shape.stored or config.get("num_kv_shared_layers"):
            seen = context if shape.window is None else min(context, shape.window)
            both = key + value if latent or not shape.stored else shape.key_dim + shape.value_dim
            pairs += (seen * (seen + 1) // 2 + (context - seen) * seen) * heads * both
    linear = 0 if weights is None else 2 * (weights.active - weights.head) * context + 2 * weights.head
    return batch * (linear + 2 * pairs)
