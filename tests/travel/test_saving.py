"""Saved caches: the same numbers in another process, and nothing that does not fit is let in."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hf_kvcache
from hf_kvcache import calibration, saving
from hf_kvcache.errors import KVCacheError, SavedCacheError
from tests.grids import CACHE, model, prompt

QUIET = {"do_sample": False, "pad_token_id": 0}
KINDS = {
    "direct": ("paged_exact", {"page_size": 16}),
    "fp8": ("paged_fp8", {"page_size": 16}),
    "ring": ("paged_int8", {"page_size": 16, "residual_length": 9, "sinks": 2}),
}


def filled(kind: str, which: str = "llama", length: int = 41):
    name, options = KINDS[kind]
    cache = hf_kvcache.make_cache(name, model(which).config, **options)
    ids = prompt(2, length)
    ids[1, :33] = ids[0, :33]
    ids = model(which).generate(ids, max_new_tokens=6, **{CACHE: cache}, **QUIET)
    return cache, ids


@pytest.mark.parametrize("which", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_cache_goes_on_as_if_never_saved(kind: str, which: str, tmp_path: Path) -> None:
    cache, ids = filled(kind, which)
    cache.save(tmp_path / "it", model(which))
    loaded = hf_kvcache.load_cache(tmp_path / "it", model(which))
    assert loaded.stats()["pages"]["live"] == cache.stats()["pages"]["live"]
    steps = []
    for one in (cache, loaded):
        hf_kvcache.attach(model(which))
        steps.append([])
        token = ids[:, -1:]
        for _ in range(32):
            logits = model(which)(token, **{CACHE: one}).logits[:, -1:]
            steps[-1].append(logits)
            token = logits.argmax(-1)
    assert all(torch.equal(a, b) for a, b in zip(*steps, strict=True))


def test_a_fresh_process_goes_on(tmp_path: Path) -> None:
    cache, ids = filled("ring")
    cache.save(tmp_path / "it")
    torch.save(ids, tmp_path / "ids")
    code = (
        "import sys, torch, hf_kvcache; torch.set_num_threads(1); from tests.grids import model, CACHE\n"
        "llama, ids = model('llama'), torch.load(sys.argv[1] + '/ids')\n"
        "cache = hf_kvcache.load_cache(sys.argv[1] + '/it', llama)\n"
        "out = llama.generate(ids, max_new_tokens=32, do_sample=False, pad_token_id=0, **{CACHE: cache})\n"
        "sys.stdout.write(str(out.tolist()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = model("llama").generate(ids, max_new_tokens=32, **{CACHE: cache}, **QUIET)
    assert json.loads(done.stdout) == expected.tolist()


def test_empty_caches_and_layers_that_were_never_updated(tmp_path: Path) -> None:
    llama = model("llama")
    cache = hf_kvcache.make_cache("paged_fp8", llama.config)
    cache.save(tmp_path / "empty")
    assert hf_kvcache.load_cache(tmp_path / "empty", llama).get_seq_length() == 0
    k = torch.randn(1, 2, 70, 16)
    cache.update(k, k, 0)
    cache.save(tmp_path / "half")
    loaded = hf_kvcache.load_cache(tmp_path / "half", llama)
    assert [layer.seen for layer in loaded.paged_layers] == [70, 0]
    assert torch.equal(loaded.layers[0].keys, cache.layers[0].keys)


def test_urls(tmp_path: Path) -> None:
    cache, _ = filled("fp8")
    cache.save("memory://caches/one")
    loaded = hf_kvcache.load_cache("memory://caches/one", model("llama"))
    assert torch.equal(loaded.layers[0].keys, cache.layers[0].keys)


def rewrite(data: bytes, change) -> bytes:
    """The file with another manifest, its checksum made right again."""
    import safetensors.torch

    tensors = safetensors.torch.load(data)
    manifest = json.loads(saving._header(data)["__metadata__"]["hf_kvcache"])
    change(manifest, tensors)
    manifest["sha256"] = saving._checksum(manifest, tensors)
    return safetensors.torch.save(tensors, {"hf_kvcache": json.dumps(manifest)})


WRONG = {
    "version": (lambda m, t: m.update(version=9), "version 9"),
    "config": (lambda m, t: m["model"].update(config="0" * 64), "another config"),
    "weights": (lambda m, t: m["model"].update(weights="0" * 64), "other weights"),
    "layers": (lambda m, t: m["layers"].pop(), "it has 1 layers, the model 2"),
    "format": (lambda m, t: m["config"]["spec"]["key"].update(kind="fp9"), "its format is unknown here"),
    "sizes": (lambda m, t: m["layers"][0]["layout"].__setitem__(1, 2**60), "absurd sizes"),
    "dtype": (lambda m, t: m["layers"][0]["layout"].__setitem__(3, "float16"), "it holds float16"),
    "page count": (lambda m, t: m["kinds"][0].update(pages=10**12), "pages must be"),
    "table": (lambda m, t: t["kinds.0.held"].fill_(10**9), "contradicts itself"),
    "ring": (lambda m, t: t.update({"layers.0.ring.keys": torch.zeros(9, 2, 16, 16)}), "ring.keys must be"),
    "ring gone": (lambda m, t: [t.pop(f"layers.0.ring.{side}") for side in ("keys", "values")], "its ring has 0 slots"),
    "sinks gone": (lambda m, t: [t.pop(f"layers.0.sinks.{side}") for side in ("keys", "values")], "has 2 sinks"),
    "ring dtype": (lambda m, t: t.update({"layers.0.ring.keys": t["layers.0.ring.keys"].half()}), "ring.keys must be F32"),
    "columns": (lambda m, t: m["kinds"][0].update(seen=2**40), "contradicts itself"),
    "layer's columns": (lambda m, t: m["layers"][0].update(seen=3), "saw 3 columns"),
    "page size": (lambda m, t: m["config"]["spec"].update(page_size=10**9), "such a cache cannot be"),
    "table dtype": (lambda m, t: t.update({"kinds.0.held": t["kinds.0.held"].double()}), "whole numbers"),
    "pages let go": (lambda m, t: t["kinds.0.first"].fill_(1), "contradicts itself"),
}


@pytest.mark.parametrize("what", WRONG)
def test_manifests_that_do_not_fit_are_refused_in_words(what: str, tmp_path: Path) -> None:
    cache, _ = filled("ring")
    cache.save(tmp_path / "it")
    change, words = WRONG[what]
    (tmp_path / "it").write_bytes(rewrite((tmp_path / "it").read_bytes(), change))
    with pytest.raises(SavedCacheError, match=words):
        hf_kvcache.load_cache(tmp_path / "it", model("llama"))


def test_damage_is_refused(tmp_path: Path) -> None:
    cache, _ = filled("fp8")
    cache.save(tmp_path / "it")
    data = (tmp_path / "it").read_bytes()
    for cut in (0, 4, 100, len(data) // 2, len(data) - 1):
        (tmp_path / "it").write_bytes(data[:cut])
        with pytest.raises(SavedCacheError):
            hf_kvcache.load_cache(tmp_path / "it", model("llama"))
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        at, bit = int(torch.randint(len(data), (), generator=generator)), int(torch.randint(8, (), generator=generator))
        fuzzed = bytearray(data)
        fuzzed[at % 4000 if bit < 4 else at] ^= 1 << bit
        (tmp_path / "it").write_bytes(bytes(fuzzed))
        with pytest.raises(SavedCacheError):
            hf_kvcache.load_cache(tmp_path / "it", model("llama"))


def numbers_in(node) -> list[tuple]:
    """Where in a manifest the numbers are: (container, key)."""
    if not isinstance(node, dict | list):
        return []
    pairs = list(node.items() if isinstance(node, dict) else enumerate(node))
    here = [(node, key) for key, x in pairs if type(x) is int]
    return here + [place for _, x in pairs for place in numbers_in(x)]


@pytest.mark.parametrize("kind", KINDS)
def test_crafted_files_are_refused_or_work(kind: str, tmp_path: Path) -> None:
    """Their checksum is right; what is in them is not. Nothing may be read outside of its memory."""
    cache, ids = filled(kind, "gemma3")
    cache.save(tmp_path / "it")
    data = (tmp_path / "it").read_bytes()
    generator, loaded = random.Random(3), 0

    def change(manifest, tensors) -> None:
        value = generator.choice([-1, 0, 1, 2, 3, 16, 33, 64, 4096, 2**20 - 16, 2**31, 2**62])
        if generator.random() < 0.5:
            container, key = generator.choice(numbers_in(manifest))
            container[key] = value
            return
        name = generator.choice(sorted(tensors))
        x = tensors[name]
        if x.dtype == torch.int64 and x.numel() and generator.random() < 0.7:
            x.view(-1)[generator.randrange(x.numel())] = value
        elif x.dim():
            axis = generator.randrange(x.dim())
            tensors[name] = x.narrow(axis, 0, generator.randrange(x.shape[axis] + 1)).contiguous()

    for _ in range(120):
        (tmp_path / "it").write_bytes(rewrite(data, change))
        try:
            got = hf_kvcache.load_cache(tmp_path / "it", model("gemma3"))
        except SavedCacheError:
            continue
        loaded += 1
        try:
            model("gemma3")(ids[:1, -1:].expand(got.kinds[0].table.batch, 1), **{CACHE: got})
        except KVCacheError:
            continue
    assert loaded < 60


def test_a_killed_save_leaves_the_old_file(tmp_path: Path) -> None:
    code = (
        "import os, sys, signal, torch, hf_kvcache; from tests.grids import model\n"
        "cache = hf_kvcache.make_cache('paged_fp8', model('llama').config)\n"
        "cache.update(torch.ones(1, 2, 70, 16), torch.ones(1, 2, 70, 16), 0)\n"
        "cache.save(sys.argv[1])\n"
        "class Half:\n"
        "    def __init__(self, handle): self.handle = handle\n"
        "    def __enter__(self): return self\n"
        "    def __exit__(self, *_): pass\n"
        "    def write(self, data):\n"
        "        os.write(self.handle, data[: len(data) // 2]); os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.fdopen = lambda handle, mode: Half(handle)\n"
        "cache.update(torch.ones(1, 2, 1, 16), torch.ones(1, 2, 1, 16), 0)\n"
        "cache.save(sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "it")],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": "."},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2, "the half that was written is there, beside it"
    assert hf_kvcache.load_cache(tmp_path / "it", model("llama")).layers[0].seen == 70


def test_a_calibration_travels_along(tmp_path: Path) -> None:
    llama, ids = model("llama"), prompt(1, 90)
    calibration.write(tmp_path / "c.json", {i: torch.randn(2, 16, 2) for i in range(2)}, {})
    options = {"calibration": str(tmp_path / "c.json"), "page_size": 32, "residual_length": 9}
    cache = hf_kvcache.make_cache("paged_int4", llama.config, **options)
    ids = llama.generate(ids, max_new_tokens=3, **{CACHE: cache}, **QUIET)
    cache.save(tmp_path / "it")
    (tmp_path / "c.json").unlink()
    loaded = hf_kvcache.load_cache(tmp_path / "it", llama)
    for one in (cache, loaded):
        llama.generate(ids, max_new_tokens=60, **{CACHE: one}, **QUIET)
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(cache.layers, loaded.layers, strict=True))


def test_a_forward_that_was_cut_short_is_not_saved(tmp_path: Path) -> None:
    cache, _ = filled("ring")
    cache.update(torch.ones(2, 2, 1, 16), torch.ones(2, 2, 1, 16), 0)
    with pytest.raises(SavedCacheError, match="cut short"):
        cache.save(tmp_path / "it")


def test_a_save_that_dies_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _ = filled("fp8")
    cache.save(tmp_path / "it")
    before = (tmp_path / "it").read_bytes()

    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        copy.deepcopy(cache).save(tmp_path / "it")
    assert (tmp_path / "it").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["it"]
    with pytest.raises(SavedCacheError, match="cannot be read"):
        hf_kvcache.load_cache(tmp_path / "none", model("llama"))
