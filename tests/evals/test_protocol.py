"""The measurement itself: what is read, what is counted, what is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from hf_kvcache.evals import text
from hf_kvcache.evals.candidates import builder, parse
from hf_kvcache.evals.errors import EvalError, SelfTestError
from hf_kvcache.evals.protocol import Protocol, compare, one_pass
from hf_kvcache.evals.selftest import NoiseCache, self_test

PROTOCOL = Protocol(windows=4, window=72, prefill=40, chunk=1, batch=3)
CLOSE = 2e-3  # nats: float32 logits of another summation order, on a model whose weights are 15 times the usual size


@pytest.fixture
def rows(written):
    return text.windows(written, PROTOCOL.windows, PROTOCOL.window, None)


def run(model, rows, protocol, *names, **more):
    builders = {name: builder(parse(name), model.config) for name in names}
    done = []
    scores = compare(model, rows, protocol, {**builders, **more}, done.append)
    return scores, sum(done)


def test_the_exact_cache_against_itself_is_exactly_zero(tiny, rows):
    again = builder(parse("dynamic"), tiny.config)
    scores, _ = run(tiny, rows, PROTOCOL, "dynamic", again=again)
    assert (scores["again"].nll == scores["dynamic"].nll).all()
    assert (scores["again"].kl == 0).all()
    assert scores["again"].same.all()


def test_targets_are_counted_and_the_progress_adds_up(tiny, rows):
    scores, done = run(tiny, rows, PROTOCOL, "dynamic")
    assert scores["dynamic"].nll.shape == (4, 32)
    assert scores["dynamic"].tokens == 4 * 32
    assert done == 2 * 32  # two batches of windows, a pass a token


@pytest.mark.parametrize("chunk", [1, 5, 32])
@pytest.mark.parametrize("batch", [1, 4])
def test_exact_scores_do_not_depend_on_chunks_or_batches(tiny, rows, chunk, batch):
    protocol = dataclasses.replace(PROTOCOL, chunk=chunk, batch=batch)
    scores, _ = run(tiny, rows, protocol, "dynamic")
    np.testing.assert_allclose(scores["dynamic"].nll, one_pass(tiny, rows, PROTOCOL), atol=CLOSE)


def test_scores_are_those_of_a_plain_forward(tiny, rows):
    """One pass against logits taken by hand."""
    with torch.no_grad():
        logits = tiny(rows[:, :-1]).logits.log_softmax(-1)
    by_hand = -logits.gather(-1, rows[:, 1:, None])[..., 0][:, PROTOCOL.prefill :]
    np.testing.assert_allclose(one_pass(tiny, rows, PROTOCOL), by_hand.numpy(), atol=CLOSE)


def test_every_scored_token_reads_the_cache(tiny, rows):
    """Noise on read changes each window from its first target on."""
    scores, _ = run(tiny, rows, PROTOCOL, "dynamic", noise=lambda: NoiseCache(config=tiny.config))
    assert (scores["noise"].kl.min(axis=1) > 1e-3).all()
    assert scores["noise"].nll.mean() > scores["dynamic"].nll.mean() + 0.1


def test_fewer_bits_move_the_number(tiny, rows):
    scores, _ = run(tiny, rows, PROTOCOL, "dynamic", "paged_exact", "paged_int8", "paged_fp8")
    exact, int8, fp8 = (scores[name].kl.mean() for name in ("paged_exact", "paged_int8", "paged_fp8"))
    assert abs(exact) < 1e-5
    assert 10 * abs(exact) < int8 < fp8


def test_bytes_are_of_all_windows_at_their_ends(tiny, rows):
    scores, _ = run(tiny, rows, PROTOCOL, "dynamic", "paged_fp8")
    elements = 4 * 72 * 2 * 2 * (16 + 16)  # windows, tokens, layers, KV heads, D_k + D_v
    assert scores["dynamic"].elements == scores["paged_fp8"].elements == elements
    assert scores["dynamic"].bytes == 4 * elements
    assert scores["paged_fp8"].bytes == sum(scores["paged_fp8"].bytes_by_kind.values())
    assert scores["paged_fp8"].cache_class == "PagedCache"
    assert scores["dynamic"].layer_classes == ["DynamicLayer"]


class BrokenCache(DynamicCache):
    """Gives NaN once it holds 50 tokens."""

    def update(self, keys, values, layer_idx, *args, **kwargs):
        keys, values = super().update(keys, values, layer_idx, *args, **kwargs)
        return (keys * float("nan"), values) if keys.shape[-2] >= 50 else (keys, values)


def test_logits_that_are_not_finite_are_refused(tiny, rows):
    with pytest.raises(EvalError, match="broken: logits are not finite at token 49 of window 0"):
        run(tiny, rows, PROTOCOL, "dynamic", broken=lambda: BrokenCache(config=tiny.config))


def test_a_ruled_out_token_has_no_weight(tiny, rows, monkeypatch):
    """A model that gives some tokens -inf is compared on the rest."""
    weights = tiny.forward

    def forward(*args, **kwargs):
        output = weights(*args, **kwargs)
        output.logits[..., 0] = -torch.inf
        return output

    forward.__signature__ = __import__("inspect").signature(tiny.forward)
    monkeypatch.setattr(tiny, "forward", forward)
    scores, _ = run(tiny, rows.clamp(min=1), PROTOCOL, "dynamic", "paged_int8")
    assert np.isfinite(scores["paged_int8"].kl).all()
    assert scores["paged_int8"].kl.mean() > 0


def test_self_test_passes_where_the_cache_is_read(tiny, rows):
    assert self_test(tiny, rows, PROTOCOL, builder(parse("dynamic"), tiny.config), seed=0) > 5


def test_self_test_leaves_the_random_state_alone(tiny, rows):
    before = torch.get_rng_state()
    self_test(tiny, rows, PROTOCOL, builder(parse("dynamic"), tiny.config), seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_self_test_refuses_a_model_that_ignores_the_cache(tiny, rows, monkeypatch):
    """The mistake it is there for: logits that do not come from the stored keys and values."""
    plain = tiny.forward

    def forward(input_ids, cache=None, past_key_values=None, use_cache=None, logits_to_keep=0):
        given = cache if cache is not None else past_key_values
        seen = torch.cat([given.seen, input_ids], dim=1) if hasattr(given, "seen") else input_ids
        given.seen = seen
        return plain(seen, use_cache=False, logits_to_keep=logits_to_keep)

    monkeypatch.setattr(tiny, "forward", forward)
    with pytest.raises(SelfTestError, match="does not read through the cache; nothing is reported"):
        self_test(tiny, rows, PROTOCOL, lambda: DynamicCache(), seed=0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prefill": 72}, "leaves nothing to score"),
        ({"prefill": 0}, "--prefill is 0"),
        ({"chunk": 0}, "--chunk is 0"),
        ({"windows": -1}, "--windows is -1"),
        ({"batch": 0}, "--batch is 0"),
    ],
)
def test_an_impossible_protocol_is_refused(changes, words):
    with pytest.raises(EvalError, match=words):
        dataclasses.replace(PROTOCOL, **changes)


def test_the_context_is_the_same_in_every_window():
    assert PROTOCOL.mean_context == np.mean(np.arange(PROTOCOL.prefill + 1, PROTOCOL.window + 1))
