"""Save a cache to one safetensors file, and load it into another process.

The manifest is JSON in the file's metadata: formats, shapes, versions, fingerprints and a SHA-256 over all of it and
every tensor. Nothing is unpickled, and nothing is allocated before the manifest and the header agree with the model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from typing import Any

import safetensors
import safetensors.torch
import torch
import transformers

from hf_kvcache.caches import PagedCache, build
from hf_kvcache.config import CacheConfig
from hf_kvcache.errors import ConfigError, KVCacheError, SavedCacheError
from hf_kvcache.fingerprint import config_fingerprint, model_fingerprint, tokenizer_fingerprint
from hf_kvcache.formats.spec import FormatSpec, SideSpec
from hf_kvcache.layers.paged import PagedLayer
from hf_kvcache.layers.parts import Exact
from hf_kvcache.memory.snapshot import restore_table, table_arrays

VERSION = 1
MOST = 2**20  # no head dim, page or residual is larger
_TABLE = ("starts", "first", "held", "pages")
_DTYPES = {torch.uint8: "U8", torch.int64: "I64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def save_cache(cache: PagedCache, path: str, model: Any = None, tokenizer: Any = None) -> None:
    """Write `cache` to a local path or an fsspec URL (`memory://`, `s3://`, ...).

    An old local file stays until the new one is whole.

    model, tokenizer: what made it; `load_cache` then refuses another one. Raises SavedCacheError for a cache with
    layers that are not in pages.
    """
    if len(cache.paged_layers) != len(cache.layers):
        raise SavedCacheError("only caches whose layers are all in pages can be saved; see cache.describe()")
    if any(layer.seen not in (0, layer.kind.table.seen) for layer in cache.paged_layers):
        raise SavedCacheError("a forward pass was cut short, and the layers hold different tokens: reset() the cache")
    tensors: dict[str, torch.Tensor] = {}
    physical = []
    for i, kind in enumerate(cache.kinds):
        arrays, held = table_arrays(kind.table)
        physical.append(held)
        tensors.update({f"kinds.{i}.{name}": torch.from_numpy(a) for name, a in arrays.items()})
    kinds, layers = list(cache.kinds), []
    for i, layer in enumerate(cache.paged_layers):
        k = kinds.index(layer.kind)
        entry: dict[str, Any] = {"kind": k, "seen": layer.seen, "layout": None}
        if layer.layout is not None and layer.store is not None and layer.seen:
            layout = layer.layout
            entry["layout"] = [layout.heads, layout.key_dim, layout.value_dim, layout.dtype, layout.transposed]
            pages = layer.store.read_pages(physical[k]).cpu() if len(physical[k]) else torch.empty(0, layout.page_bytes)
            tensors[f"layers.{i}.pages"] = pages.to(torch.uint8).contiguous()
            for name in ("ring", "sinks"):
                held_exact = getattr(layer, name)
                if held_exact is not None:
                    tensors[f"layers.{i}.{name}.keys"] = held_exact.keys.cpu().contiguous()
                    tensors[f"layers.{i}.{name}.values"] = held_exact.values.cpu().contiguous()
            if layer.steer is not None:  # a calibration travels with what it steered
                tensors[f"layers.{i}.steer"] = layer.steer.cpu().contiguous()
        layers.append(entry)
    manifest = {
        "version": VERSION,
        "written_by": {"torch": torch.__version__, "transformers": transformers.__version__},
        "config": _config_fields(cache.config),
        "kinds": [{"seen": kind.table.seen, "pages": len(held)} for kind, held in zip(kinds, physical, strict=True)],
        "layers": layers,
        "model": {"config": cache.model_fingerprint, "weights": None if model is None else model_fingerprint(model)},
        "tokenizer": None if tokenizer is None else tokenizer_fingerprint(tokenizer),
    }
    manifest["sha256"] = _checksum(manifest, tensors)
    _write(str(path), safetensors.torch.save(tensors, {"hf_kvcache": json.dumps(manifest)}))


def load_cache(path: str, model: Any, tokenizer: Any = None) -> PagedCache:
    """Read a cache that `save_cache` wrote, for `model`, onto its device.

    Raises SavedCacheError, with the reason, for a file that is damaged or does not fit.
    """
    data = _read(str(path))
    try:
        return _load(data, model, tokenizer)
    except SavedCacheError as error:
        raise SavedCacheError(f"{path}: {error}") from None
    except (KVCacheError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError, MemoryError) as error:
        raise SavedCacheError(f"{path}: not a cache that can be read ({type(error).__name__}: {error})") from None
    except safetensors.SafetensorError as error:
        raise SavedCacheError(f"{path}: not a whole safetensors file ({error})") from None


def _load(data: bytes, model: Any, tokenizer: Any) -> PagedCache:
    header = _header(data)
    manifest = json.loads(header["__metadata__"]["hf_kvcache"])
    if manifest["version"] != VERSION:
        raise SavedCacheError(f"its layout has version {manifest['version']}; this hf_kvcache reads {VERSION}")
    made = manifest["model"]
    if made["config"] != config_fingerprint(model.config):
        raise SavedCacheError("it was made by a model with another config")
    if made["weights"] is not None and made["weights"] != model_fingerprint(model):
        raise SavedCacheError("it was made by a model with other weights or adapters")
    if None not in (tokenizer, manifest["tokenizer"]) and manifest["tokenizer"] != tokenizer_fingerprint(tokenizer):
        raise SavedCacheError("it was made with another tokenizer")
    cache = build(_config(manifest["config"]), model.config)
    kinds, layers = cache.kinds, cache.paged_layers
    if (len(manifest["kinds"]), len(manifest["layers"])) != (len(kinds), len(layers)):
        raise SavedCacheError(f"it has {len(manifest['layers'])} layers, the model {len(layers)}")
    device = model.device
    for i, (layer, entry) in enumerate(zip(layers, manifest["layers"], strict=True)):
        if kinds.index(layer.kind) != entry["kind"]:
            raise SavedCacheError(f"layer {i} is of another kind than the model's")
        if entry["layout"] is None:
            continue
        heads, key_dim, value_dim, dtype, transposed = entry["layout"]
        if getattr(torch, dtype) != model.dtype or transposed != (device.type == "cuda"):
            where = "GPU" if transposed else "CPU"
            raise SavedCacheError(f"it holds {dtype}, {where} pages; the model is {model.dtype} on {device}")
        if not all(isinstance(n, int) and 0 < n < MOST for n in (heads, key_dim, value_dim)):
            raise SavedCacheError(f"layer {i} has absurd sizes {heads}, {key_dim}, {value_dim}")
        rows = header[f"kinds.{entry['kind']}.starts"]["shape"][0]
        k, v = (torch.empty(1, heads, 0, d, dtype=model.dtype, device=device) for d in (key_dim, value_dim))
        layer.lazy_initialization(k, v)
        assert layer.layout is not None
        for name in ("ring", "sinks"):
            for side, x in (("keys", k), ("values", v)):
                key = f"layers.{i}.{name}.{side}"
                if key in header:
                    count = layer.spec.sinks if name == "sinks" else header[key]["shape"][2]
                    _expect(header, key, x.dtype, [rows, heads, count, x.shape[3]])
        if f"layers.{i}.steer" in header:
            rank = header[f"layers.{i}.steer"]["shape"][3]
            _expect(header, f"layers.{i}.steer", torch.float32, [heads, key_dim, 2, rank])
        pages = manifest["kinds"][entry["kind"]]["pages"]
        _expect(header, f"layers.{i}.pages", torch.uint8, [pages, layer.layout.page_bytes])
    tensors = safetensors.torch.load(data)
    if manifest.pop("sha256") != _checksum(manifest, tensors):
        raise SavedCacheError("its checksum is wrong: the file was damaged or changed")
    physical = []
    for i, (kind, entry) in enumerate(zip(kinds, manifest["kinds"], strict=True)):
        arrays = {name: tensors[f"kinds.{i}.{name}"].numpy() for name in _TABLE}
        if not all(header[f"kinds.{i}.{name}"]["dtype"] == "I64" and arrays[name].ndim == 1 for name in _TABLE):
            raise SavedCacheError("its block table is not made of whole numbers")
        physical.append(restore_table(kind.table, arrays, entry["seen"], entry["pages"]))
    for i, (layer, entry) in enumerate(zip(layers, manifest["layers"], strict=True)):
        steer = tensors.get(f"layers.{i}.steer")
        layer.steer = None if steer is None else steer.to(device)
        if entry["layout"] is None:
            continue
        exact = {
            name: Exact(*(tensors[f"layers.{i}.{name}.{side}"].to(device) for side in ("keys", "values")))
            for name in ("ring", "sinks")
            if f"layers.{i}.{name}.keys" in tensors
        }
        _check_exact(layer, entry["seen"], exact.get("ring"), exact.get("sinks"), i)
        layer.restore(device, entry["seen"], physical[entry["kind"]], tensors[f"layers.{i}.pages"], **exact)
    return cache


def _config_fields(config: CacheConfig) -> dict[str, Any]:
    fields = dataclasses.asdict(dataclasses.replace(config, calibration=None, prefix_store=None))
    return {**fields, "given": sorted(config.given)}


def _config(given: dict[str, Any]) -> CacheConfig:
    def spec(fields: dict[str, Any]) -> FormatSpec:
        sides = {side: SideSpec(**fields[side]) for side in ("key", "value")}
        return FormatSpec(**{**fields, **sides})

    try:
        layers = tuple((int(i), spec(fields)) for i, fields in given["layers"])
        config = CacheConfig(**{**given, "spec": spec(given["spec"]), "layers": layers, "given": frozenset(given["given"])})
    except ConfigError as error:
        raise SavedCacheError(f"its format is unknown here: {error}") from None
    for one in (config.spec, *(one for _, one in config.layers)):
        sizes = (one.page_size, one.residual, one.sinks)
        if not all(type(n) is int and 0 <= n < MOST for n in sizes) or one.page_size % 16 or not one.page_size:
            raise SavedCacheError(f"its page size, residual and sinks are {sizes}: such a cache cannot be")
    for name in ("max_cache_len", "window"):
        size = getattr(config, name)
        if size is not None and (type(size) is not int or size < 1):
            raise SavedCacheError(f"its {name} is {size!r}")
    return config


def _header(data: bytes) -> dict[str, Any]:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise SavedCacheError("it ends before its header does")
    header = json.loads(data[8 : 8 + size])
    end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    if end != len(data) - 8 - size:
        raise SavedCacheError(f"its header speaks of {end} bytes of data, and it has {len(data) - 8 - size}")
    if "hf_kvcache" not in header.get("__metadata__", {}):
        raise SavedCacheError("it has no manifest of hf_kvcache")
    return header  # type: ignore[no-any-return]


def _expect(header: dict[str, Any], name: str, dtype: torch.dtype, shape: list[int]) -> None:
    found = header.get(name, {})
    if (found.get("dtype"), found.get("shape")) != (_DTYPES[dtype], shape):
        given = f"{found.get('dtype')} {found.get('shape')}"
        raise SavedCacheError(f"{name} must be {_DTYPES[dtype]} {shape}, the file has {given}")


def _check_exact(layer: PagedLayer, seen: int, ring: Exact | None, sinks: Exact | None, i: int) -> None:
    """Refuse a layer whose exact tokens are not all there."""
    table = layer.kind.table
    open_tokens = int((table.lengths - table.sealed).max(initial=0))
    slots = 0 if ring is None else ring.keys.shape[2]
    if ring is not None and ring.values.shape[2] != slots:
        raise SavedCacheError(f"layer {i}: its ring has {slots} keys and {ring.values.shape[2]} values")
    if seen != table.seen or slots < open_tokens or (slots > 0 and table.direct):
        raise SavedCacheError(
            f"layer {i} saw {seen} columns and its ring has {slots} slots; its table has {table.seen} and needs {open_tokens}"
        )
    if (sinks is None) != (layer.spec.sinks == 0):
        raise SavedCacheError(f"layer {i} has {layer.spec.sinks} sinks, and the file {'none' if sinks is None else 'some'}")


def _checksum(manifest: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(json.dumps({k: v for k, v in manifest.items() if k != "sha256"}, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        raw = tensors[name].contiguous().flatten().view(torch.uint8)
        digest.update(raw.numpy().data)
    return digest.hexdigest()


def _write(path: str, data: bytes) -> None:
    if "://" in path:
        import fsspec

        with fsspec.open(path, "wb") as file:  # object stores show a file once it is closed
            file.write(data)
        return
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(os.path.abspath(path)), prefix=".saving-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _read(path: str) -> bytes:
    try:
        if "://" in path:
            import fsspec

            with fsspec.open(path, "rb") as file:
                return bytes(file.read())
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise SavedCacheError(f"{path} cannot be read: {error}") from None
