"""What a layer refuses, in words, and that it is unchanged afterwards."""

from __future__ import annotations

import pytest
import torch

from hf_kvcache.errors import CacheFullError, CacheUseError, ConfigError, StaleViewError
from tests.grids import CACHE_NAMES
from tests.layers.util import layers, states

WRONG = {
    "batch": (lambda: states(1, 3), "holds 2 rows and was given 3"),
    "dtype": (lambda: states(1, 2, dtype=torch.float16), r"holds torch.float32 keys .* given torch.float16"),
    "heads": (lambda: tuple(torch.zeros(2, 5, 1, d) for d in (16, 24)), r"\(2, 16, 24\) and was given \(5, 16, 24\)"),
    "key dim": (lambda: states(1, 2, dims=(24, 24)), r"\(2, 16, 24\) and was given \(2, 24, 24\)"),
    "value dim": (lambda: states(1, 2, dims=(16, 16)), "is this cache used with another model"),
    "device": (lambda: tuple(x.to("meta") for x in states(1, 2)), "on cpu and was given keys on meta"),
    "rank": (
        lambda: (torch.zeros(2, 1, 16), torch.zeros(2, 1, 24)),
        r"must both be \[batch, heads, tokens, head_dim\]",
    ),
    "tokens": (lambda: (states(1, 2)[0], states(2, 2)[1]), "agree in all but the last"),
}


@pytest.mark.parametrize("options", [{}, {"residual_length": 4, "sinks": 2}], ids=["pages", "ring"])
@pytest.mark.parametrize("what", WRONG)
def test_misfits_are_refused_and_change_nothing(what: str, options: dict[str, int]) -> None:
    (layer,) = layers(**options)
    k, v = states(20, 2)
    layer.update(k, v)
    live = layer.kind.table.pool.live
    given, words = WRONG[what]
    with pytest.raises(CacheUseError, match=words):
        layer.update(*given())
    assert (layer.get_seq_length(), layer.kind.table.seen, layer.kind.table.pool.live) == (20, 20, live)
    assert torch.equal(layer.keys, k)
    layer.update(*states(1, 2))
    assert layer.get_seq_length() == 21


@pytest.mark.parametrize(
    ("k", "v"), [(torch.float32, torch.float16), (torch.int8, torch.int8), (torch.float8_e4m3fn, torch.float8_e4m3fn)]
)
def test_dtypes_that_cannot_be_held(k: torch.dtype, v: torch.dtype) -> None:
    (layer,) = layers()
    with pytest.raises(CacheUseError, match="accepted are float32, bfloat16 and float16, the same for both"):
        layer.update(torch.zeros(1, 2, 3, 16, dtype=k), torch.zeros(1, 2, 3, 24, dtype=v))
    layer.update(*states(3))
    assert layer.get_seq_length() == 3


def test_a_head_dim_that_cannot_be_rotated_is_refused_before_anything_is_taken() -> None:
    (layer,) = layers("paged_int8")
    with pytest.raises(ConfigError, match="head_dim=18 .*rotate"):
        layer.update(*states(3, dims=(18, 24)))
    assert (layer.kind.table.seen, layer.kind.table.pool.live, layer.is_initialized) == (0, 0, False)
    (layer,) = layers("paged_int8", rotate=False)
    layer.update(*states(3, dims=(18, 24)))
    assert layer.get_seq_length() == 3


def test_crop_takes_negative_numbers() -> None:
    (layer,) = layers()
    layer.update(*states(20))
    with pytest.raises(CacheUseError, match=r"crop\(5\): pass the number of tokens to remove as a negative number"):
        layer.crop(5)
    layer.crop(torch.tensor(-3))
    layer.crop(-100)
    assert layer.get_seq_length() == 0


@pytest.mark.parametrize("change", ["update", "crop", "reorder", "reset"])
def test_a_stale_view_says_so(change: str) -> None:
    (layer,) = layers()
    layer.update(*states(20, 2))
    keys, values = layer.update(*states(1, 2))
    read = keys + 0
    if change == "update":
        layer.update(*states(1, 2))
    elif change == "crop":
        layer.crop(-1)
    elif change == "reorder":
        layer.reorder_cache(torch.tensor([1, 0]))
    else:
        layer.reset()
    with pytest.raises(StaleViewError, match="returned by an earlier update"):
        values + 0
    assert torch.equal(keys + 0, read), "what was read before stays read"


def test_layers_out_of_step_are_told_and_reset_heals() -> None:
    first, second = layers(count=2)
    for layer in (first, second):
        layer.update(*states(5))
    first.update(*states(1))  # and the forward pass failed before the second layer
    first.update(*states(1))
    with pytest.raises(CacheUseError, match=r"out of step.*reset\(\)"):
        second.update(*states(1))
    for layer in (first, second):
        layer.reset()
    for layer in (first, second):
        layer.update(*states(5))
    assert second.get_seq_length() == 5


def test_max_cache_len_is_kept() -> None:
    (layer,) = layers(capacity=24)
    layer.update(*states(20))
    address = layer.store.slabs[0].data_ptr()
    with pytest.raises(CacheFullError, match="max_cache_len=24 columns, 20 are filled and 5 more came"):
        layer.update(*states(5))
    layer.update(*states(4))
    layer.crop(-9)
    layer.update(*states(9))
    layer.reset()
    layer.update(*states(24))
    assert layer.get_seq_length() == 24
    assert [slab.data_ptr() for slab in layer.store.slabs] == [address]


def test_a_window_that_let_go_cannot_be_cropped_into() -> None:
    (layer,) = layers(window=8)
    layer.update(*states(20))
    for _ in range(30):
        layer.update(*states(1))
    with pytest.raises(
        CacheUseError, match=r"cannot take 40 columns off a sliding window of 8.*activate_past_recording"
    ):
        layer.crop(-40)
    assert layer.get_seq_length() == 50
    layer.activate_past_recording()
    for _ in range(30):
        layer.update(*states(1))
    layer.crop(-30)
    assert layer.get_seq_length() == 50


def test_offloading_by_transformers_is_refused() -> None:
    (layer,) = layers()
    with pytest.raises(CacheUseError, match="offloading cannot move pages"):
        layer.offload()


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_every_cache_has_a_layer(name: str) -> None:
    (layer,) = layers(name, page_size=None)
    layer.update(*states(5))
    layer.update(*states(1))
    assert layer.get_seq_length() == 6
