"""Bytes: what is reported is what is held, what is held is what was promised, and all of it comes back."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import LlamaConfig

import hf_kvcache
from hf_kvcache.formats.spec import FORMATS
from tests.grids import CACHE, CACHE_NAMES, FORMAT_NAMES, cache_of, model, padded, prompt

LAYERS, HEADS, DIM = 3, 2, 64


def config() -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=HEADS, hidden_size=4 * DIM, head_dim=DIM
    )


def fill(cache: Any, tokens: int, batch: int = 1, dtype: torch.dtype = torch.bfloat16, steps: int = 0) -> None:
    """A prompt of so many tokens, and single tokens after it."""
    for n in (tokens, *[1] * steps):
        k, v = torch.randn(2, batch, HEADS, n, DIM).to(dtype)
        for i in range(LAYERS):
            cache.update(k, v, i)


def held_bytes(root: Any) -> int:
    """Bytes of every tensor storage and array that can be reached from an object, each once."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    todo = [root]
    while todo:
        x = todo.pop()
        if id(x) in seen or isinstance(x, (type, str, int, float, torch.dtype, torch.device)):
            continue
        seen.add(id(x))
        if isinstance(x, torch.Tensor):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        elif isinstance(x, np.ndarray):
            base = x
            while isinstance(base.base, np.ndarray):
                base = base.base
            storages[base.__array_interface__["data"][0]] = base.nbytes
        elif isinstance(x, dict):
            todo.extend(x.values())
        elif isinstance(x, (list, tuple, set)):
            todo.extend(x)
        elif type(x).__module__.startswith("hf_kvcache"):
            todo.extend(vars(x).values())
    return sum(storages.values())


def assert_all_counted(cache: Any) -> None:
    """`nbytes` is what is held, but for the last step's plan and mask: some numbers a row, gone with the next."""
    assert 0 <= held_bytes(cache) - cache.nbytes <= 2048


@pytest.mark.parametrize("options", [{}, {"residual_length": 40, "sinks": 4}], ids=["defaults", "ring and sinks"])
@pytest.mark.parametrize("name", CACHE_NAMES)
def test_nbytes_is_the_sum_of_what_is_held(name: str, options: dict[str, int]) -> None:
    cache = hf_kvcache.make_cache(name, config(), **options)
    assert_all_counted(cache)
    fill(cache, 300, batch=2, steps=5)
    assert_all_counted(cache)
    cache.reorder_cache(torch.tensor([1, 1]))
    fill(cache, 1, batch=2)
    cache.crop(-30)
    assert_all_counted(cache)
    parts = cache.stats()["bytes"]
    assert sum(parts.values()) == cache.nbytes
    assert all(size >= 0 for size in parts.values())
    assert (parts["scales"] > 0) == (FORMATS[name.split("_", 1)[1]].key.scaled)


def test_nbytes_counts_what_a_step_leaves_behind() -> None:
    out = model("llama").generate(
        **padded((5, 40))[0],
        max_new_tokens=20,
        do_sample=False,
        cache_implementation="paged_fp8",
        return_dict_in_generate=True,
    )
    assert_all_counted(cache_of(out))


@pytest.mark.parametrize("fmt", ["fp8", "fp8_e5m2", "int8"])
def test_eight_bit_formats_keep_their_promise(fmt: str) -> None:
    cache = hf_kvcache.make_cache(f"paged_{fmt}", config())
    fill(cache, 2048)
    elements = LAYERS * 2 * HEADS * 2048 * DIM
    assert 8 * cache.nbytes / elements <= 8.3
    assert cache.stats()["waste"] < 0.04


@pytest.mark.parametrize("name", [name for name in CACHE_NAMES if name.startswith("paged_")])  # a window holds fewer pages
def test_waste_stays_small_while_decoding(name: str) -> None:
    cache = hf_kvcache.make_cache(name, config())
    fill(cache, 2000)
    for _ in range(49):
        fill(cache, 1)
        assert cache.stats()["waste"] < 0.04
        pages = cache.stats()["pages"]
        assert pages["live"] + pages["cached"] + pages["free"] == cache.kinds[0].table.pool.capacity


