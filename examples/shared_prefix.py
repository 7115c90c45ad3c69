"""One document, many questions: the document is read once, kept encoded, and every further question starts from it.

    python examples/shared_prefix.py                     # SmolLM2-135M, see the README for how to get it
    python examples/shared_prefix.py path/or/hub-id
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import hf_kvcache
from hf_kvcache.evals import models

DOCUMENT = Path(__file__).parent.parent / "evals" / "data" / "ferry.txt"
QUESTIONS = ("How wide is the river?", "What colour is the ferry?", "What moves it across?")
TOKENS = 700  # of the document


def main(name: str = models.SMOLLM2) -> None:
    """Ask each question, and say how long its answer took and what was found."""
    model, tokenizer = models.load(name)
    document = tokenizer.decode(tokenizer(DOCUMENT.read_text(encoding="utf-8"))["input_ids"][:TOKENS])
    store = hf_kvcache.PrefixStore(max_bytes=1 << 28, chunk=64)
    for question in QUESTIONS:
        inputs = tokenizer(f"{document}\n\nQuestion: {question}\nAnswer:", return_tensors="pt")
        begin = time.perf_counter()
        ids = model.generate(
            **inputs, cache_implementation="paged_fp8", cache_config={"prefix_store": store}, max_new_tokens=12, do_sample=False
        )
        seconds = time.perf_counter() - begin
        print(f"{question} {tokenizer.decode(ids[0, inputs['input_ids'].shape[1] :]).strip()!r} ({seconds:.1f} s)")
    held = store.stats()
    print(f"{held['tokens_found']} of {held['tokens_asked']} tokens found; {held['bytes'] / 2**20:.1f} MiB held")


if __name__ == "__main__":
    main(*sys.argv[1:])
