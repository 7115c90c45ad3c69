"""NF4 (QLoRA, arXiv:2305.14314) keys and values as a row to compare with: transformers' quantized layer around
bitsandbytes' block-wise codec."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import QuantizedLayer

Encoded = tuple[torch.Size, torch.Tensor, Any]


class Nf4Layer(QuantizedLayer):
    """Codes of 4 bits and a float32 scale for every `q_group_size` numbers; the newest tokens exact."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> Encoded:
        from bitsandbytes.functional import quantize_4bit

        # In one dim: bitsandbytes 0.50 decodes wrongly on a CPU where the last dim is smaller than a block.
        codes, state = quantize_4bit(tensor.flatten(), blocksize=self.q_group_size, quant_type="nf4")
        return tensor.shape, codes, state

    def _dequantize(self, encoded: Encoded) -> torch.Tensor:
        from bitsandbytes.functional import dequantize_4bit

        shape, codes, state = encoded
        return dequantize_4bit(codes, state).view(shape)


def nf4_cache(config: PreTrainedConfig, **options: Any) -> Cache:
    """A cache of such layers; options: `q_group_size` and `residual_length`. ImportError without bitsandbytes."""
    import bitsandbytes  # noqa: F401

    return Cache(layers=[Nf4Layer(**options) for _ in range(config.get_text_config(decoder=True).num_hidden_layers)])
