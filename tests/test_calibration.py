"""A calibration from the command to the cache: written, read, used, refused."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_kvcache
from hf_kvcache import calibration
from hf_kvcache.errors import CacheUseError, ConfigError, UnsupportedModelError
from hf_kvcache.integration.bases import OBSERVER
from hf_kvcache.integration.calibrating import query_directions
from tests.grids import CACHE


def tiny(heads: int = 2, **options: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=heads, **options)).eval()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny()


@pytest.fixture
def path(model, tmp_path):
    found = query_directions(model, [torch.randint(0, 64, (2, 40))], rank=2)
    calibration.write(tmp_path / "c.json", found, {"model": "tiny"})
    return str(tmp_path / "c.json")


def test_directions_make_up_the_second_moment(model) -> None:
    """With as many directions as there are channels but one, `I + M M'` is the moment of the queries itself."""
    ids = torch.randint(0, 64, (2, 40))
    seen = {}
    before = model.config._attn_implementation
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    base = ALL_ATTENTION_FUNCTIONS[before]

    def spy(module, query, *args, **kwargs):
        seen[module.layer_idx] = query
        return base(module, query, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, before, spy)
        found = query_directions(model, [ids], rank=15)
    for layer, m in found.items():
        q = seen[layer].unflatten(1, (2, 2)).transpose(0, 1).flatten(1, 3)
        moment = (q.transpose(1, 2) @ q).double() / q.shape[1]
        whole = torch.eye(16) + m @ m.transpose(1, 2)
        trace = [x.diagonal(dim1=1, dim2=2).sum(1)[:, None, None] for x in (whole, moment)]
        assert torch.allclose(whole / trace[0], moment / trace[1], atol=1e-6)
    assert model.config._attn_implementation == before
    assert OBSERVER not in ALL_ATTENTION_FUNCTIONS


def test_a_failing_model_gets_its_attention_back(model) -> None:
    with pytest.raises(IndexError):
        query_directions(model, [torch.full((1, 4), 99)])
    assert model.config._attn_implementation == "sdpa"


def test_eager_is_refused_in_words() -> None:
    eager = tiny()
    eager.set_attn_implementation("eager")
    with pytest.raises(UnsupportedModelError, match="sdpa"):
        query_directions(eager, [torch.zeros(1, 4, dtype=torch.int64)])


@pytest.mark.parametrize("impl", ["auto", "torch"])
def test_a_cache_uses_it(model, path, impl) -> None:
    ids = torch.randint(0, 64, (1, 200), generator=torch.Generator().manual_seed(1))
    options = {"residual_length": 0, "impl": impl}

    def keys(**more: object) -> torch.Tensor:
        cache = hf_kvcache.make_cache("paged_int2", model.config, **options, **more)
        with hf_kvcache.attach(model), torch.no_grad():
            model(ids, **{CACHE: cache})
        return cache.layers[1].keys

    plain, steered = keys(), keys(calibration=path)
    assert not torch.equal(plain, steered)
    out = model.generate(ids, max_new_tokens=4, cache_implementation="paged_int2", cache_config={"calibration": path})
    assert out.shape[1] == 204


def test_both_encoders_steer_alike(model, path) -> None:
    pytest.importorskip("numba")
    ids = torch.randint(0, 64, (2, 150))
    held = []
    for impl in ("numba", "torch"):
        cache = hf_kvcache.make_cache("paged_int4", model.config, impl=impl, calibration=path)
        with torch.no_grad():
            model(ids, **{CACHE: cache})
        held.append(torch.cat([layer.store.read_pages(layer.kind.table.all_pages()) for layer in cache.layers]))
    assert torch.equal(*held)


def test_another_models_calibration_is_refused(path) -> None:
    other = tiny(heads=4)
    cache = hf_kvcache.make_cache("paged_int4", other.config, calibration=path)
    with pytest.raises(CacheUseError, match="2 heads .* another model"):
        other(torch.zeros(1, 4, dtype=torch.int64), **{CACHE: cache})
    assert cache.get_seq_length() == 0


def test_a_name_without_such_keys_is_refused(model, path) -> None:
    with pytest.raises(ConfigError, match="int8 has none"):
        hf_kvcache.make_cache("paged_int8", model.config, calibration=path)


WRONG_LAYERS = ([1], {"a": [[[1.0]]]}, {"0": [[1.0]]}, {"0": [[[float("nan")]]]}, {"0": [[["x"]]]}, {"0": [[[1.0] * 9]]})
WRONG = ["", "[]", "{}", '{"kind": "other", "layers": {}}']


@pytest.mark.parametrize("content", [*WRONG, *(json.dumps({"kind": calibration.KIND, "layers": x}) for x in WRONG_LAYERS)])
def test_other_files_are_refused(model, tmp_path, content) -> None:
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(ConfigError, match="is not a calibration"):
        hf_kvcache.make_cache("paged_int4", model.config, calibration=str(tmp_path / "c.json"))


def test_missing_files_and_folders_are_refused(model, tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        hf_kvcache.make_cache("paged_int4", model.config, calibration=str(tmp_path / "no.json"))
    with pytest.raises(ConfigError, match="cannot be written"):
        calibration.write(tmp_path / "no" / "c.json", {}, {})
    with pytest.raises(ConfigError, match="accepted is the path"):
        hf_kvcache.make_cache("paged_int4", model.config, calibration=3)
