"""What one cache cost: perplexity with a paired interval, KL divergence, agreement."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Quality:
    """A cache against the exact cache on the same targets.

    perplexity: exp of the mean negative log-likelihood (nats) over all targets.
    change_percent: of perplexity, against the exact cache; `change_interval` is its 95 % bootstrap interval over
        windows, each window paired with itself, or None for a single window.
    kl_mean, kl_p99: KL(exact || cache) of the next-token distribution, in nats: mean and 99th percentile.
    top1: share of targets where both put the same token first.
    """

    perplexity: float
    change_percent: float
    change_interval: tuple[float, float] | None
    kl_mean: float
    kl_p99: float
    top1: float


def quality(nll: np.ndarray, exact_nll: np.ndarray, kl: np.ndarray, same: np.ndarray, seed: int) -> Quality:
    """Summarise `[windows, targets]` arrays: negative log-likelihoods, KL divergences, equal first choices."""
    differences = (nll - exact_nll).mean(axis=1)
    interval = bootstrap_interval(differences, seed)
    return Quality(
        perplexity=math.exp(nll.mean()),
        change_percent=_percent(differences.mean()),
        change_interval=None if interval is None else (_percent(interval[0]), _percent(interval[1])),
        kl_mean=float(kl.mean()),
        kl_p99=float(np.quantile(kl, 0.99)),
        top1=float(same.mean()),
    )


def bootstrap_interval(per_window: np.ndarray, seed: int) -> tuple[float, float] | None:
    """Percentile interval of the mean of `[windows]` paired differences; None for fewer than two windows."""
    count = len(per_window)
    if count < 2:
        return None
    picks = np.random.default_rng(seed).integers(0, count, size=(RESAMPLES, count))
    low, high = np.quantile(per_window[picks].mean(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _percent(log_ratio: float) -> float:
    """Change of perplexity in percent from a difference of mean negative log-likelihoods."""
    return 100 * math.expm1(log_ratio)
