"""How ours meets transformers: three roads, names, errors, and that everything can be put back."""

from __future__ import annotations

import copy
import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import BertConfig, GenerationConfig, LlamaConfig, ViTConfig
from transformers.generation import configuration_utils
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

import hf_kvcache
from hf_kvcache.config import cache_names, resolve
from hf_kvcache.errors import CacheUseError, ConfigError, ImplError, UnsupportedModelError
from tests.grids import CACHE, CACHE_NAMES, cache_of, model, prompt
from tests.threads import at_once

ROOT = Path(__file__).parents[1]


def run(net: Any, **kwargs: Any) -> Any:
    given = {"input_ids": prompt(1), "max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, **kwargs}
    return net.generate(**given)


# ---- three roads


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_three_roads_lead_to_the_same_tokens(name: str) -> None:
    net = model("llama")
    options = {"residual_length": 7}
    by_name = run(net, cache_implementation=name, cache_config=options)
    instance = hf_kvcache.make_cache(name, net.config, **options)
    by_instance = run(net, **{CACHE: instance})
    portable = {"backend": "hf_kvcache", "format": name, **options}
    by_backend = run(net, cache_implementation="quantized", cache_config=portable)
    assert cache_of(by_instance) is instance
    for out in (by_name, by_instance, by_backend):
        assert type(cache_of(out)) is hf_kvcache.PagedCache
        assert cache_of(out).config.name == name
        assert cache_of(out).config.spec.residual == 7
        assert torch.equal(out.sequences, by_name.sequences)


def test_the_old_keyword_still_works() -> None:
    cache = hf_kvcache.make_cache("paged_fp8", model("llama").config)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers >= 5.24 says that the keyword is old
        out = run(model("llama"), past_key_values=cache)
    assert cache.get_seq_length() == out.sequences.shape[1] - 1


def test_nbits_choose_the_format_of_the_portable_spelling() -> None:
    out = run(model("llama"), cache_implementation="quantized", cache_config={"backend": "hf_kvcache", "nbits": 8})
    assert cache_of(out).config.name == "paged_int8"


def test_a_generation_config_object_works_as_keywords_do() -> None:
    net = model("llama")
    config = GenerationConfig(cache_implementation="paged_int8", max_new_tokens=8, do_sample=False, pad_token_id=0)
    out = net.generate(prompt(1), generation_config=config, return_dict_in_generate=True)
    assert cache_of(out).config.name == "paged_int8"
    assert config.cache_implementation == "paged_int8"


# ---- names in GenerationConfig


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_names_are_built_validated_saved_and_loaded(name: str, tmp_path: Path) -> None:
    config = GenerationConfig(cache_implementation=name, cache_config={"residual_length": 32})
    config.validate(strict=True)
    config.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert (loaded.cache_implementation, loaded.cache_config) == (name, {"residual_length": 32})
    config.update(cache_implementation=name)


def test_names_do_not_collide_with_transformers_own() -> None:
    theirs = {"paged", "static", "dynamic", "offloaded", "quantized", "sliding_window", "hybrid"}
    theirs |= set(configuration_utils.ALL_CACHE_IMPLEMENTATIONS) - set(cache_names())
    assert not theirs & set(cache_names())


def test_the_portable_spelling_loads_without_the_plugin(tmp_path: Path) -> None:
    net = copy.deepcopy(model("llama"))
    net.generation_config.cache_implementation = "quantized"
    net.generation_config.cache_config = {"backend": "hf_kvcache", "format": "paged_fp8"}
    net.save_pretrained(tmp_path)
    code = f"""
import torch
from transformers import AutoModelForCausalLM
net = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
assert net.generation_config.cache_implementation == "quantized"
try:
    net.generate(torch.tensor([[2, 3, 4]]), max_new_tokens=2)
except (TypeError, ValueError) as error:  # it depends on the version which of our options transformers stumbles over
    assert any(word in str(error) for word in ("hf_kvcache", "backend", "format")), error
else:
    raise SystemExit("nothing was said")
import hf_kvcache
out = net.generate(torch.tensor([[2, 3, 4]]), max_new_tokens=2, return_dict_in_generate=True)
print(type(out[{CACHE!r}]).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "PagedCache"


# ---- register and unregister


def touched_objects() -> dict[str, Any]:
    return {
        "names": configuration_utils.ALL_CACHE_IMPLEMENTATIONS,
        "validate": GenerationConfig.__dict__["validate"],
        "prepare": GenerationMixin.__dict__["_prepare_cache_for_generation"],
        **{f"attention {k}": v for k, v in AttentionInterface._global_mapping.items()},
        **{f"mask {k}": v for k, v in AttentionMaskInterface._global_mapping.items()},
    }


def test_register_is_idempotent_and_unregister_leaves_the_same_objects(registered: None) -> None:
    hf_kvcache.unregister()
    before = touched_objects()
    assert not [key for key in before if "hfkv" in key]
    assert not set(cache_names()) & set(before["names"])
    hf_kvcache.register()
    once = touched_objects()
    hf_kvcache.register()
    twice = touched_objects()
    assert set(cache_names()) <= set(once["names"])
    assert len(set(once["names"])) == len(once["names"])
    assert once.keys() == twice.keys()
    assert all(once[key] is twice[key] for key in once)
    hf_kvcache.unregister()
    hf_kvcache.unregister()
    after = touched_objects()
    assert before.keys() == after.keys()
    assert all(before[key] is after[key] for key in before)


def test_unregistered_names_are_refused_and_caches_still_work(registered: None) -> None:
    net = copy.deepcopy(model("llama"))
    expected = run(net).sequences
    hf_kvcache.unregister()
    with pytest.raises(ValueError, match="cache_implementation"):
        run(net, cache_implementation="paged_fp8")
    cache = hf_kvcache.make_cache("paged_exact", net.config)
    assert torch.equal(run(net, **{CACHE: cache}).sequences, expected)


def test_attach_and_detach_leave_the_model_as_it_was() -> None:
    net = copy.deepcopy(model("llama"))
    hf_kvcache.detach(net)
    hooks = (dict(net._forward_hooks), dict(net._forward_pre_hooks))
    before = set(net.__dict__)
    with hf_kvcache.attach(net) as same:
        assert same is net
        hf_kvcache.attach(net)
        assert len(net._forward_hooks) == len(hooks[0]) + 1
    assert (dict(net._forward_hooks), dict(net._forward_pre_hooks)) == hooks
    assert set(net.__dict__) == before
    hf_kvcache.detach(net)


# ---- the user's things are left alone


def test_cache_config_is_never_changed() -> None:
    options = {"backend": "hf_kvcache", "format": "paged_int8", "residual_length": 3}
    given = copy.deepcopy(options)
    deep = copy.deepcopy(model("llama").config)
    deep.num_hidden_layers = 4
    four = transformers.LlamaForCausalLM(deep).eval()
    assert len(cache_of(run(model("llama"), cache_implementation="quantized", cache_config=given))) == 2
    assert len(cache_of(run(four, cache_implementation="quantized", cache_config=given))) == 4
    assert given == options
    named = {"layers": {"0": "exact"}}
    run(model("llama"), cache_implementation="paged_fp8", cache_config=named)
    assert named == {"layers": {"0": "exact"}}


def test_the_models_generation_config_is_never_changed() -> None:
    net = model("llama")
    before = net.generation_config.to_dict()
    run(net, cache_implementation="paged_fp8")
    assert net.generation_config.to_dict() == before
    assert "hfkv" not in json.dumps(net.config.to_dict(), default=str)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_the_attention_implementation_is_the_users_again(attn: str) -> None:
    net = copy.deepcopy(model("llama", attn))
    seen = []
    hook = net.model.layers[0].self_attn.register_forward_hook(lambda *_: seen.append(net.config._attn_implementation))
    run(net, cache_implementation="paged_fp8")
    hook.remove()
    assert seen
    assert all(name.startswith("hfkv") for name in seen), "our attention ran"
    assert net.config._attn_implementation == attn
    assert not [key for key in net.config.__dict__ if "kvcache" in key]
    net.set_attn_implementation("eager")
    run(net, cache_implementation="paged_fp8")
    assert net.config._attn_implementation == "eager"


def test_the_attention_implementation_is_put_back_when_generate_raises() -> None:
    net = copy.deepcopy(model("llama"))

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory, say")

    hook = net.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory, say"):
        run(net, cache_implementation="paged_fp8")
    hook.remove()
    assert net.config._attn_implementation == "sdpa"
    assert torch.equal(run(net, cache_implementation="paged_exact").sequences, run(net).sequences)


def test_plain_calls_between_ours_are_plain() -> None:
    net = model("llama")
    expected = net(prompt(2)).logits
    run(net, cache_implementation="paged_fp8")
    assert torch.equal(net(prompt(2)).logits, expected)
    assert torch.equal(run(net).sequences, run(net, cache_implementation="paged_exact").sequences)


def test_two_models_do_not_mix() -> None:
    a, b = model("llama"), model("gemma2")
    first = [run(a, cache_implementation="paged_fp8").sequences, run(b, cache_implementation="paged_int8").sequences]
    second = [run(b, cache_implementation="paged_int8").sequences, run(a, cache_implementation="paged_fp8").sequences]
    assert torch.equal(first[0], second[1])
    assert torch.equal(first[1], second[0])


def test_threads_share_a_model() -> None:
    net = model("llama")
    names = ["paged_exact", "paged_fp8", "paged_int8", None]
    expected = [
        run(net, input_ids=prompt(1, 20, i), cache_implementation=name).sequences for i, name in enumerate(names)
    ]
    got: dict[int, torch.Tensor] = {}

    def work(i: int) -> None:
        got[i] = run(net, input_ids=prompt(1, 20, i), cache_implementation=names[i]).sequences

    at_once(work)
    assert [torch.equal(got[i], expected[i]) for i in range(4)] == [True] * 4
    assert net.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("attached", [False, True])
def test_the_cache_dies_with_the_result(attached: bool) -> None:
    net = copy.deepcopy(model("llama"))
    if attached:
        hf_kvcache.attach(net)
    out = run(net, cache_implementation="paged_fp8")
    cache = weakref.ref(cache_of(out))
    pool = cache().kinds[0].table.pool
    assert pool.live > 0
    del out
    gc.collect()
    assert cache() is None, "something holds the cache after generate"
    assert pool.live == 0


# ---- errors, in words


def test_a_near_miss_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="'paged_pf8' is unknown. Did you mean 'paged_fp8'"):
        GenerationConfig(cache_implementation="paged_pf8")
    with pytest.raises(ValueError, match="Did you mean 'paged_int8'"):
        run(model("llama"), cache_implementation="paged_int-8")
    with pytest.raises(ConfigError, match=r"'page_fp8' is not a cache of hf_kvcache. Did you mean 'paged_fp8'\?"):
        hf_kvcache.make_cache("page_fp8", model("llama").config)
    with pytest.raises(ValueError, match="nonsense"):
        GenerationConfig(cache_implementation="nonsense")


WRONG_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "mistyped": ({"page_sise": 32}, "no option 'page_sise'. Did you mean 'page_size'"),
    "unknown": ({"colour": 1}, "no option 'colour'. Accepted: page_size, residual_length"),
    "page size": ({"page_size": 24}, "page_size=24: accepted are multiples of 16"),
    "page size word": ({"page_size": "64"}, "page_size='64': accepted are whole numbers from 16"),
    "page size bool": ({"page_size": True}, "page_size=True"),
    "residual": ({"residual_length": -1}, "residual_length=-1: accepted are whole numbers from 0"),
    "sinks": ({"sinks": 1.5}, "sinks=1.5"),
    "nbits": ({"nbits": 3}, "nbits=3 does not fit 'fp8', whose keys have 8 bits"),
    "group": ({"q_group_size": 38}, "group=38 is not a positive multiple of 8"),
    "rotate": ({"rotate": "yes"}, "rotate='yes': accepted are True and False"),
    "key": ({"key": "fp9"}, "'fp9' is not a format. Did you mean 'fp8'"),
    "key field": ({"key": {"bit": 8}}, "key has no field 'bit'. Did you mean 'bits'"),
    "key kind": ({"key": {"kind": "nf4"}}, "kind='nf4' is unknown"),
    "key number": ({"value": 4}, "value=4: accepted are a format's name or a dict"),
    "layers": ({"layers": ["exact"]}, "layers=.*accepted is a dict"),
    "layer format": ({"layers": {0: "exakt"}}, "'exakt' is not a format. Did you mean 'exact'"),
    "layer word": ({"layers": {"first": "exact"}}, "layers has the key 'first'"),
    "layer number": ({"layers": {7: "exact"}}, "layers has the key 7, and the model 2 layers"),
    "layer number below": ({"layers": {-3: "exact"}}, "layers has the key -3, and the model 2 layers"),
    "max_cache_len": ({"max_cache_len": 0}, "max_cache_len=0: accepted are whole numbers from 1"),
    "impl": ({"impl": "cuda"}, "impl='cuda': accepted are auto"),
}


@pytest.mark.parametrize("case", WRONG_OPTIONS)
def test_wrong_options_are_named(case: str) -> None:
    options, words = WRONG_OPTIONS[case]
    with pytest.raises(ConfigError, match=words):
        hf_kvcache.make_cache("paged_fp8", model("llama").config, **options)
    with pytest.raises(ConfigError, match=words):
        run(model("llama"), cache_implementation="paged_fp8", cache_config=options)


def test_one_side_may_be_exact() -> None:
    cache = hf_kvcache.make_cache("paged_fp8", model("llama").config, key={"kind": "exact"}, value="int8")
    assert (cache.config.spec.key.kind, cache.config.spec.value.kind) == ("exact", "int")
    run(model("llama"), cache_implementation="paged_fp8", cache_config={"key": "exact"})


def test_options_of_none_are_the_defaults() -> None:
    assert resolve("paged_fp8", {"page_size": None, "layers": None, "key": None}) == resolve("paged_fp8")


@pytest.mark.parametrize("config", [BertConfig(), ViTConfig()], ids=["bert", "vit"])
def test_encoders_are_refused(config: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{type(config).__name__} is an encoder"):
        hf_kvcache.make_cache("paged_fp8", config)


def test_a_model_in_place_of_its_config_is_told() -> None:
    with pytest.raises(ConfigError, match="must be a model's config, got LlamaForCausalLM"):
        hf_kvcache.make_cache("paged_fp8", model("llama"))


def test_a_name_and_a_cache_are_one_too_many() -> None:
    cache = hf_kvcache.make_cache("paged_fp8", model("llama").config)
    with pytest.raises(ValueError, match="cache_implementation"):
        run(model("llama"), cache_implementation="paged_fp8", **{CACHE: cache})
    assert cache.get_seq_length() == 0


def test_a_cache_of_another_batch_is_refused_by_words() -> None:
    cache = hf_kvcache.make_cache("paged_fp8", model("llama").config)
    run(model("llama"), input_ids=prompt(2), **{CACHE: cache})
    with pytest.raises(CacheUseError, match="holds 2 rows and was given 3"):
        run(model("llama"), input_ids=prompt(3, 40), **{CACHE: cache})


def test_a_cache_of_another_model_is_refused_by_words() -> None:
    cache = hf_kvcache.make_cache("paged_fp8", model("llama").config)
    run(model("llama"), **{CACHE: cache})
    with pytest.raises(CacheUseError, match="is this cache used with another model"):
        run(model("qwen3"), input_ids=prompt(1, 40), **{CACHE: cache})


def test_a_dtype_change_in_mid_stream_is_refused_by_words() -> None:
    net = copy.deepcopy(model("llama"))
    cache = hf_kvcache.make_cache("paged_fp8", net.config)
    net(prompt(1), **{CACHE: cache})
    net.to(torch.bfloat16)
    with pytest.raises(CacheUseError, match="keep one dtype for the life of a cache"):
        net(prompt(1), **{CACHE: cache})
    assert net.config._attn_implementation == "sdpa"


def test_an_impl_that_cannot_run_says_why() -> None:
    with pytest.raises(ImplError, match="impl='triton' cannot serve this call: needs a GPU"):
        run(model("llama"), cache_implementation="paged_fp8", cache_config={"impl": "triton"})


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_the_impl_asked_for_is_the_one_that_ran(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_kvcache.ops import api

    ran = []
    load = api._load
    monkeypatch.setattr(api, "_load", lambda name: ran.append(name) or load(name))
    run(model("llama"), cache_implementation="paged_fp8", cache_config={"impl": impl})
    assert set(ran) == {impl}


def test_use_cache_false_builds_none() -> None:
    out = run(model("llama"), cache_implementation="paged_fp8", use_cache=False)
    assert CACHE not in out
    assert torch.equal(out.sequences, run(model("llama")).sequences)


def test_max_cache_len_comes_from_either_place() -> None:
    out = run(model("llama"), cache_implementation="paged_fp8", cache_config={"max_cache_len": 64})
    assert cache_of(out).layers[0].get_max_length() == 64
    with pytest.raises(CacheUseError, match="max_cache_len=22 columns, 22 are filled"):
        run(model("llama"), cache_implementation="paged_fp8", cache_config={"max_cache_len": 22})


def test_describe_says_what_each_layer_got() -> None:
    cache = hf_kvcache.make_cache("paged_fp8", model("gemma3").config, layers={-1: "exact"})
    text = cache.describe()
    assert "paged_fp8: 2 of 2 layers in pages" in text
    assert "the model's window of 12 tokens" in text
    assert "exact" in text
    uniform = hf_kvcache.make_cache("paged_int8", LlamaConfig(num_hidden_layers=5)).describe()
    assert "layer 0-4: PagedLayer int8 (all tokens)" in uniform


def test_a_cache_cannot_be_pickled_by_accident() -> None:
    import pickle

    cache = cache_of(run(model("llama"), cache_implementation="paged_fp8"))
    with pytest.raises(CacheUseError, match="cannot be pickled"):
        pickle.dumps(cache)
