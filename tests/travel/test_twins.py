"""Rows of one batch that begin with the same tokens share the pages of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hf_kvcache
from hf_kvcache.config import cache_names
from hf_kvcache.memory.table import BlockTable
from hf_kvcache.memory.twins import first_owners
from tests.grids import CACHE, cache_of, model, prompt
from tests.layers.util import layers, states

P = 16
OPTIONS = {"page_size": P}
QUIET = {"do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}


def test_owners_are_first_rows_with_the_same_pages() -> None:
    tokens = np.arange(8)[None].repeat(4, 0)
    tokens[1, 5] = 99  # differs in page 1
    tokens[3] = [0, 0, 0, 0, 1, 2, 3, 4]  # row 0's first five tokens after padding
    owners = first_owners(tokens, np.array([0, 0, 0, 3]), 4)
    assert owners.tolist() == [[0, 0], [0, 1], [0, 0], [0, 3]]


@pytest.mark.parametrize("name", [name for name in cache_names() if not name.startswith("latent_")])
def test_beams_hold_one_prompt(name: str) -> None:
    llama, ids = model("llama"), prompt(1, 640)
    generated = {}
    for beams in (1, 4):
        cache = hf_kvcache.make_cache(name, llama.config)
        out = llama.generate(ids, num_beams=beams, max_new_tokens=1, min_new_tokens=1, **{CACHE: cache}, **QUIET)
        generated[beams] = cache_of(out)
    one, four = (generated[beams].stats() for beams in (1, 4))
    assert four["pages"]["live"] == one["pages"]["live"]
    for part in ("codes", "scales", "padding"):
        assert four["bytes"][part] == one["bytes"][part]
    for part in ("residual", "sinks"):
        assert four["bytes"][part] == 4 * one["bytes"][part], "the newest tokens of beams are soon different ones"
    if not any(one["bytes"][part] for part in ("residual", "sinks")):
        assert generated[4].nbytes <= 1.1 * generated[1].nbytes


@pytest.mark.parametrize("mode", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
@pytest.mark.parametrize("length", [3 * P - 1, 3 * P, 3 * P + 5])
def test_shared_rows_generate_what_a_dynamic_cache_does(length: int, mode: dict[str, int]) -> None:
    llama, ids = model("llama"), prompt(2, length)
    expected = llama.generate(ids, max_new_tokens=P + 3, **mode, **QUIET).sequences
    cache = hf_kvcache.make_cache("paged_exact", llama.config, **OPTIONS)
    assert torch.equal(llama.generate(ids, max_new_tokens=P + 3, **{CACHE: cache}, **mode, **QUIET).sequences, expected)


def test_a_common_prefix_is_shared_whatever_the_padding() -> None:
    llama, common = model("llama"), prompt(1, 4 * P)[0]
    ids = torch.zeros(3, 4 * P + 9, dtype=torch.long)
    for b, extra in enumerate((9, 2, 5)):
        ids[b, 9 - extra :] = torch.cat((common, prompt(1, extra, seed=b + 5)[0]))
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    expected = llama.generate(**inputs, max_new_tokens=20, **QUIET).sequences
    out = llama.generate(**inputs, max_new_tokens=20, cache_implementation="paged_exact", cache_config=OPTIONS, **QUIET)
    assert torch.equal(out.sequences, expected)
    table = cache_of(out).kinds[0].table
    assert (table.pages[1:, :4] == table.pages[0, :4]).all()
    assert len(set(table.pages[:, 4])) == 3


def test_rows_that_the_model_treats_differently_are_not_shared() -> None:
    llama, ids = model("llama"), prompt(1, 3 * P).repeat(2, 1)

    def steer(module, args, output):
        return output + torch.tensor([0.0, 1.0]).view(2, 1, 1)

    handle = llama.model.layers[0].mlp.register_forward_hook(steer)  # the second layer's keys differ by row
    try:
        expected = llama.generate(ids, max_new_tokens=9, **QUIET).sequences
        out = llama.generate(ids, max_new_tokens=9, cache_implementation="paged_exact", cache_config=OPTIONS, **QUIET)
    finally:
        handle.remove()
    assert torch.equal(out.sequences, expected)
    assert cache_of(out).stats()["pages"]["live"] == 2 * 4


@pytest.mark.parametrize("options", [{}, {"residual_length": 5}], ids=["direct", "ring"])
@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_unsharing_in_any_layer_gives_each_row_its_own(wrong: int, options: dict[str, int]) -> None:
    ours = layers(count=3, **options)
    ours[0].kind.table.note_tokens(0, np.arange(50)[None].repeat(2, 0))
    given = [tuple(x.repeat(2, 1, 1, 1) for x in states(50, 1, seed=i)) for i in range(3)]
    given[wrong][0][1] *= 1.5
    for layer, (k, v) in zip(ours, given, strict=True):
        layer.update(k, v)
    for layer, (k, v) in zip(ours, given, strict=True):
        assert torch.equal(layer.keys, k)
        assert torch.equal(layer.values, v)


def test_reorder_copies_no_sealed_page() -> None:
    (layer,) = layers()
    layer.update(*states(3 * P + 3, 4))
    before, pool = layer.store.read_pages(layer.kind.table.all_pages()).clone(), layer.kind.table.pool
    layer.reorder_cache(torch.tensor([1, 1, 2, 1]))
    assert pool.live == 2 * 4
    assert torch.equal(layer.store.read_pages(np.arange(16))[: len(before)], before), "no byte was written"
    layer.update(*states(1, 4, seed=1))
    assert pool.live == 2 * 4 + 2, "one copy of the open page for each further owner"


def test_a_gap_in_the_prompt_ends_sharing() -> None:
    table = BlockTable(4, direct=True)
    tokens = np.arange(8)[None].repeat(2, 0)
    table.note_tokens(0, tokens)
    assert len(table.append(0, 8, 2).twins[0]) == 2
    table.note_tokens(8, tokens)
    assert len(table.append(8, 8, 2).twins[0]) == 2
    table.note_tokens(16, None)
    table.append(16, 8, 2)
    table.note_tokens(24, tokens)
    assert len(table.append(24, 8, 2).twins[0]) == 0
    assert table.pool.live == 2 + 2 + 4 + 4
