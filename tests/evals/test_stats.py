"""The summary against sums done by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hf_kvcache.evals.stats import bootstrap_interval, quality


def test_quality_by_hand():
    exact = np.array([[1.0, 3.0], [2.0, 2.0]])
    nll = exact + np.array([[0.1, 0.3], [0.0, 0.0]])
    kl = np.array([[0.0, 0.4], [0.0, 0.0]])
    found = quality(nll, exact, kl, np.array([[True, False], [True, True]]), seed=0)
    assert found.perplexity == pytest.approx(math.exp(2.1))
    assert found.change_percent == pytest.approx(100 * (math.exp(0.1) - 1))
    assert found.kl_mean == pytest.approx(0.1)
    assert found.kl_p99 == pytest.approx(0.4 * 0.97)  # numpy interpolates between the 3rd and the 4th of 4 values
    assert found.top1 == 0.75


def test_an_exact_cache_changes_nothing():
    exact = np.random.default_rng(0).random((4, 9))
    found = quality(exact, exact, np.zeros((4, 9)), np.ones((4, 9), dtype=bool), seed=0)
    assert (found.change_percent, found.change_interval, found.kl_mean, found.top1) == (0.0, (0.0, 0.0), 0.0, 1.0)


def test_interval_pairs_windows():
    """Hard and easy windows do not widen the interval: only their differences count."""
    exact = np.array([[1.0], [9.0], [5.0], [3.0]])
    found = quality(exact + 0.01, exact, np.zeros((4, 1)), np.ones((4, 1), dtype=bool), seed=0)
    assert found.change_interval == pytest.approx((found.change_percent, found.change_percent))


def test_interval_covers_the_mean_and_is_reproducible():
    differences = np.random.default_rng(1).normal(0.5, 1.0, 40)
    low, high = bootstrap_interval(differences, seed=3)
    assert low < differences.mean() < high
    error = differences.std(ddof=1) / math.sqrt(40)
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.15)  # the normal interval, within resampling error
    assert bootstrap_interval(differences, seed=3) == (low, high)


def test_one_window_has_no_interval():
    assert bootstrap_interval(np.array([0.1]), seed=0) is None