class Peak(TorchDispatchMode):
    """Counts the bytes of tensors made while it is on, and the most that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if isinstance(x, torch.Tensor) and type(x) is torch.Tensor:
                storage = x.untyped_storage()
                if storage._cdata not in self.seen:
                    self.seen[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self.gone, storage._cdata)
        return out

    def gone(self, key: int) -> None:
        self.now -= self.seen.pop(key, 0)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("paged_fp8", 1000),
        *((n, 200) for n in CACHE_NAMES),
        *(pytest.param(n, 1000, marks=pytest.mark.slow) for n in CACHE_NAMES),
    ],
)
def test_a_long_generation_peaks_at_the_store_and_a_page_a_layer(name: str, steps: int) -> None:
    cache = hf_kvcache.make_cache(name, config())
    k, v = torch.randn(2, 1, HEADS, 1, DIM).bfloat16()
    with Peak() as peak:
        for _ in range(steps):
            for i in range(LAYERS):
                cache.update(k, v, i)
    one_page = sum(layer.layout.page_bytes for layer in cache.paged_layers)
    exact_page = (
        LAYERS * 2 * HEADS * 2 * cache.layers[0].layout.page_size * DIM * 4
    )  # one page being encoded, float32, twice
    assert peak.most >= cache.stats()["bytes"]["codes"], "the counter counts"
    assert peak.most <= cache.nbytes + max(one_page, exact_page)


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_growth_copies_nothing(fmt: str) -> None:
    cache = hf_kvcache.make_cache(f"paged_{fmt}", config())
    fill(cache, 100)
    before = [[slab.data_ptr() for slab in layer.store.slabs] for layer in cache.paged_layers]
    fill(cache, 700, steps=200)
    for layer, addresses in zip(cache.paged_layers, before, strict=True):
        assert [slab.data_ptr() for slab in layer.store.slabs][: len(addresses)] == addresses


def test_a_long_prompt_takes_its_memory_at_once() -> None:
    cache = hf_kvcache.make_cache("paged_fp8", config())
    fill(cache, 8192)
    assert len(cache.layers[0].store.slabs) == 1


def test_max_cache_len_takes_its_memory_at_once() -> None:
    cache = hf_kvcache.make_cache("paged_fp8", config(), max_cache_len=1000)
    fill(cache, 10)
    before = cache.stats()["bytes"]
    fill(cache, 1, steps=989)
    after = cache.stats()["bytes"]
    assert {k: before[k] for k in ("codes", "scales")} == {k: after[k] for k in ("codes", "scales")}


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_reset_keeps_the_memory_for_the_next_tokens(name: str) -> None:
    cache = hf_kvcache.make_cache(name, config())
    fill(cache, 500, steps=3)
    size, address = cache.stats()["bytes"]["codes"], cache.layers[0].store.slabs[0].data_ptr()
    cache.reset()
    assert cache.stats()["pages"]["live"] == 0
    fill(cache, 500, steps=3)
    assert (cache.stats()["bytes"]["codes"], cache.layers[0].store.slabs[0].data_ptr()) == (size, address)


def test_forks_share_bytes() -> None:
    cache = hf_kvcache.make_cache("paged_fp8", config())
    fill(cache, 640)
    before = cache.nbytes
    forks = [copy.deepcopy(cache) for _ in range(5)]
    assert cache.stats()["pages"]["live"] == 10
    for fork in forks:
        fill(fork, 1)
    assert cache.stats()["pages"]["live"] == 15
    assert cache.nbytes < 1.7 * before
    del fork, forks
    gc.collect()
    assert cache.stats()["pages"]["live"] == 10


def soak(calls: int) -> list[int]:
    """Generate so many times, in many ways; resident bytes after each call."""
    pools: list[Any] = []
    resident = []
    ways = [{}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 3}]
    for i in range(calls):
        name = CACHE_NAMES[i % len(CACHE_NAMES)]
        out = model("llama").generate(
            prompt(1, 70 + i % 7, i),
            max_new_tokens=6,
            return_dict_in_generate=True,
            cache_implementation=name,
            cache_config={"residual_length": 0},
            **ways[i % 4],
        )
        assert torch.is_tensor(out.sequences)
        pools += [kind.table.pool for kind in cache_of(out).kinds]
        assert pools[-1].live > 0
        del out
        gc.collect()
        with open("/proc/self/statm") as file:
            resident.append(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    assert [pool.live for pool in pools] == [0] * len(pools), "pages did not come back"
    return resident


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read from /proc")
@pytest.mark.parametrize("calls", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_generate_again_and_again_gives_everything_back(calls: int) -> None:
    resident = soak(calls)
    half = resident[len(resident) // 2]
    assert resident[-1] - half < 8 << 20, "resident memory grows"


def test_sequences_alone_hold_no_cache() -> None:
    kept = []
    refs = []
    for i in range(5):
        out = model("llama").generate(
            prompt(1, 20, i), max_new_tokens=4, cache_implementation="paged_fp8", return_dict_in_generate=True
        )
        refs.append(weakref.ref(cache_of(out)))
        kept.append(out.sequences)
        del out
    gc.collect()
    assert len(kept) == 5
    assert [ref() for ref in refs] == [None] * 5


def test_a_hand_loop_leaves_nothing_behind() -> None:
    cache = hf_kvcache.make_cache("paged_int8", model("llama").config)
    for token in prompt(1, 30)[0]:
        model("llama")(token.view(1, 1), **{CACHE: cache})
    pool, ref = cache.kinds[0].table.pool, weakref.ref(cache)
    del cache
    gc.collect()
    assert ref() is None
    assert pool.live == 0
