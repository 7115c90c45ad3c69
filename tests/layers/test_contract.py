"""A layer of exact pages behaves as transformers' own dynamic layer, operation for operation."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_kvcache.memory.pool import PagePool
from tests.layers.util import layers, plain, states

KINDS: dict[str, dict[str, Any]] = {
    "pages": {},
    "ring": {"residual_length": 16},
    "sinks": {"sinks": 3},
    "ring and sinks": {"residual_length": 5, "sinks": 2},
}
OPERATIONS = ("step", "step", "step", "chunk", "crop", "reorder", "repeat", "select", "copy", "reset")


def theirs(window: int | None) -> Any:
    if window is None:
        return DynamicLayer()
    try:
        return DynamicSlidingWindowLayer(sliding_window=window)
    except TypeError:
        return DynamicSlidingWindowLayer(window)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_random_operations(kind: str, seed: int) -> None:
    assert run(kind, seed).live == 0, "pages outlive their layers"


def run(kind: str, seed: int) -> PagePool:
    """Sixty random operations on a layer of ours and one of theirs; the pool that they used."""
    rng = random.Random(seed)
    ours, dynamic = layers(**KINDS[kind]), theirs(None)
    (layer,) = ours
    batch = 2
    for step in range(60):
        operation = rng.choice(OPERATIONS) if layer.seen else "chunk"
        if operation in ("step", "chunk"):
            tokens = 1 if operation == "step" else rng.choice([1, 2, 5, 15, 16, 17, 40])
            assert layer.get_mask_sizes(tokens) == dynamic.get_mask_sizes(tokens)
            k, v = states(tokens, batch, seed=1000 * seed + step)
            got, expected = layer.update(k, v), dynamic.update(k, v)
            for x, y in zip(got, expected, strict=True):
                assert x.shape == y.shape
                assert torch.equal(plain(x), y)
        elif operation == "crop":
            remove = rng.randint(0, layer.seen)
            for one in (layer, dynamic):
                one.crop(-remove)
        elif operation == "reorder":
            index = torch.tensor([rng.randrange(batch) for _ in range(batch)])
            for one in (layer, dynamic):
                one.reorder_cache(index)
        elif operation == "repeat" and batch < 5:
            for one in (layer, dynamic):
                one.batch_repeat_interleave(2)
            batch *= 2
        elif operation == "select":
            index = torch.tensor([rng.randrange(batch) for _ in range(rng.randint(1, batch))])
            for one in (layer, dynamic):
                one.batch_select_indices(index)
            batch = len(index)
        elif operation == "copy":
            layer = copy.deepcopy(layer)
            dynamic = copy.deepcopy(dynamic)
        elif operation == "reset" and rng.random() < 0.2:
            layer.reset()
            dynamic = theirs(None)
            batch = rng.choice([1, 2, 3])
            assert layer.keys is None
        assert layer.get_seq_length() == dynamic.get_seq_length()
        if layer.seen:
            assert torch.equal(layer.keys, dynamic.keys)
            assert torch.equal(layer.values, dynamic.values)
    return layer.kind.table.pool


@pytest.mark.parametrize("chunks", ["steps", "chunks"])
@pytest.mark.parametrize("window", [1, 4, 16, 20])
@pytest.mark.parametrize("kind", ["pages", "ring"])
def test_windows_at_every_length(kind: str, window: int, chunks: str) -> None:
    for first in range(max(1, window - 2), 2 * window + 2):
        (layer,), dynamic = layers(window=window, **KINDS[kind]), theirs(window)
        all_k, all_v = (x[:, :, :0] for x in states(1, 2))
        rng = random.Random(first)
        for step in range(21):
            tokens = first if step == 0 else 1 if chunks == "steps" else rng.choice([1, 3, window, 2 * window + 1])
            assert layer.get_mask_sizes(tokens) == dynamic.get_mask_sizes(tokens)
            assert layer.get_seq_length() == dynamic.get_seq_length()
            k, v = states(tokens, 2, seed=100 * first + step)
            seen = layer.get_mask_sizes(tokens)[0]
            dynamic.update(k, v)
            all_k, all_v = torch.cat((all_k, k), dim=2), torch.cat((all_v, v), dim=2)
            for x, y in zip(layer.update(k, v), (all_k, all_v), strict=True):
                assert torch.equal(plain(x), y[:, :, -seen:])
        held = max(len(layer.kind.table.row_pages(b)) for b in range(2))
        assert held <= (window + 2 * window + 1 + layer.spec.residual) // 16 + 3, "pages before the window are kept"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["select", "select by mask", "repeat", "reorder"])
def test_rows_move_together_in_all_layers(kind: str, name: str) -> None:
    ours = layers(count=3, **KINDS[kind])
    dynamics = [theirs(None) for _ in ours]
    for i, (layer, dynamic) in enumerate(zip(ours, dynamics, strict=True)):
        k, v = states(37, 4, seed=i)
        layer.update(k, v)
        dynamic.update(k, v)
    for layer, dynamic in zip(ours, dynamics, strict=True):
        for one in (layer, dynamic):
            if name == "select":
                one.batch_select_indices(torch.tensor([3, 1]))
            elif name == "select by mask":
                one.batch_select_indices(torch.tensor([False, True, False, True]))
            elif name == "repeat":
                one.batch_repeat_interleave(3)
            else:
                one.reorder_cache(torch.tensor([2, 2, 0, 3]))
    for layer, dynamic in zip(ours, dynamics, strict=True):
        k, v = states(3, dynamic.keys.shape[0], seed=9)
        for x, y in zip(layer.update(k, v), dynamic.update(k, v), strict=True):
            assert torch.equal(plain(x), y)


def test_an_unused_layer_answers() -> None:
    (layer,) = layers()
    assert (layer.keys, layer.values, layer.get_seq_length(), layer.is_initialized) == (None, None, 0, False)
    assert layer.get_mask_sizes(7) == (7, 0)
    layer.crop(-3)
    layer.crop(0)
    layer.reorder_cache(torch.tensor([0]))
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0]))
    layer.reset()
    k, v = states(5)
    assert layer.update(k, v)[0] is k, "a prompt attends to itself exactly"


def test_an_empty_append_changes_nothing() -> None:
    (layer,) = layers()
    k, v = states(20)
    layer.update(k, v)
    got = layer.update(k[:, :, :0], v[:, :, :0])[0]
    assert torch.equal(plain(got), k)
    assert torch.equal(layer.keys, k)


def test_max_cache_len_is_the_max_length() -> None:
    assert layers()[0].get_max_length() == -1
    assert layers(capacity=50)[0].get_max_length() == 50
    assert layers(window=9, capacity=50)[0].get_max_length() == 9


def test_rows_may_shrink_to_one_and_grow_back() -> None:
    (layer,) = layers(residual_length=4)
    k, v = states(40, 3)
    layer.update(k, v)
    layer.batch_select_indices(torch.tensor([2]))
    layer.batch_repeat_interleave(5)
    assert torch.equal(layer.keys, k[2:].repeat(5, 1, 1, 1))
    assert layer.kind.table.pool.live == 2
    layer.update(*states(30, 5, seed=3))
    assert torch.equal(layer.keys[:, :, :40], k[2:].repeat(5, 1, 1, 1))
