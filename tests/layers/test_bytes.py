"""What is stored: however tokens arrive, sealed once, row by row; and what stays exact."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from hf_kvcache.formats.spec import FORMATS
from tests.grids import FORMAT_NAMES, LOSSY, thinned
from tests.layers.util import feed, layers, page_bytes, plain, states

ARRIVALS = ([40], [1] * 40, [7, 33], [16, 24], [39, 1], [15, 1, 1, 23])
OPTIONS = {"defaults": {}, "ring": {"residual_length": 5}, "ring and sinks": {"residual_length": 3, "sinks": 2}}


def page(name: str) -> int:
    """A page size that every group of the format divides."""
    spec = FORMATS[name]
    return max([16, *(side.group or 16 for side in (spec.key, spec.value) if side.per == "channel")])


def build(name: str, **options: object):
    return layers(f"paged_{name}", **{"page_size": page(name), **options})


@pytest.mark.parametrize(("name", "options"), thinned(FORMAT_NAMES, OPTIONS, every=3))
def test_however_tokens_arrive_the_bytes_are_the_same(name: str, options: str) -> None:
    k, v = states(40 + 8 * page(name), 2)
    rest = [1] * (8 * page(name))
    first = None
    for arrival in ARRIVALS:
        (layer,) = build(name, **OPTIONS[options])
        feed(layer, k, v, [*arrival, *([len(rest)] if arrival == [1] * 40 else rest)])
        bytes_ = [page_bytes(layer, b) for b in range(2)]
        # Only whole fields are compared: what lies between them is never written.
        fields = [
            [raw[f.offset : f.offset + f.nbytes] for f in layer.layout.fields.values()] for row in bytes_ for raw in row
        ]
        assert len(fields) >= 2 * 4
        first = first or fields
        assert len(fields) == len(first)
        for a, b in zip(fields, first, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("exact", torch.float32), ("exact", torch.float16), *((name, torch.bfloat16) for name in FORMAT_NAMES)],
)
def test_newest_tokens_and_sinks_are_exact_at_every_step(name: str, dtype: torch.dtype) -> None:
    R, S, steps = 20, 3, 300
    (layer,) = build(name, residual_length=R, sinks=S)
    k, v = states(steps + 37, 1, dtype=dtype)
    feed(layer, k[:, :, :37], v[:, :, :37], [37])
    for t in range(37, steps + 37):
        keys, values = layer.update(k[:, :, t : t + 1], v[:, :, t : t + 1])
        if t % 7 and t > 60:  # decoding everything at each step would take minutes
            keys, values = None, None
        ring, table = layer.ring, layer.kind.table
        C, sealed = ring.keys.shape[2], int(table.sealed[0])
        assert t + 1 - sealed >= R
        assert t + 1 - sealed < R + table.page_size
        newest = np.arange(t + 1 - R, t + 1)
        assert torch.equal(ring.keys[0][:, newest % C], k[0][:, newest])
        assert torch.equal(ring.values[0][:, newest % C], v[0][:, newest])
        assert torch.equal(layer.sinks.keys, k[:, :, :S])
        assert torch.equal(layer.sinks.values, v[:, :, :S])
        if keys is not None:
            for got, given in ((plain(keys), k), (plain(values), v)):
                assert torch.equal(got[:, :, :S], given[:, :, :S])
                assert torch.equal(got[:, :, t + 1 - R : t + 1], given[:, :, t + 1 - R : t + 1])
                assert torch.isfinite(got).all()


@pytest.mark.parametrize("residual", [0, 9])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_sealed_bytes_never_change(name: str, residual: int) -> None:
    (layer,) = build(name, residual_length=residual)
    P = page(name)
    k, v = states(6 * P, 2)
    feed(layer, k[:, :, : 3 * P], v[:, :, : 3 * P], [3 * P])
    before = [page_bytes(layer, b) for b in range(2)]
    feed(layer, k[:, :, 3 * P :], v[:, :, 3 * P :], [1] * P + [2 * P])
    layer.crop(-2 * P)
    layer.reorder_cache(torch.tensor([1, 0]))
    layer.update(*states(50, 2, seed=5))
    after = [page_bytes(layer, b) for b in (1, 0)]
    for old, new in zip(before, after, strict=True):
        assert len(new) > len(old) >= 2
        assert all(torch.equal(a, b) for a, b in zip(old, new, strict=False))


@pytest.mark.parametrize(("name", "options"), thinned(FORMAT_NAMES, OPTIONS, every=3))
def test_a_row_does_not_see_its_neighbour(name: str, options: str) -> None:
    P = page(name)
    k, v = states(3 * P + 5, 2)
    pieces = [2 * P + 3, *[1] * 2, P]
    got = []
    for factor in (1.0, 100.0, float("nan")):
        (layer,) = build(name, **OPTIONS[options])
        loud = torch.tensor([1.0, factor]).view(2, 1, 1, 1)
        feed(layer, k * loud, v * loud, pieces)
        keys, values = layer.update(*(x * loud for x in states(1, 2, seed=4)))
        got.append((page_bytes(layer, 0), plain(keys)[0], plain(values)[0]))
    for pages, keys, values in got[1:]:
        assert all(torch.equal(a, b) for a, b in zip(pages, got[0][0], strict=True))
        assert torch.equal(keys, got[0][1])
        assert torch.equal(values, got[0][2])


@pytest.mark.parametrize(("name", "options"), thinned(FORMAT_NAMES, OPTIONS, every=3))
def test_a_padded_row_is_stored_as_the_row_alone(name: str, options: str) -> None:
    P, length = page(name), 2 * page(name) + 7
    k, v = states(3 * P, 2)
    (both,) = build(name, **OPTIONS[options])
    both.kind.table.padding = np.array([0, 3 * P - length])
    feed(both, k, v, [3 * P - 11, 11])
    (alone,) = build(name, **OPTIONS[options])
    feed(alone, k[1:, :, -length:], v[1:, :, -length:], [length - 11, 11])
    for a, b in zip(page_bytes(both, 1), page_bytes(alone, 0), strict=True):
        assert all(
            torch.equal(a[f.offset : f.offset + f.nbytes], b[f.offset : f.offset + f.nbytes])
            for f in both.layout.fields.values()
        )
    new = states(1, 2, seed=8)
    keys = plain(both.update(*new)[0])
    assert torch.equal(keys[1:, :, -length - 1 :], plain(alone.update(new[0][1:], new[1][1:])[0]))
    assert (keys[1, :, : 3 * P - length] == 0).all(), "padding is not stored"


@pytest.mark.parametrize(("name", "options"), thinned(FORMAT_NAMES, OPTIONS, every=3))
def test_forks_read_a_prefix_and_never_grow_it(name: str, options: str) -> None:
    P = page(name)
    (prefix,) = build(name, **OPTIONS[options])
    k, v = states(2 * P + 6)
    feed(prefix, k, v, [2 * P + 6])
    pool, before = prefix.kind.table.pool, page_bytes(prefix, 0, full_only=False)
    live, keys, values = pool.live, prefix.keys, prefix.values
    encoded = int(prefix.kind.table.sealed[0])  # the rest may be sealed later
    forks = [copy.deepcopy(prefix) for _ in range(3)]
    assert pool.live == live, "a fork takes no page"
    for i, fork in enumerate(forks):
        new = states(P + 3, seed=20 + i)
        feed(fork, *new, [1] * 3 + [P])
        assert fork.get_seq_length() == 3 * P + 9
        assert torch.equal(fork.keys[:, :, :encoded], keys[:, :, :encoded])
        if name not in LOSSY:
            assert torch.equal(fork.keys, torch.cat((k, new[0]), dim=2))
            assert torch.equal(fork.values, torch.cat((v, new[1]), dim=2))
    assert prefix.get_seq_length() == 2 * P + 6
    assert torch.equal(prefix.keys, keys)
    assert torch.equal(prefix.values, values)
    assert all(torch.equal(a, b) for a, b in zip(page_bytes(prefix, 0, full_only=False), before, strict=True))
    prefix.update(*states(3, seed=1))
    del fork, forks
    assert pool.live == -(-(2 * P + 9) // P) if prefix.kind.table.direct else pool.live <= 3


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_crop_is_exact_in_the_ring_and_right_across_sealed_pages(name: str) -> None:
    P = page(name)
    k, v = states(5 * P, 2)
    for remove in (1, P - 1, P, P + 1, 2 * P + 3, 3 * P, 5 * P - 1):
        (layer,) = build(name, residual_length=P)
        feed(layer, k, v, [5 * P])
        keys, values = layer.keys, layer.values
        layer.crop(-remove)
        left = 5 * P - remove
        assert torch.equal(layer.keys, keys[:, :, :left])
        assert torch.equal(layer.values, values[:, :, :left])
        new = states(2 * P, 2, seed=2)
        feed(layer, *new, [1, 2, 2 * P - 3])
        assert layer.keys.shape[2] == left + 2 * P
        assert torch.equal(layer.keys[:, :, -P:], new[0][:, :, -P:])
        sealed = left // P * P  # whole pages that the crop left alone
        assert torch.equal(layer.keys[:, :, :sealed], keys[:, :, :sealed])
        # The cut page was decoded and sealed anew: its error is at most that of encoding twice, here and there a step more.
        (straight,) = build(name, residual_length=P)
        feed(
            straight,
            torch.cat((k[:, :, :left], new[0]), dim=2),
            torch.cat((v[:, :, :left], new[1]), dim=2),
            [left + 2 * P],
        )
        once = (straight.keys[:, :, :left] - k[:, :, :left]).abs().max()
        again = (layer.keys[:, :, :left] - k[:, :, :left]).abs().max()
        assert again <= 2.5 * once
        assert (once > 0) == (name in LOSSY and left > layer.spec.sinks)
