"""Does the measurement see damage? A cache that returns noise must raise the number, or nothing is reported."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from hf_kvcache.evals.candidates import EXACT
from hf_kvcache.evals.errors import SelfTestError
from hf_kvcache.evals.protocol import Builder, Protocol, compare
from hf_kvcache.evals.stats import quality

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCORED = 32  # tokens; more where a chunk is longer
LEAST_RISE = 5.0  # percent of perplexity


class NoiseCache(DynamicCache):
    """Every read of stored tokens gives noise of their own size; new tokens come back as they are.

    An empty cache returns what it is given, as quantized caches do: scoring in one pass would not notice.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Cache.update`, `[B, H, T, D]` each."""
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        stored = keys.shape[-2] - key_states.shape[-2]
        return self._noisy(keys, stored), self._noisy(values, stored)

    @staticmethod
    def _noisy(states: torch.Tensor, stored: int) -> torch.Tensor:
        if stored == 0:
            return states
        old, new = states[..., :stored, :], states[..., stored:, :]
        return torch.cat([torch.randn_like(old) * old.std(), new], dim=-2)


def self_test(model: PreTrainedModel, windows: torch.Tensor, protocol: Protocol, exact: Builder, seed: int) -> float:
    """Read the start of the first window, in the protocol's own steps, through noise; the rise in percent.

    Raises SelfTestError when perplexity rises by less than 5 %.
    """
    window = min(protocol.window, protocol.prefill + max(SCORED, protocol.chunk))
    small = dataclasses.replace(protocol, windows=1, batch=1, window=window)
    builders: dict[str, Builder] = {EXACT: exact, "noise": lambda: NoiseCache(config=model.config)}
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        scores = compare(model, windows[:1, : window + 1], small, builders, advance=lambda _: None)
    noise = scores["noise"]
    rise = quality(noise.nll, scores[EXACT].nll, noise.kl, noise.same, seed).change_percent
    if rise < LEAST_RISE:
        raise SelfTestError(
            f"self-test failed: a cache that returns noise changes perplexity by {rise:+.2f} %, less than "
            f"+{LEAST_RISE:.0f} %, so this measurement does not read through the cache; nothing is reported"
        )
    return rise
