"""Prompts that begin alike, in different calls: found, believed only when equal, and never another answer."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

import hf_kvcache
from hf_kvcache import calibration
from hf_kvcache.errors import ConfigError
from hf_kvcache.fingerprint import model_fingerprint
from hf_kvcache.memory.prefix import Part, PrefixStore
from tests.grids import CACHE, cache_of, model, prompt
from tests.threads import at_once

C = 32
KINDS = {
    "exact": ("paged_exact", {}),
    "fp8": ("paged_fp8", {}),
    "ring": ("paged_int8", {"residual_length": 9, "sinks": 2}),
}


def ask(ids: torch.Tensor, store: PrefixStore, kind: str = "exact", which: str = "llama", **more):
    name, options = KINDS[kind]
    return model(which).generate(
        ids,
        max_new_tokens=9,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        cache_implementation=name,
        cache_config={"page_size": 16, "prefix_store": store, **options},
        **more,
    )


@pytest.mark.parametrize("length", [2 * C, 2 * C + 1, 3 * C - 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_is_a_miss_bit_for_bit(kind: str, length: int) -> None:
    ids, store = prompt(1, length), PrefixStore(chunk=C)
    first, second = ask(ids, store, kind), ask(ids, store, kind)
    assert store.stats()["tokens_found"] == (length - 1) // C * C
    assert torch.equal(torch.stack(first.logits), torch.stack(second.logits))
    assert cache_of(second).get_seq_length() == cache_of(first).get_seq_length()


@pytest.mark.parametrize("kind", KINDS)
def test_another_question_over_the_same_document(kind: str) -> None:
    document, store = prompt(1, 3 * C), PrefixStore(chunk=C)
    ask(torch.cat((document, prompt(1, 7, seed=1)), dim=1), store, kind)
    question = torch.cat((document, prompt(1, 11, seed=2)), dim=1)
    hit, miss = ask(question, store, kind), ask(question, PrefixStore(chunk=C), kind)
    assert store.stats()["tokens_found"] == 3 * C
    assert torch.equal(torch.stack(hit.logits), torch.stack(miss.logits))


def test_beams_and_batches_take_what_each_row_finds() -> None:
    ids, store = prompt(2, 2 * C + 5), PrefixStore(chunk=C)
    ask(ids[:1], store)
    assert ask(ids, store).sequences.shape == (2, 2 * C + 14)
    found = store.stats()["tokens_found"]
    hit, miss = ask(ids, store, num_beams=2), ask(ids, PrefixStore(chunk=C), num_beams=2)
    assert store.stats()["tokens_found"] == found + 4 * C, "equal rows ask once"
    assert torch.equal(hit.sequences, miss.sequences)


def test_what_a_store_is_not_for_runs_as_without() -> None:
    store = PrefixStore(chunk=C)
    ids = prompt(2, 2 * C)
    ids[0, :3] = 0
    ask(ids, store, attention_mask=(ids != 0).long())
    ask(prompt(1, 2 * C), store, which="mistral")
    assert store.stats()["tokens_asked"] == 0


def test_models_formats_and_tenants_do_not_meet() -> None:
    ids, store = prompt(1, 2 * C + 1), PrefixStore(chunk=C)
    for kind, which in (("exact", "llama"), ("fp8", "llama"), ("exact", "qwen3")):
        ask(ids, store, kind, which)
    assert store.stats()["tokens_found"] == 0
    other = PrefixStore(chunk=C, salt="b")
    other._chunks = store._chunks  # even in one memory
    ask(ids, other)
    assert other.stats()["tokens_found"] == 0


def part(n: int = 1000) -> list[Part]:
    return [Part((1, 1, 1), torch.zeros(1, n, dtype=torch.uint8), {})]


def tokens(*values: int) -> np.ndarray:
    return np.repeat(np.array(values, np.int64), 16)


class Truncated(PrefixStore):
    """Every beginning has the same digest."""

    def _digest(self, data: bytes) -> bytes:
        return b""


def test_a_collision_is_caught_by_the_tokens() -> None:
    store = Truncated(chunk=16)
    store.put("m", None, tokens(1), part())
    assert store.put("m", None, tokens(2), part()) is None
    assert store.find("m", tokens(2, 0)) == []
    assert store.find("other model", tokens(1, 0)) == []
    assert len(store.find("m", tokens(1, 0))) == 1
    assert len(store.find("m", tokens(1, 1, 0))) == 1, "a chunk is not its own child"


def test_the_least_recently_used_goes_first_and_the_bound_holds() -> None:
    store = PrefixStore(max_bytes=3500, chunk=16)
    a = store.put("m", None, tokens(1), part())
    b = store.put("m", a, tokens(2), part())
    store.put("m", None, tokens(3), part())
    store.find("m", tokens(1, 2, 0))
    store.put("m", None, tokens(4), part())
    assert [len(store.find("m", tokens(*t, 0))) for t in ((1, 2), (3,), (4,))] == [2, 0, 1]
    store.put("m", b, tokens(5), part())
    store.put("m", None, tokens(6), part())
    assert store.stats()["bytes"] <= 3500
    assert len(store.find("m", tokens(1, 2, 5, 0))) >= 1, "children go before their parents"
    assert store.put("m", None, tokens(7), part(9999)) is None
    assert store.stats()["chunks"] == 3, "what can never fit drives nothing out"
    store.clear()
    assert store.put("m", a, tokens(8), part()) is None, "its parent is gone"


def test_threads() -> None:
    store, errors = PrefixStore(max_bytes=20_000, chunk=16), []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(200):
            row = tokens(*rng.integers(0, 3, 4), 0)
            chain = store.find("m", row)
            if len(chain) < 4:
                at = len(chain) * 16
                store.put("m", chain[-1] if chain else None, row[at : at + 16], part())
            if any(not np.array_equal(c.tokens, row[i * 16 : i * 16 + 16]) for i, c in enumerate(chain)):
                errors.append(chain)

    at_once(work)
    assert not errors
    held = store._chunks.values()
    assert store.stats()["bytes"] == sum(c.nbytes for c in held) <= 20_000
    assert all(c.parent is None or c.parent in held for c in held)


def test_threads_that_generate_with_one_model_and_one_store() -> None:
    questions = [torch.cat((prompt(1, 2 * C, seed=s % 2), prompt(1, 5 + s, seed=s)), dim=1) for s in range(4)]
    expected = [ask(q, PrefixStore(chunk=C), "ring").sequences for q in questions]
    store, answers = PrefixStore(chunk=C), {}

    def work(i: int) -> None:
        for _ in range(3):
            answers[i] = ask(questions[i], store, "ring").sequences

    at_once(work)
    assert all(torch.equal(answers[i], x) for i, x in enumerate(expected))
    for q, x in zip(questions, expected, strict=True):
        assert torch.equal(ask(q, store, "ring").sequences, x), "what they left behind is right"
    assert store.stats()["chunks"] == 4


def test_other_weights_adapters_and_calibrations_are_other_models() -> None:
    one = copy.deepcopy(model("llama"))
    before = model_fingerprint(one)
    assert before == model_fingerprint(model("llama"))
    one.model.layers[0].self_attn.v_proj.weight.data.mul_(1.01)
    changed = model_fingerprint(one)
    one.model.layers[0].active_adapters = ["a"]  # as peft's modules have it
    named = model_fingerprint(one)
    one.model.layers[0].active_adapters = ["b"]
    assert len({before, changed, named, model_fingerprint(one)}) == 4


def test_a_calibration_tells_prefixes_apart(tmp_path: Path) -> None:
    store, path = PrefixStore(chunk=C), tmp_path / "c.json"
    for scale in (1.0, 2.0, 2.0):
        calibration.write(path, {i: scale * torch.ones(2, 16, 2) for i in range(2)}, {})
        cache = hf_kvcache.make_cache(
            "paged_int4", model("llama").config, page_size=32, calibration=str(path), prefix_store=store
        )
        model("llama").generate(prompt(1, C + 1), max_new_tokens=1, do_sample=False, pad_token_id=0, **{CACHE: cache})
    assert store.stats()["tokens_found"] == C, "found with the same one only, whatever its file is called"


def test_a_copy_is_the_same_store_and_wrong_ones_are_refused() -> None:
    store = PrefixStore()
    assert copy.deepcopy({"prefix_store": store})["prefix_store"] is store
    with pytest.raises(ConfigError, match="at least 1 byte and 16 tokens"):
        PrefixStore(chunk=3)
    with pytest.raises(ConfigError, match="accepted is a hf_kvcache.PrefixStore"):
        hf_kvcache.make_cache("paged_fp8", model("llama").config, prefix_store={})
    with pytest.raises(ConfigError, match=r"chunk=40\) must be a multiple of page_size=16"):
        ask(prompt(1, 50), PrefixStore(chunk=40))
