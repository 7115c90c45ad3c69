"""Weights in 4 bits by bitsandbytes, keys and values in 4 bits by hf_kvcache: both at once.

    pip install bitsandbytes accelerate
    python examples/bnb_4bit_weights.py --model HuggingFaceTB/SmolLM2-135M-Instruct --cache paged_int4
"""

import argparse
import importlib.util
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import hf_kvcache
from hf_kvcache.planning.chips import readable


def main(arguments: list[str] | None = None) -> int:
    """Load in 4 bits, generate, print what weights and cache take; 0, or 2 without bitsandbytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="Hub id or folder")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--cache", default="paged_int4", choices=hf_kvcache.cache_names(), metavar="NAME")
    parser.add_argument("--tokens", type=int, default=32, help="to generate (%(default)s)")
    options = parser.parse_args(arguments)
    missing = [name for name in ("bitsandbytes", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"error: {missing[0]} is not installed: pip install bitsandbytes accelerate", file=sys.stderr)
        return 2

    dtype = torch.bfloat16
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, quantization_config=four_bits)
    inputs = tokenizer(options.prompt, return_tensors="pt").to(model.device)
    output = model.generate(
        **inputs,
        cache_implementation=options.cache,
        max_new_tokens=options.tokens,
        do_sample=False,
        return_dict_in_generate=True,
    )
    cache = output["cache"] if "cache" in output else output["past_key_values"]  # before transformers 5.24
    print(tokenizer.decode(output.sequences[0]))
    print(f"weights {readable(model.get_memory_footprint())}; embeddings and head stay in 16 bits")
    print(f"cache   {readable(cache.nbytes)} for {cache.get_seq_length()} tokens in {options.cache}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
