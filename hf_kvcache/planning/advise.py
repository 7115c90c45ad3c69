"""`hf-kvcache advise`: from the bottleneck to a `cache_implementation`, its options and, past one machine, an engine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from hf_kvcache.errors import ConfigError
from hf_kvcache.planning import chips, command
from hf_kvcache.planning.fit import DYNAMIC

ABOUT = "Which cache to use for a bottleneck, a model and a machine, and what to do when they are outgrown."
EPILOG = """\
examples:
  hf-kvcache advise meta-llama/Llama-3.1-8B --bottleneck throughput --batch 32 --context 8192 --gpu h100
  hf-kvcache advise --layers 32 --kv-heads 8 --head-dim 128 --params 8B --bottleneck cost --memory 16GiB --json
  hf-kvcache advise ./my-model/config.json          (asks what is missing, on a terminal)

bottlenecks:
  first-token   time until the first token: prompts are long, or the same again and again
  throughput    tokens per second over many sequences
  cost          the model and its cache have to fit a small machine
"""
BOTTLENECKS = ("first-token", "throughput", "cost")
LONG = 16_384  # tokens of a prompt whose activations are worth bounding
# From the least change of the model's answers to the most (README, "What it costs and saves").
LADDER = ("paged_exact", "paged_int8", "paged_k8v4", "paged_int4", "paged_k4v3", "paged_k4v2", "paged_int2")


@dataclass(frozen=True)
class Advice:
    """What to do. cache: a name for `cache_implementation`, or None where nothing fits; options: its `cache_config`.

    generate: further arguments of `generate`. chips: how many of the machine are needed with `cache`, or with the
    smallest one where none fits. engines: command lines for when one process is outgrown. steps: the reasons, in order.
    """

    bottleneck: str
    cache: str | None
    options: dict[str, Any]
    generate: dict[str, Any]
    chips: int
    engines: list[str]
    steps: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    command.add_model(parser)
    add("--bottleneck", choices=BOTTLENECKS, help="what to improve (asked for on a terminal)")
    add("--batch", type=int, help="sequences at once (asked for on a terminal)")
    add("--context", type=int, help="tokens in each, prompt and answer (asked for on a terminal)")


def run(options: argparse.Namespace) -> int:
    """Ask what is missing if someone is there to answer, then print the advice; 0. Raises ConfigError."""
    complete(options, input if sys.stdin.isatty() and not options.json else None)
    found = command.answer(options)
    advice = advise(options.bottleneck, found)
    print(json.dumps(asdict(advice), indent=2) if options.json else text_of(advice, found))
    return 0


def complete(options: argparse.Namespace, ask: Callable[[str], str] | None) -> None:
    """Fill in what was not given, by `ask` where there is someone to ask. Raises ConfigError for what stays open."""
    questions: dict[str, tuple[str, Callable[[str], Any]]] = {
        "bottleneck": (f"What is the bottleneck ({', '.join(BOTTLENECKS)})? ", _bottleneck),
        "batch": ("How many sequences at once? ", _count),
        "context": ("How many tokens in each, prompt and answer? ", _count),
    }
    if options.gpu is None and options.memory is None:
        questions["memory"] = ("How much memory, or which chip (24GiB, h100)? ", str.strip)
    if ask is None:
        open_ = [f"--{name}" for name in questions if getattr(options, name) is None]
        if open_:
            raise ConfigError(f"{', '.join(open_)} must be given where nobody can be asked; --memory may be --gpu CHIP")
    for name, (question, read) in questions.items():
        if getattr(options, name) is None and ask is not None:
            setattr(options, name, read(ask(question)))
    if options.memory is not None and options.memory[:1].isalpha():  # a chip's name
        options.gpu, options.memory = options.memory, None


def _bottleneck(text: str) -> str:
    if text.strip() not in BOTTLENECKS:
        raise ConfigError(f"{text!r} is no bottleneck. Accepted: {', '.join(BOTTLENECKS)}")
    return text.strip()


def _count(text: str) -> int:
    try:
        return int(text.replace(",", ""))
    except ValueError:
        raise ConfigError(f"{text!r}: accepted are whole numbers from 1") from None


def advise(bottleneck: str, found: dict[str, Any]) -> Advice:
    """Walk the tree for `command.answer`'s findings, which have a machine."""
    rows = {row["name"]: row for row in found["caches"]}
    batch, context, usable = found["batch"], found["context"], found["machine"]["usable"]
    weights = found["weights"]["bytes"] if found["weights"] else 0
    fitting = [name for name in LADDER if rows[name]["fits"]]
    steps = [
        f"weights take {chips.readable(weights)}, an exact cache of {batch} x {context:,} tokens "
        f"{chips.readable(rows[DYNAMIC]['nbytes'])}, and {chips.readable(usable)} are there to use"
    ]
    cache = None
    if fitting:
        cache = _choose(bottleneck, fitting, rows, batch, context, steps)
    else:
        steps.append(f"nothing fits, not even {LADDER[-1]} with {chips.readable(rows[LADDER[-1]]['nbytes'])}")
        if weights > usable:
            steps.append("the weights alone are too large: store them in fewer bits (--weights 4bit) or take more chips")
        elif rows[LADDER[-1]]["largest_batch"]:
            steps.append(f"{rows[LADDER[-1]]['largest_batch']} sequences at a time would fit {LADDER[-1]}")
    if cache is not None and "2" in cache:
        steps.append("2-bit codes change answers: measure it first, hf-kvcache eval perplexity --caches " + cache)
    if bottleneck == "first-token":
        steps.append("prefill is bound by arithmetic, which a smaller cache does not spare: compute less of it")
        steps.append("keep the cache of a prompt that comes again and pass a copy of it, so that its tokens are computed once")
    generate: dict[str, Any] = {}
    if context >= LONG:
        generate["prefill_chunk_size"] = 2048
        steps.append("a long prompt fed in pieces needs less memory beside the cache, in about the same time")
    size = rows[cache or LADDER[-1]]["nbytes"]
    count = _power_of_two(-(-(weights + size) // (usable // found["machine"]["count"])))
    return Advice(bottleneck, cache, {}, generate, count, _engines(found, cache, count, bottleneck), steps)


def _choose(
    bottleneck: str, fitting: list[str], rows: dict[str, dict[str, Any]], batch: int, context: int, steps: list[str]
) -> str:
    mildest = fitting[0]
    if bottleneck == "cost":
        steps.append(f"{mildest} changes the answers least among those that fit")
        return mildest
    if bottleneck == "first-token":
        steps.append(f"{mildest}: the first token does not wait for the cache, so nothing is gained below what has to fit")
        return mildest
    if batch * context < 4096:
        steps.append(f"{mildest}: {batch * context:,} tokens are read quickly in any format; the weights are the bottleneck")
        return mildest
    steps.append("each step reads the whole cache: fewer bytes are more tokens per second, and more sequences fit")
    choice = next((name for name in fitting if name != "paged_exact"), mildest)
    largest = rows[choice]["largest_batch"]
    steps.append(f"{choice}: up to {largest:,} sequences" if largest else f"{choice}: any number of sequences")
    return choice


def _power_of_two(count: int) -> int:
    return 1 << (max(count, 1) - 1).bit_length()


def _engines(found: dict[str, Any], cache: str | None, count: int, bottleneck: str) -> list[str]:
    """Command lines of engines that serve many users or many chips; only where they are wanted."""
    if cache is not None and count <= found["machine"]["count"] and bottleneck != "throughput":
        return []
    given = found["model"]["name"]
    name = "MODEL" if given.endswith(".json") or "/" not in given else given
    eight = "" if cache == "paged_exact" else " --kv-cache-dtype fp8"
    parallel = f" --tensor-parallel-size {count}" if count > 1 else ""
    reuse = " --enable-prefix-caching" if bottleneck == "first-token" else ""
    batch, context = found["batch"], found["context"]
    lines = [f"vllm serve {name} --max-model-len {context} --max-num-seqs {batch}{eight}{parallel}{reuse}"]
    if count == 1:
        lines.insert(0, f"transformers serve {name} --continuous-batching")
    return lines


def text_of(advice: Advice, found: dict[str, Any]) -> str:
    """The advice for people: reasons, then the code."""
    lines = [f"{i}. {step}" for i, step in enumerate(advice.steps, 1)]
    if advice.cache is None:
        lines += ["", f"chips needed with {LADDER[-1]}: {advice.chips} x {found['machine']['name']}"]
    else:
        arguments = "".join(f", {key}={value!r}" for key, value in advice.generate.items())
        lines += ["", "import hf_kvcache", f'model.generate(**inputs, cache_implementation="{advice.cache}"{arguments})']
    if advice.engines:
        lines += ["", "for many users at once, or more than one chip:", *(f"  {line}" for line in advice.engines)]
    return "\n".join(lines)
