"""What the Space's buttons do. Plain functions: bad input comes back as a sentence, never as an exception."""

from __future__ import annotations

import argparse
import functools
import html
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hf_kvcache
from hf_kvcache.evals.candidates import EXACT
from hf_kvcache.planning import command
from hf_kvcache.planning.chips import CHIPS
from hf_kvcache.planning.weights import WEIGHT_BITS

PROMPT = "A ferry on a cable needs no engine. It crosses the river because"
DEFAULT = ("paged_fp8", "paged_int4", "paged_int2")
HEADER = ("cache", "KiB held", "tokens/s", "same tokens at first")
MOST_TOKENS, MOST_CHARACTERS = 128, 4000
Table = list[list[str]]


def choices() -> list[str]:
    """Cache names to choose from."""
    return list(hf_kvcache.cache_names())


def chips() -> list[str]:
    """Chip names to choose from."""
    return list(CHIPS)


def weight_kinds() -> list[str]:
    """How weights may be stored."""
    return list(WEIGHT_BITS)


@functools.lru_cache(maxsize=1)
def load(name: str) -> Any:
    """The model and tokenizer, once."""
    from hf_kvcache.evals import models

    return models.load(name)


def generate(model_name: str, prompt: str | None, caches: Sequence[str] | None, tokens: float | None) -> tuple[Table, str]:
    """Rows of `HEADER` and the texts as Markdown; no rows and a sentence where something is wrong."""
    prompt, wanted = (prompt or "").strip(), [name for name in caches or () if name in choices()]
    if not prompt:
        return [], "Write a prompt first."
    if len(prompt) > MOST_CHARACTERS:
        return [], f"The prompt has {len(prompt):,} characters; {MOST_CHARACTERS:,} are the most."
    if tokens is None or not 1 <= tokens <= MOST_TOKENS:
        return [], f"Tokens: from 1 to {MOST_TOKENS}."
    try:
        model, tokenizer = load(model_name)
    except hf_kvcache.KVCacheError as error:
        return [], f"The model is not here: {error}"
    return _side_by_side(model, tokenizer, prompt, [EXACT, *wanted], int(tokens))


def _side_by_side(model: Any, tokenizer: Any, prompt: str, names: list[str], count: int) -> tuple[Table, str]:
    from hf_kvcache.evals.candidates import builder, held_bytes, parse
    from hf_kvcache.evals.generation import divergence
    from hf_kvcache.evals.protocol import Reader

    inputs = tokenizer(prompt, return_tensors="pt")
    start_at = inputs["input_ids"].shape[1]
    rows: Table = []
    texts: list[str] = []
    exact: list[int] = []
    for name in names:
        try:
            cache = builder(parse(name), model.config)()
            start = time.perf_counter()
            given = {Reader(model).argument: cache, "max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
            tokens = model.generate(**inputs, **given)[0, start_at:].tolist()
            seconds = time.perf_counter() - start
        except (ValueError, RuntimeError, hf_kvcache.KVCacheError) as error:
            texts.append(f"**{name}** does not work here: {html.escape(str(error).splitlines()[0])}")
            continue
        exact = exact or tokens
        rows.append([name, f"{held_bytes(cache) / 1024:,.0f}", f"{count / seconds:.1f}", f"{divergence(tokens, exact)} of {count}"])
        texts.append(f"**{name}**: {html.escape(tokenizer.decode(tokens))}")
    return rows, "\n\n".join(texts)


def plan(
    layers: float | None,
    kv_heads: float | None,
    head_dim: float | None,
    billions: float | None,
    batch: float | None,
    context: float | None,
    chip: str | None,
    stored: str | None,
) -> str:
    """What `hf-kvcache plan` prints for these numbers, or why it cannot."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    command.add_arguments(parser)
    given = {
        "--layers": layers, "--kv-heads": kv_heads, "--head-dim": head_dim, "--batch": batch, "--context": context,
    }  # fmt: skip
    missing = [name for name, value in given.items() if value is None]
    if missing:
        return f"{missing[0]} lacks a number."
    try:
        arguments = [f"{name}={int(value)}" for name, value in given.items() if value is not None]
        arguments += [f"--params={billions:g}B"] if billions else []
        arguments += [f"--gpu={chip}"] if chip else []
        return command.text_of(command.answer(parser.parse_args([*arguments, f"--weights={stored or '16bit'}"])))
    except (ValueError, OverflowError, argparse.ArgumentError) as error:  # what is refused is a ValueError too
        return str(error)


def measured(path: Path) -> str:
    """A page of `hf-kvcache report` in a frame of its own, or how to make one."""
    if not path.is_file():
        return "<p>No report is here: <code>hf-kvcache report results.jsonl</code> makes one.</p>"
    page = html.escape(path.read_text(encoding="utf-8"), quote=True)
    return f'<iframe srcdoc="{page}" style="width:100%;height:80vh;border:0" title="Measured"></iframe>'
